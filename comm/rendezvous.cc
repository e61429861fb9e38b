#include "evenkeel/comm/rendezvous.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace evenkeel::comm {
namespace {

// Sleeps while *word == expected, until `until_ns` at most. Spurious returns are fine.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, int64_t until_ns) {
  timespec until = {static_cast<time_t>(until_ns / 1000000000), static_cast<long>(until_ns % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_BITSET_PRIVATE, expected, &until, nullptr,
          FUTEX_BITSET_MATCH_ANY);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

int64_t MonotonicNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

void Rendezvous::WakeAll() {
  if (sleepers_.load(std::memory_order_seq_cst) > 0) FutexWakeAll(&word_);
}

void Rendezvous::Arrive(int rank, uint32_t phase) {
  arrived_phase_[rank].store(phase + 1, std::memory_order_seq_cst);
  const uint64_t before = arrivals_.fetch_add(1, std::memory_order_seq_cst);
  if ((before + 1) % static_cast<uint64_t>(size_) != 0) return;
  uint32_t seen = word_.load(std::memory_order_seq_cst);
  do {
    if ((seen & 1u) != 0) return;
  } while (!word_.compare_exchange_weak(seen, seen + 2, std::memory_order_seq_cst));
  WakeAll();
}

bool Rendezvous::IsOver(uint32_t phase, Outcome* outcome) const {
  const uint32_t seen = word_.load(std::memory_order_seq_cst);
  if (PhaseIs(seen, phase) && (seen & 1u) == 0) return false;
  *outcome = PhaseIs(seen, phase) ? Outcome::kBroken : Outcome::kComplete;
  return true;
}

bool Rendezvous::IsSoonOver(uint32_t phase, Outcome* outcome) const {
  if (IsOver(phase, outcome)) return true;
  const int64_t until_ns = MonotonicNs() + wait_ns_;
  do {
    // A look at the clock every so many looks at the word.
    for (int look = 0; look < (yields_ ? 1 : 64); ++look) {
      if (yields_) {
        sched_yield();
      } else {
        Pause();
      }
      if (IsOver(phase, outcome)) return true;
    }
  } while (MonotonicNs() < until_ns);
  return false;
}

Rendezvous::Outcome Rendezvous::Wait(uint32_t phase, int64_t until_ns) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  Outcome outcome = Outcome::kTimeout;
  while (true) {
    const uint32_t seen = word_.load(std::memory_order_seq_cst);
    if (!PhaseIs(seen, phase)) {
      outcome = Outcome::kComplete;
      break;
    }
    if ((seen & 1u) != 0) {
      outcome = Outcome::kBroken;
      break;
    }
    if (MonotonicNs() >= until_ns) break;
    FutexWait(&word_, seen, until_ns);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return outcome;
}

bool Rendezvous::BreakPhase(uint32_t phase, bool wake) {
  uint32_t seen = (phase & 0x7fffffffu) << 1;
  if (!word_.compare_exchange_strong(seen, seen | 1u, std::memory_order_seq_cst)) return false;
  if (wake) WakeAll();
  return true;
}

bool Rendezvous::Break() {
  const uint32_t seen = word_.fetch_or(1u, std::memory_order_seq_cst);
  if ((seen & 1u) != 0) return false;
  WakeAll();
  return true;
}

std::vector<int> Rendezvous::Absent(uint32_t phase) const {
  std::vector<int> absent;
  for (int rank = 0; rank < size_; ++rank) {
    if (phases_of(rank) <= phase) absent.push_back(rank);
  }
  return absent;
}

}  // namespace evenkeel::comm

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

// In a rank's word: the phase that it has not come to is broken.
constexpr uint64_t kMark = 1;

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
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  FutexWakeAll(&wakes_);
}

// Both look from the last rank on: where ranks take turns on few processors they mostly come in order, so that one look
// tells that somebody is missing.
bool Rendezvous::AllHaveCome(uint64_t phase) const {
  for (int rank = size_ - 1; rank >= 0; --rank) {
    if (phases_of(rank) <= phase) return false;
  }
  return true;
}

void Rendezvous::Arrive(int rank, uint64_t phase) {
  uint64_t expected = phase << 1;
  // A marked word stays as it is.
  if (!words_[rank].word.compare_exchange_strong(expected, (phase + 1) << 1, std::memory_order_seq_cst)) return;
  // Who arrives last sees all others here. A sleeper counts itself before it looks: it sees the last one, or is seen.
  if (sleepers_.load(std::memory_order_seq_cst) > 0 && AllHaveCome(phase)) WakeAll();
}

bool Rendezvous::Look(uint64_t phase, int* unseen, Outcome* outcome) {
  if (tells_ && completed_.load(std::memory_order_acquire) > phase) *unseen = 0;
  for (; *unseen > 0; --*unseen) {
    const uint64_t word = words_[*unseen - 1].word.load(std::memory_order_seq_cst);
    if ((word >> 1) > phase) continue;
    if ((word & kMark) == 0 && !is_broken()) return false;
    break;
  }
  if (*unseen == 0) {
    if (tells_ && completed_.load(std::memory_order_relaxed) <= phase) {
      completed_.store(phase + 1, std::memory_order_release);
    }
    *outcome = Outcome::kComplete;
    return true;
  }
  // Broken, but is it this phase? A mark on the word of a rank that has come to it is for a later one.
  for (int rank = 0; rank < *unseen; ++rank) {
    const uint64_t word = words_[rank].word.load(std::memory_order_seq_cst);
    if ((word >> 1) > phase || (word & kMark) == 0) continue;
    // The mark may be here before the breaker has said so.
    broken_.store(true, std::memory_order_seq_cst);
    *outcome = Outcome::kBroken;
    return true;
  }
  return false;
}

bool Rendezvous::IsOver(uint64_t phase, Outcome* outcome) {
  int unseen = size_;
  return Look(phase, &unseen, outcome);
}

bool Rendezvous::IsSoonOver(uint64_t phase, Outcome* outcome) {
  int unseen = size_;
  if (Look(phase, &unseen, outcome)) return true;
  int64_t until_ns = 0;
  do {
    // A look at the clock every so many looks at the words.
    for (int look = 0; look < (yields_ ? 1 : 64); ++look) {
      if (yields_) {
        sched_yield();
      } else {
        Pause();
      }
      if (Look(phase, &unseen, outcome)) return true;
    }
    if (until_ns == 0) until_ns = MonotonicNs() + wait_ns_;
  } while (MonotonicNs() < until_ns);
  return false;
}

Rendezvous::Outcome Rendezvous::Wait(uint64_t phase, int64_t until_ns) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  Outcome outcome = Outcome::kTimeout;
  int unseen = size_;
  while (true) {
    const uint32_t seen = wakes_.load(std::memory_order_seq_cst);
    if (Look(phase, &unseen, &outcome) || MonotonicNs() >= until_ns) break;
    FutexWait(&wakes_, seen, until_ns);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return outcome;
}

bool Rendezvous::BreakPhase(uint64_t phase, bool wake) {
  if (is_broken()) return false;
  for (Word& rank : words_) {
    uint64_t word = rank.word.load(std::memory_order_seq_cst);
    while ((word >> 1) <= phase) {
      if (!rank.word.compare_exchange_weak(word, word | kMark, std::memory_order_seq_cst)) continue;
      broken_.store(true, std::memory_order_seq_cst);
      if (wake) WakeAll();
      return true;
    }
  }
  return false;
}

bool Rendezvous::Break() {
  if (is_broken()) return false;
  for (Word& rank : words_) rank.word.fetch_or(kMark, std::memory_order_seq_cst);
  broken_.store(true, std::memory_order_seq_cst);
  WakeAll();
  return true;
}

std::vector<int> Rendezvous::Absent(uint64_t phase) const {
  std::vector<int> absent;
  for (int rank = 0; rank < size_; ++rank) {
    if (phases_of(rank) <= phase) absent.push_back(rank);
  }
  return absent;
}

}  // namespace evenkeel::comm

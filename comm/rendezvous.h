// A barrier on which ranks sleep, which can be broken, and which knows who is absent.
//
//   rendezvous.Arrive(rank, phase);
//   switch (rendezvous.Wait(phase, limit_at)) ...
//
// Phases count up from 0; every rank arrives once a phase. Either a phase completes for all ranks or for none: giving
// up and completing exclude each other.
#ifndef EVENKEEL_COMM_RENDEZVOUS_H_
#define EVENKEEL_COMM_RENDEZVOUS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace evenkeel::comm {

// Nanoseconds on the monotonic clock.
int64_t MonotonicNs();

// Thread-safe.
class Rendezvous {
 public:
  enum class Outcome { kComplete, kBroken, kTimeout };

  // Before it sleeps, a rank waits for about `wait_ns`, spinning, or with `yields` giving its turn to other threads,
  // where there are fewer processors than ranks.
  Rendezvous(int size, int64_t wait_ns, bool yields)
      : size_(size), wait_ns_(wait_ns), yields_(yields), arrived_phase_(size) {}

  // `rank` has come to `phase`.
  void Arrive(int rank, uint32_t phase);

  // Whether `phase` needs no more waiting.
  bool IsOver(uint32_t phase, Outcome* outcome) const;
  // The same, after waiting a little without sleeping: a turn for other threads costs half of a sleep and a wake-up.
  bool IsSoonOver(uint32_t phase, Outcome* outcome) const;

  // Sleeps until `phase` completes, the rendezvous breaks, or `until_ns` on the monotonic clock.
  Outcome Wait(uint32_t phase, int64_t until_ns);

  // Breaks while `phase` is incomplete: true when this call did it. Without `wake` sleepers learn at the next WakeAll.
  bool BreakPhase(uint32_t phase, bool wake = true);
  // Breaks now: true when this call did it.
  bool Break();
  bool is_broken() const { return (word_.load(std::memory_order_seq_cst) & 1u) != 0; }

  // How many phases `rank` has come to.
  uint32_t phases_of(int rank) const { return arrived_phase_[rank].load(std::memory_order_seq_cst); }
  std::vector<int> Absent(uint32_t phase) const;
  void WakeAll();

 private:
  bool PhaseIs(uint32_t word, uint32_t phase) const { return (word >> 1) == (phase & 0x7fffffffu); }

  const int size_;
  const int64_t wait_ns_;
  const bool yields_;
  // (phases completed << 1) | broken. What sleepers watch.
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<int32_t> sleepers_{0};
  alignas(64) std::atomic<uint64_t> arrivals_{0};
  std::vector<std::atomic<uint32_t>> arrived_phase_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_RENDEZVOUS_H_

// A barrier on which ranks sleep, which can be broken, and which knows who is absent.
//
//   rendezvous.Arrive(rank, phase);
//   switch (rendezvous.Wait(phase, limit_at)) ...
//
// Phases count up from 0; every rank arrives once a phase. Either a phase completes for all ranks or for none: giving
// up and completing exclude each other.
//
// Each rank has a word in a cache line of its own: how many phases it has come to. It alone counts there, the others
// look, and a phase is complete when all words have passed it: one line travels from each rank to each other, and no
// line is written by two. Who breaks a phase marks the word of a rank that has not come to it; a marked word counts no
// further, so the phase can never complete. In large groups who has seen all words tells the others.
#ifndef EVENKEEL_COMM_RENDEZVOUS_H_
#define EVENKEEL_COMM_RENDEZVOUS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace evenkeel::comm {

// Nanoseconds on the monotonic clock.
int64_t MonotonicNs();

// Thread-safe, but of BreakPhase and Break one call at a time.
class Rendezvous {
 public:
  enum class Outcome { kComplete, kBroken, kTimeout };

  // Before it sleeps, a rank waits for about `wait_ns`, spinning, or with `yields` giving its turn to other threads,
  // where there are fewer processors than ranks.
  Rendezvous(int size, int64_t wait_ns, bool yields)
      : size_(size), wait_ns_(wait_ns), yields_(yields), tells_(size > 8), words_(static_cast<size_t>(size)) {}

  // `rank` has come to `phase`.
  void Arrive(int rank, uint64_t phase);

  // Whether `phase` needs no more waiting.
  bool IsOver(uint64_t phase, Outcome* outcome);
  // The same, after waiting a little without sleeping: a turn for other threads costs half of a sleep and a wake-up.
  bool IsSoonOver(uint64_t phase, Outcome* outcome);

  // Sleeps until `phase` completes, the rendezvous breaks, or `until_ns` on the monotonic clock.
  Outcome Wait(uint64_t phase, int64_t until_ns);

  // Breaks while `phase` is incomplete: true when this call did it. Without `wake` sleepers learn at the next WakeAll.
  bool BreakPhase(uint64_t phase, bool wake = true);
  // Breaks now: true when this call did it.
  bool Break();
  // Whoever got kBroken from anywhere finds it true, and with it everybody whose look is ordered after that.
  bool is_broken() const { return broken_.load(std::memory_order_seq_cst); }

  // How many phases `rank` has come to.
  uint64_t phases_of(int rank) const { return words_[rank].word.load(std::memory_order_seq_cst) >> 1; }
  std::vector<int> Absent(uint64_t phase) const;
  void WakeAll();

 private:
  // (phases come to << 1) | marked.
  struct alignas(64) Word {
    std::atomic<uint64_t> word{0};
  };

  bool AllHaveCome(uint64_t phase) const;
  // `unseen`: how many ranks, from 0 on, have not been seen in `phase` so far; size_ at the first look.
  bool Look(uint64_t phase, int* unseen, Outcome* outcome);

  const int size_;
  const int64_t wait_ns_;
  const bool yields_;
  const bool tells_;  // `completed_` is kept
  std::vector<Word> words_;
  // Read by all at every look, written seldom: when ranks fall asleep, are woken, or the rendezvous breaks.
  // Lines apart by padding: alignment gcc's AddressSanitizer does not keep on the stack.
  [[maybe_unused]] std::byte before_[64];
  std::atomic<bool> broken_{false};
  std::atomic<int32_t> sleepers_{0};
  std::atomic<uint32_t> wakes_{0};  // what sleepers watch
  [[maybe_unused]] std::byte between_[64];
  std::atomic<uint64_t> completed_{0};  // phases that somebody has seen complete: a hint, may lag
  [[maybe_unused]] std::byte after_[64];
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_RENDEZVOUS_H_

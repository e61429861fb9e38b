#include "evenkeel/comm/rendezvous.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using Outcome = Rendezvous::Outcome;

// Far enough that only a lost wake-up gets there.
int64_t Never() { return MonotonicNs() + int64_t{60} * 1'000'000'000; }

Outcome Look(Rendezvous& rendezvous, uint64_t phase) {
  Outcome outcome = Outcome::kTimeout;
  return rendezvous.IsOver(phase, &outcome) ? outcome : Outcome::kTimeout;
}

std::vector<int> Sizes() { return {1, 2, 3, 4, 8, 9, 16}; }

TEST(RendezvousTest, CompletesWhenTheLastHasComeAndNamesTheAbsent) {
  for (const int size : Sizes()) {
    Rendezvous rendezvous(size, 0, false);
    for (uint64_t phase = 0; phase < 3; ++phase) {
      for (int rank = size - 1; rank >= 0; --rank) {
        EXPECT_EQ(Look(rendezvous, phase), Outcome::kTimeout);
        EXPECT_EQ(rendezvous.Absent(phase).size(), static_cast<size_t>(rank + 1));
        rendezvous.Arrive(rank, phase);
      }
      EXPECT_EQ(Look(rendezvous, phase), Outcome::kComplete);
      EXPECT_TRUE(rendezvous.Absent(phase).empty());
      EXPECT_FALSE(rendezvous.BreakPhase(phase)) << "it has completed";
    }
  }
}

TEST(RendezvousTest, ABrokenPhaseNeverCompletesAndACompletePhaseNeverBreaks) {
  for (const int size : Sizes()) {
    if (size == 1) continue;
    for (int absent = 0; absent < size; ++absent) {
      for (const bool all : {false, true}) {
        Rendezvous rendezvous(size, 0, false);
        for (int rank = 0; rank < size; ++rank) rendezvous.Arrive(rank, 0);
        for (int rank = 0; rank < size; ++rank) {
          if (rank != absent) rendezvous.Arrive(rank, 1);
        }
        EXPECT_TRUE(all ? rendezvous.Break() : rendezvous.BreakPhase(1));
        EXPECT_FALSE(all ? rendezvous.Break() : rendezvous.BreakPhase(1)) << "twice";
        EXPECT_TRUE(rendezvous.is_broken());
        rendezvous.Arrive(absent, 1);
        EXPECT_EQ(Look(rendezvous, 0), Outcome::kComplete);
        EXPECT_EQ(Look(rendezvous, 1), Outcome::kBroken);
        EXPECT_EQ(rendezvous.Wait(1, 0), Outcome::kBroken);
      }
    }
  }
}

TEST(RendezvousTest, WaitEndsAtItsLimit) {
  Rendezvous rendezvous(2, 0, false);
  rendezvous.Arrive(0, 0);
  EXPECT_EQ(rendezvous.Wait(0, MonotonicNs()), Outcome::kTimeout);
  rendezvous.Arrive(1, 0);
  EXPECT_EQ(rendezvous.Wait(0, MonotonicNs()), Outcome::kComplete);
}

// Ranks that come and sleep phase after phase while another thread breaks at some moment: all must see the same phases
// complete, and the same one broken; none may sleep on.
void BreakSomewhere(int size, bool whole, int64_t wait_ns, bool yields, int spins) {
  constexpr uint64_t kPhases = 200;
  Rendezvous rendezvous(size, wait_ns, yields);
  std::vector<uint64_t> completed(static_cast<size_t>(size), 0);
  std::vector<Outcome> last(static_cast<size_t>(size), Outcome::kComplete);
  std::atomic<uint64_t> reached{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      for (uint64_t phase = 0; phase < kPhases && last[rank] == Outcome::kComplete; ++phase) {
        if (rank == 0) reached.store(phase);
        rendezvous.Arrive(rank, phase);
        if (!rendezvous.IsSoonOver(phase, &last[rank])) last[rank] = rendezvous.Wait(phase, Never());
        if (last[rank] == Outcome::kComplete) ++completed[rank];
        if (last[rank] == Outcome::kBroken && !rendezvous.is_broken()) last[rank] = Outcome::kTimeout;
      }
    });
  }
  for (int i = 0; i < spins; ++i) (void)reached.load();
  const bool broke = whole ? rendezvous.Break() : rendezvous.BreakPhase(reached.load());
  if (!broke) rendezvous.Break();  // that phase has completed in time
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(completed[rank], completed[0]) << "rank " << rank << " of " << size;
    EXPECT_EQ(last[rank], last[0]) << "rank " << rank << " of " << size;
  }
}

TEST(RendezvousTest, AllRanksSeeTheSamePhaseBreak) {
  for (int round = 0; round < 60; ++round) {
    for (const int size : {2, 3, 9}) {
      BreakSomewhere(size, round % 2 == 0, round % 3 == 0 ? 0 : 5'000, size > 2, round * round * 50);
    }
  }
}

}  // namespace
}  // namespace evenkeel::comm

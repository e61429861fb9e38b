// Who sleeps where, and what to say when all do: the deadlocks of the ranks of one process.
//
// Internal to in_process.cc, which knows when nobody runs. Calls are made with the world's mutex held.
#ifndef EVENKEEL_COMM_IN_PROCESS_DEADLOCK_H_
#define EVENKEEL_COMM_IN_PROCESS_DEADLOCK_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "evenkeel/comm/in_process_gathering.h"
#include "evenkeel/comm/in_process_group.h"

namespace evenkeel::comm {

// Where an entered rank sleeps. Written by its thread, read by whoever looks for a deadlock.
struct Seat {
  std::atomic<InProcessGroup*> group{nullptr};  // null: running
  std::atomic<uint64_t> phase{0};
  std::atomic<int> operation{0};
  std::atomic<int64_t> sequence{0};
  Gathering* gathering = nullptr;  // waits for others to make a group; guarded by the world's mutex
  bool entered = false;            // guarded by the world's mutex
  bool left = false;               // likewise
};

// A blocked rank, as the search for a deadlock saw it: in a call of `group`, or in the making of a group.
struct Sleeper {
  // `world_rank` in the numbering that messages of its group use.
  int IndexOf(int world_rank) const;

  InProcessGroup* group = nullptr;
  Gathering* gathering = nullptr;
  uint64_t phase = 0;
  std::vector<int> waits_for = {};  // world ranks, at least one
  std::string text = {};            // "waits in barrier of group tp [0,1] epoch=3 seq=8"
};

// The rank of `seat`, none unless it is blocked. Reads the seat once.
std::optional<Sleeper> LookAt(const Seat& seat);

// Breaks every call and ends every gathering of `sleepers` (by world rank, not empty) with the cycle they wait in.
void ReportDeadlock(const std::map<int, Sleeper>& sleepers, Gatherings* gatherings);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_IN_PROCESS_DEADLOCK_H_

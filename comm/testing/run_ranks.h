// Runs one thread per rank. Ranks return Status; only the calling thread asserts.
//
//   std::vector<absl::Status> statuses = RunRanks(*world, [&](Backend& rank) -> absl::Status {
//     EK_ASSIGN_OR_RETURN(auto group, rank.CreateGroup(WorldGroup(rank.size())));
//     return group->Barrier(*streams[rank.rank()]);
//   });
//   for (const absl::Status& status : statuses) EXPECT_OK(status);
#ifndef EVENKEEL_COMM_TESTING_RUN_RANKS_H_
#define EVENKEEL_COMM_TESTING_RUN_RANKS_H_

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"

namespace evenkeel::comm {

// The group of all ranks of a world of `size`.
Group WorldGroup(int size);

// InProcessWorld::Run. Bounded by the deadlines of the calls inside.
std::vector<absl::Status> RunRanks(InProcessWorld& world, const std::function<absl::Status(Backend&)>& body);

// The first status that is not OK, preferring causes over echoes (Aborted); OK when all are.
absl::Status FirstFailure(const std::vector<absl::Status>& statuses);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_RUN_RANKS_H_

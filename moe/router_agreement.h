// What the ranks of a routing decision tell one another: the capacity, and that all lanes decided alike.
#ifndef EVENKEEL_MOE_ROUTER_AGREEMENT_H_
#define EVENKEEL_MOE_ROUTER_AGREEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel::moe {

// The largest `need` of all ranks of `ep` (null or one rank: `need` itself): one i64 all-reduce. Where EP groups of
// whole experts cut TP groups (T and E divide neither the other), the maximum travels on through lanes and EP groups, a
// number of rounds that depends on T and E alone, until all that must agree have it. `local` is this rank's own state;
// a rank that failed takes part all the same, so nobody waits for it, and every other rank gets FailedPrecondition.
// Returns `local` where it is an error.
absl::StatusOr<int64_t> AgreeOnCapacity(absl::string_view layer, const absl::Status& local, int64_t need,
                                        comm::Communicator* ep, comm::Communicator* tp, Device* device, Stream& stream);

// OK when all lanes of `tp` (null or one rank: trivially) made bit-identical decisions: four i64 gathered. Otherwise
// every lane gets the same FailedPrecondition naming the first token that differs and what each lane decided for it.
// `local` as above; `decision` is not looked at where it is an error.
absl::Status CompareOverLanes(absl::string_view layer, const absl::Status& local, const RoutingDecision& decision,
                              comm::Communicator* tp, Device* device, Stream& stream);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROUTER_AGREEMENT_H_

// Many ranks in one process under a virtual clock, in an order that a seed decides: the same product code as over MPI
// (agreement, payload in pieces, notices, limits), on a simulated network and with simulated faults.
//
//   EK_ASSIGN_OR_RETURN(auto world, SimWorld::Create({.world_size = 4, .seed = 17}));
//   std::vector<absl::Status> statuses = world->Run([&](Backend& rank) -> absl::Status { ... });
//   // world->log_digest() is equal whenever options and body are: a seed replays a failure exactly
//
// Ranks are threads run hand over hand: one at a time, and the scheduler chooses who goes on where a rank waits (and,
// in random order, where it sends). When all wait, the clock jumps to the next arrival or limit, so that a deadline of
// thirty seconds costs nothing. Calls must be made on the rank's own thread: streams are inline.
#ifndef EVENKEEL_COMM_SIM_SIM_WORLD_H_
#define EVENKEEL_COMM_SIM_SIM_WORLD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/sim/sim_options.h"

namespace evenkeel::comm {

// One simulated world, good for one Run. Not thread-safe.
class SimWorld {
 public:
  // InvalidArgument when a number is out of range or a fault names a rank outside the world.
  static absl::StatusOr<std::unique_ptr<SimWorld>> Create(const SimOptions& options);
  virtual ~SimWorld() = default;

  // Calls `body` as every rank and returns what each gave, by rank. A rank whose body has returned has left in good
  // order. Ranks that die or stop for ever return what their failing calls make of it.
  virtual std::vector<absl::Status> Run(const std::function<absl::Status(Backend&)>& body) = 0;

  // Virtual time since the start.
  virtual absl::Duration now() const = 0;
  // The virtual time at which each rank's body returned.
  virtual std::vector<absl::Duration> end_times() const = 0;
  // Of every event: who sent and received what, when, who ran.
  virtual uint64_t log_digest() const = 0;
  virtual int64_t num_messages() const = 0;
  // How many of options.faults came to pass.
  virtual int64_t num_faults() const = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_SIM_SIM_WORLD_H_

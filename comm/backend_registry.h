// Backends by name: the same program on threads, on processes or on simulated ranks, whichever is linked.
//
//   EK_ASSIGN_OR_RETURN(const auto world, CreateWorld("in_process", {.world_size = 4}));
//   for (const RankStatus& rank : world->Run([](Backend& backend) -> absl::Status { ... })) ...
//
// //comm brings "in_process", //comm/mpi "mpi", //comm/sim "sim". A program adds its own in a library with
// alwayslink = True:
//   static const bool registered = RegisterBackend("mine", CreateMyWorld);
#ifndef EVENKEEL_COMM_BACKEND_REGISTRY_H_
#define EVENKEEL_COMM_BACKEND_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

// What every backend understands; each has more options of its own.
struct WorldOptions {
  int world_size = 0;                               // 0: as many ranks as the launcher started, where there is one
  std::optional<Topology> topology = std::nullopt;  // default: the backend's
  absl::Duration deadline = absl::Seconds(30);      // of every call until SetDeadline, and of CreateGroup
  bool two_level = false;                           // see HostCommunicator::Options
  std::string config = {};                          // text that must be equal on all ranks, where they are processes
  uint64_t seed = 1;                                // of the order of events, where they are simulated
  StragglerOptions stragglers = {};                 // of ranks that come late to calls
};

struct RankStatus {
  int rank = 0;
  absl::Status status;
};

// What ranks 0, 1, ... gave, with their numbers.
std::vector<RankStatus> ByRank(std::vector<absl::Status> statuses);

// A world of ranks, some or all of which live in this process.
class NamedWorld {
 public:
  virtual ~NamedWorld() = default;
  virtual int size() const = 0;
  // Calls `body` as every rank of this process, each on a thread of its own or on the caller's, and returns what each
  // gave, by rank. Good for one call.
  virtual std::vector<RankStatus> Run(const std::function<absl::Status(Backend&)>& body) = 0;
};

using WorldFactory = std::function<absl::StatusOr<std::unique_ptr<NamedWorld>>(const WorldOptions&)>;

// Dies when the name is taken. For static initialisation; true.
bool RegisterBackend(absl::string_view name, WorldFactory factory);

// Unimplemented naming the target to link when the library has that backend but the program does not; NotFound listing
// what is linked for any other name; else what the backend's own options give.
absl::StatusOr<std::unique_ptr<NamedWorld>> CreateWorld(absl::string_view name, const WorldOptions& options);

// Of the linked backends, in alphabetical order.
std::vector<std::string> BackendNames();

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_BACKEND_REGISTRY_H_

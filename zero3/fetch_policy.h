// How the parameters of a unit become whole: the one interface behind which fetch policies live.
//
// All policies give the same bits to the same caller API and differ in what they cost (P parameters, W ranks, host
// operations of one fetch + release):
//   per_parameter  P (2W + 7) + W + 3   a shard per parameter; narrow and concatenate; events and frees per parameter
//   coalesced      P (W + 5) + W + 3    the same copies, but one event per leaf and direction and one release
//   flat           at most 6            the unit's own buffer is sharded: 1 collective, 0 copies, 0 allocations
//   replicated     0                    every rank owns everything (no sharding; for comparison)
// A program adds its own by defining a FetchPolicy and, in a library with alwayslink = True,
//   EVENKEEL_REGISTER_FETCH_POLICY(MyPolicy);
#ifndef EVENKEEL_ZERO3_FETCH_POLICY_H_
#define EVENKEEL_ZERO3_FETCH_POLICY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/unit_layout.h"

namespace evenkeel::zero3 {

// Gathers one unit of one rank, again and again. The coordinator calls, for every time the unit is needed:
//   Gather, then Join once before its first use, then Release after its last use, then Reclaim before more memory is
//   allocated. Calls are serialised by the coordinator.
class UnitGatherer {
 public:
  virtual ~UnitGatherer() = default;

  // Enqueues on `comm` what makes the parameters whole. `shard`: this rank's weight shard (u8). `destination`: the
  // planned block of gathered_bytes, or an empty view where the policy brings its own memory. Collective.
  virtual absl::Status Gather(ConstTensorView shard, TensorView destination, Stream& comm) = 0;
  // Makes `compute` wait for the gather where the policy has edges of its own (see FetchPolicy::leaf_edges).
  virtual absl::Status Join(Stream& compute) = 0;
  // The last user on `compute` has been enqueued.
  virtual absl::Status Release(Stream& compute) = 0;
  // Frees what a joined gather no longer needs (staging) and what a released unit no longer needs. The host may block
  // until the streams have passed the last use.
  virtual absl::Status Reclaim() = 0;
  // The whole parameters, in unit order. Valid between Gather and Release.
  virtual absl::Span<const ConstTensorView> views() const = 0;
};

// What a gatherer may use. All of it outlives the gatherer.
struct GathererContext {
  std::vector<ParameterSpec> parameters;  // of the unit
  UnitLayout layout;
  int rank = 0;                         // in the group
  comm::Communicator* group = nullptr;  // layout.world_size ranks
  Device* device = nullptr;
  // layout.staging_bytes at least, shared by all units and used on the comm stream only.
  TensorView staging;
};

// One way to store and gather. Stateless and thread-safe.
class FetchPolicy {
 public:
  virtual ~FetchPolicy() = default;
  virtual absl::string_view name() const = 0;
  // Pure: where everything lives. InvalidArgument when sizes overflow.
  virtual absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec> parameters, int world_size) const = 0;
  // Pure: what a fetch + release of a unit costs in the steady state, edges included.
  virtual FetchCost Cost(absl::Span<const ParameterSpec> parameters, int world_size) const = 0;
  // True: the coordinator makes one edge per leaf and direction. False: the gatherer makes its own.
  virtual bool leaf_edges() const = 0;
  virtual absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext context) const = 0;
};

// Dies when the name is taken. Returns true, for static initialisation. `policy` is never deleted.
bool RegisterFetchPolicy(const FetchPolicy* policy);
// NotFound listing what is linked.
absl::StatusOr<const FetchPolicy*> FindFetchPolicy(absl::string_view name);
std::vector<std::string> FetchPolicyNames();

#define EVENKEEL_REGISTER_FETCH_POLICY(Type) \
  [[maybe_unused]] static const bool ek_registered_##Type = ::evenkeel::zero3::RegisterFetchPolicy(new Type)

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_FETCH_POLICY_H_

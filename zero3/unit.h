// A storage unit of one rank: its layout, its shards, and the pieces that optimizer, reader and checkpoint walk over.
//
// A unit holds the parameters that have the same users (leaves), the same family and the same persistence: they are
// gathered by one collective and reduced by one. Most leaves are one unit. Units are made by BuildUnits, in an order
// that is the same on every rank.
#ifndef EVENKEEL_ZERO3_UNIT_H_
#define EVENKEEL_ZERO3_UNIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/unit_layout.h"

namespace evenkeel::zero3 {

// Which parameters stay gathered: at most this many elements each, and together at most so many bytes.
struct PersistenceOptions {
  int64_t max_elements = 0;
  int64_t max_total_bytes = 0;
};

// Which parameters form a unit. Pure.
struct UnitMembers {
  std::string name;
  std::vector<int> parameters;  // model indices
  std::vector<int> leaves;      // its users
  Family family = Family::kDense;
  bool persistent = false;
};
std::vector<UnitMembers> BuildUnits(absl::Span<const ParameterSpec> parameters, absl::Span<const Leaf> leaves,
                                    const PersistenceOptions& persistence);

// A run of this rank's elements that one optimizer call updates: same dtype, same decay, contiguous in all buffers.
struct OptimizerRun {
  DType dtype = DType::kF32;
  bool weight_decay = true;
  int64_t weight_offset = 0;    // bytes
  int64_t gradient_offset = 0;  // elements
  int64_t count = 0;
};

// Where the shards of a unit live.
struct UnitDevices {
  Device* weights = nullptr;
  Device* gradients = nullptr;
  Device* states = nullptr;  // masters and optimizer states
};

// The shards of one unit on one rank. Not thread-safe.
class Unit {
 public:
  // `group`: the family's group of this rank; null for a group of one. Allocates the shards (zero).
  static absl::StatusOr<std::unique_ptr<Unit>> Create(UnitMembers members, absl::Span<const ParameterSpec> all,
                                                      const FetchPolicy& policy, comm::Communicator* group,
                                                      int num_states, const UnitDevices& devices);

  const UnitMembers& members() const { return members_; }
  const std::string& name() const { return members_.name; }
  absl::Span<const ParameterSpec> specs() const { return specs_; }
  const UnitLayout& layout() const { return layout_; }
  comm::Communicator* group() const { return group_; }
  int rank() const { return rank_; }
  int world_size() const { return layout_.world_size; }
  // Never gathered: replicated, a group of one, or without elements.
  bool resident() const { return layout_.replicated || layout_.shard_bytes == 0; }
  bool trainable() const { return layout_.gradient_elements > 0; }
  absl::Span<const ShardFragment> fragments() const { return layout_.fragments[static_cast<size_t>(rank_)]; }
  absl::Span<const OptimizerRun> runs() const { return runs_; }
  // Views of whole parameters inside the shard; only for resident units.
  absl::Span<const ConstTensorView> resident_views() const { return resident_views_; }

  DType gradient_dtype() const { return gradient_dtype_; }
  int64_t gradient_count() const { return layout_.gradient_counts[static_cast<size_t>(rank_)]; }
  bool has_master() const { return has_master_; }

  // All bytes of this rank's weight shard.
  TensorView weight_shard() const;
  // `count` elements of a buffer at an offset, rank 1.
  TensorView Weights(int64_t offset_bytes, DType dtype, int64_t count) const;
  TensorView Gradients(int64_t offset, int64_t count) const;
  TensorView Masters(int64_t offset, int64_t count) const;
  TensorView State(int index, int64_t offset, int64_t count) const;

  // Writes initial values into weights and masters. Finished on return.
  absl::Status Initialize(uint64_t seed, Stream& stream);
  // Enqueues weights = masters, where there are masters.
  absl::Status WeightsFromMasters(Stream& stream);

 private:
  Unit() = default;
  void BuildRuns();
  void BindResidentViews();

  UnitMembers members_;
  std::vector<ParameterSpec> specs_;
  UnitLayout layout_;
  comm::Communicator* group_ = nullptr;
  int rank_ = 0;
  DType gradient_dtype_ = DType::kF32;
  bool has_master_ = false;
  Buffer weights_;
  Buffer gradients_;
  Buffer masters_;
  std::vector<Buffer> states_;
  std::vector<OptimizerRun> runs_;
  std::vector<ConstTensorView> resident_views_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_UNIT_H_

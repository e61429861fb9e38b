// Reading and enumerating what the shards hold: weights, masters, gradients, optimizer states.
//
//   StateAccess access(units, parameters, state_names, device, comm_stream);
//   access.ReadTensor(p, TensorKind::kWeight, "", out);        // whole, gathered over the family's group
//   for (const StateTensor& tensor : access.StateTensors()) ... // this rank's part of everything, for a checkpoint
#ifndef EVENKEEL_ZERO3_STATE_ACCESS_H_
#define EVENKEEL_ZERO3_STATE_ACCESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

// What can be read back in full. Optimizer states are "momentum", or "first_moment" and "second_moment".
enum class TensorKind : uint8_t { kWeight, kMaster, kGradient, kState };

// One tensor that this rank holds a part of: what a checkpoint saves. Fragments are in ascending order and free of
// padding; over the ranks of the family's group they cover every element exactly once.
struct StateTensor {
  int parameter = -1;
  TensorKind kind = TensorKind::kWeight;  // kMaster where the weight has one, else kWeight; kState
  std::string state;                      // name of the optimizer state, empty for weights
  struct Fragment {
    int64_t begin = 0;  // first element inside the parameter's local shape, row-major
    TensorView data;    // this rank's elements, rank 1; may be written (load)
  };
  std::vector<Fragment> fragments;
  // False where another rank of the family's group holds the same elements (policy "replicated", all but its rank 0):
  // to be loaded, but not to be saved.
  bool owned = true;
};

// Not thread-safe. Everything passed in outlives it.
class StateAccess {
 public:
  StateAccess(std::vector<Unit*> units, absl::Span<const ParameterSpec> parameters,
              std::vector<std::string> state_names, Device* device, Stream* comm);

  // Where a parameter is stored.
  struct Home {
    int unit = -1;
    int position = -1;
  };
  Home home(int parameter) const { return homes_[static_cast<size_t>(parameter)]; }

  // InvalidArgument or FailedPrecondition when `out` cannot hold such a tensor, or there is none.
  absl::Status CheckRead(int parameter, TensorKind kind, const TensorView& out) const;
  // The whole local tensor into `out` (see PartitionedModel::ReadTensor). Collective. Finished on return.
  absl::Status ReadTensor(int parameter, TensorKind kind, absl::string_view state, TensorView out);
  // In parameter order: the master or weight, then the optimizer's states.
  std::vector<StateTensor> StateTensors() const;

 private:
  absl::StatusOr<int> StateIndex(absl::string_view state) const;
  const Unit& UnitOf(int parameter) const { return *units_[static_cast<size_t>(home(parameter).unit)]; }
  DType StoredDType(int parameter, TensorKind kind) const;
  TensorView FragmentView(const Unit& unit, const ShardFragment& f, TensorKind kind, int state) const;
  StateTensor Describe(int parameter, TensorKind kind, std::string state, int index) const;

  const std::vector<Unit*> units_;
  const absl::Span<const ParameterSpec> parameters_;
  const std::vector<std::string> state_names_;
  Device* const device_;
  Stream* const comm_;
  std::vector<Home> homes_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_STATE_ACCESS_H_

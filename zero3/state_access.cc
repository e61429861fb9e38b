#include "evenkeel/zero3/state_access.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"

namespace evenkeel::zero3 {
namespace {

absl::Status Error(absl::StatusCode code, absl::string_view subject, absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "read";
  where.group = std::string(subject);
  return MakeError(code, where, what);
}

// How many elements of the parameter at `position` every rank owns: from the layout alone.
std::vector<int64_t> CountsByRank(const UnitLayout& layout, int position) {
  std::vector<int64_t> counts;
  for (const auto& fragments : layout.fragments) {
    counts.push_back(0);
    for (const ShardFragment& f : fragments) counts.back() += f.parameter == position ? f.count : 0;
  }
  return counts;
}

}  // namespace

StateAccess::StateAccess(std::vector<Unit*> units, absl::Span<const ParameterSpec> parameters,
                         std::vector<std::string> state_names, Device* device, Stream* comm)
    : units_(std::move(units)),
      parameters_(parameters),
      state_names_(std::move(state_names)),
      device_(device),
      comm_(comm),
      homes_(parameters.size()) {
  for (size_t u = 0; u < units_.size(); ++u) {
    const std::vector<int>& members = units_[u]->members().parameters;
    for (size_t i = 0; i < members.size(); ++i) {
      homes_[static_cast<size_t>(members[i])] = {static_cast<int>(u), static_cast<int>(i)};
    }
  }
}

absl::StatusOr<int> StateAccess::StateIndex(absl::string_view state) const {
  for (size_t i = 0; i < state_names_.size(); ++i) {
    if (state_names_[i] == state) return static_cast<int>(i);
  }
  return Error(absl::StatusCode::kNotFound, state,
               absl::StrCat("the optimizer has no such state; it has: ", absl::StrJoin(state_names_, ", ")));
}

DType StateAccess::StoredDType(int parameter, TensorKind kind) const {
  const DType dtype = parameters_[static_cast<size_t>(parameter)].dtype;
  if (kind == TensorKind::kWeight) return dtype;
  if (kind == TensorKind::kMaster && !HasMaster(dtype)) return dtype;
  return UnitOf(parameter).gradient_dtype();
}

TensorView StateAccess::FragmentView(const Unit& unit, const ShardFragment& f, TensorKind kind, int state) const {
  const DType dtype = unit.specs()[static_cast<size_t>(f.parameter)].dtype;
  switch (kind) {
    case TensorKind::kMaster:
      if (HasMaster(dtype)) return unit.Masters(f.gradient_offset, f.count);
      return unit.Weights(f.weight_offset, dtype, f.count);
    case TensorKind::kWeight:
      return unit.Weights(f.weight_offset, dtype, f.count);
    case TensorKind::kGradient:
      return unit.Gradients(f.gradient_offset, f.count);
    case TensorKind::kState:
      return unit.State(state, f.gradient_offset, f.count);
  }
  return TensorView();
}

absl::Status StateAccess::CheckRead(int parameter, TensorKind kind, const TensorView& out) const {
  if (parameter < 0 || parameter >= static_cast<int>(parameters_.size())) {
    return Error(absl::StatusCode::kInvalidArgument, "",
                 absl::StrCat("parameter ", parameter, " of ", parameters_.size()));
  }
  const ParameterSpec& spec = parameters_[static_cast<size_t>(parameter)];
  if (out.num_elements() != spec.num_elements()) {
    return Error(absl::StatusCode::kInvalidArgument, spec.name,
                 absl::StrCat("out has ", out.num_elements(), " elements, the parameter ", spec.num_elements()));
  }
  if (kind != TensorKind::kWeight && !spec.trainable) {
    return Error(absl::StatusCode::kFailedPrecondition, spec.name, "the parameter is frozen");
  }
  return absl::OkStatus();
}

absl::Status StateAccess::ReadTensor(int parameter, TensorKind kind, absl::string_view state, TensorView out) {
  EK_RETURN_IF_ERROR(CheckRead(parameter, kind, out));
  int state_index = -1;
  if (kind == TensorKind::kState) {
    EK_ASSIGN_OR_RETURN(state_index, StateIndex(state));
  }
  const Unit& unit = UnitOf(parameter);
  const int position = home(parameter).position;
  const DType dtype = StoredDType(parameter, kind);
  const std::vector<int64_t> counts = CountsByRank(unit.layout(), position);
  const int64_t own_count = counts[static_cast<size_t>(unit.rank())];
  const bool local = unit.group() == nullptr || unit.layout().replicated;
  EK_ASSIGN_OR_RETURN(Buffer own, device_->Allocate(own_count * SizeOf(dtype)));
  EK_ASSIGN_OR_RETURN(Buffer whole, device_->Allocate(local ? 0 : out.num_elements() * SizeOf(dtype)));
  int64_t done = 0;
  for (const ShardFragment& f : unit.fragments()) {
    if (f.parameter != position) continue;
    const TensorView part = FragmentView(unit, f, kind, state_index);
    EK_RETURN_IF_ERROR(comm_->Copy(own.data() + done, part.raw(), part.num_bytes()));
    done += part.num_bytes();
  }
  TensorView result(own.data(), dtype, Shape({own_count}));
  if (!local) {
    const TensorView mine = result;
    result = TensorView(whole.data(), dtype, Shape({out.num_elements()}));
    EK_RETURN_IF_ERROR(unit.group()->AllGatherV(mine, result, counts, *comm_));
  }
  if (result.num_elements() > 0) {
    EK_RETURN_IF_ERROR(Cast(result, out.Reshaped(Shape({out.num_elements()})), *comm_));
  }
  return comm_->Synchronize();
}

StateTensor StateAccess::Describe(int parameter, TensorKind kind, std::string state, int index) const {
  const Unit& unit = UnitOf(parameter);
  StateTensor tensor;
  tensor.parameter = parameter;
  tensor.kind = kind;
  tensor.state = std::move(state);
  tensor.owned = !unit.layout().replicated || unit.rank() == 0;
  for (const ShardFragment& f : unit.fragments()) {
    if (f.parameter != home(parameter).position) continue;
    tensor.fragments.push_back({f.begin, FragmentView(unit, f, kind, index)});
  }
  return tensor;
}

std::vector<StateTensor> StateAccess::StateTensors() const {
  std::vector<StateTensor> tensors;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const int parameter = static_cast<int>(p);
    const bool has_master = parameters_[p].trainable && HasMaster(parameters_[p].dtype);
    tensors.push_back(Describe(parameter, has_master ? TensorKind::kMaster : TensorKind::kWeight, "", -1));
    if (!parameters_[p].trainable) continue;
    for (size_t s = 0; s < state_names_.size(); ++s) {
      tensors.push_back(Describe(parameter, TensorKind::kState, state_names_[s], static_cast<int>(s)));
    }
  }
  return tensors;
}

}  // namespace evenkeel::zero3

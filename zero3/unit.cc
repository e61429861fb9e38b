#include "evenkeel/zero3/unit.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/zero3/policy_layouts.h"

namespace evenkeel::zero3 {
namespace {

std::vector<bool> ChoosePersistent(absl::Span<const ParameterSpec> parameters, const PersistenceOptions& options) {
  std::vector<bool> persistent(parameters.size(), false);
  int64_t total = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (options.max_elements <= 0 || parameters[p].num_elements() > options.max_elements) continue;
    if (parameters[p].num_bytes() > options.max_total_bytes - total) continue;
    total += parameters[p].num_bytes();
    persistent[p] = true;
  }
  return persistent;
}

std::string NameOf(const UnitMembers& unit, absl::Span<const Leaf> leaves, bool mixed) {
  std::vector<std::string> users;
  for (int leaf : unit.leaves) users.push_back(leaves[static_cast<size_t>(leaf)].name);
  std::string name = absl::StrJoin(users, "+");
  if (mixed) absl::StrAppend(&name, "/", FamilyName(unit.family));
  if (unit.persistent) absl::StrAppend(&name, "/persistent");
  return name;
}

absl::StatusOr<Buffer> AllocateZero(Device* device, int64_t count, int64_t element_bytes) {
  EK_ASSIGN_OR_RETURN(const int64_t bytes, CheckedMul(count, element_bytes));
  EK_ASSIGN_OR_RETURN(Buffer buffer, device->Allocate(bytes));
  EK_RETURN_IF_ERROR(device->FillNow(buffer.data(), 0, bytes));
  return buffer;
}

template <typename T>
absl::Status Upload(absl::Span<const double> values, std::vector<T>& host, const TensorView& to, Stream& stream) {
  host.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) host[i] = static_cast<T>(static_cast<float>(values[i]));
  EK_RETURN_IF_ERROR(stream.Copy(to.raw(), host.data(), to.num_bytes()));
  return stream.Synchronize();
}

absl::Status UploadDoubles(absl::Span<const double> values, const TensorView& to, Stream& stream) {
  EK_RETURN_IF_ERROR(stream.Copy(to.raw(), values.data(), to.num_bytes()));
  return stream.Synchronize();
}

}  // namespace

std::vector<UnitMembers> BuildUnits(absl::Span<const ParameterSpec> parameters, absl::Span<const Leaf> leaves,
                                    const PersistenceOptions& persistence) {
  std::vector<std::vector<int>> users(parameters.size());
  std::vector<int> order;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    for (int p : leaves[leaf].parameters) {
      std::vector<int>& of = users[static_cast<size_t>(p)];
      if (of.empty()) order.push_back(p);
      of.push_back(static_cast<int>(leaf));
    }
  }
  const std::vector<bool> persistent = ChoosePersistent(parameters, persistence);
  using Key = std::tuple<std::vector<int>, Family, bool, bool>;
  std::map<Key, size_t> index;
  std::map<std::vector<int>, int> families;
  std::vector<UnitMembers> units;
  for (int p : order) {
    const ParameterSpec& spec = parameters[static_cast<size_t>(p)];
    const bool stays = persistent[static_cast<size_t>(p)];
    const std::vector<int>& of = users[static_cast<size_t>(p)];
    const Key key{of, spec.family, stays, spec.dtype == DType::kF64};
    const auto found = index.emplace(key, units.size());
    if (found.second) units.push_back({"", {}, of, spec.family, stays});
    units[found.first->second].parameters.push_back(p);
    families[of] |= 1 << static_cast<int>(spec.family);
  }
  for (UnitMembers& unit : units) unit.name = NameOf(unit, leaves, families[unit.leaves] == 3);
  return units;
}

absl::StatusOr<std::unique_ptr<Unit>> Unit::Create(UnitMembers members, absl::Span<const ParameterSpec> all,
                                                   const FetchPolicy& policy, comm::Communicator* group, int num_states,
                                                   const UnitDevices& devices) {
  std::unique_ptr<Unit> unit(new Unit);
  unit->members_ = std::move(members);
  for (int p : unit->members_.parameters) unit->specs_.push_back(all[static_cast<size_t>(p)]);
  unit->group_ = group != nullptr && group->size() > 1 ? group : nullptr;
  unit->rank_ = unit->group_ != nullptr ? group->rank() : 0;
  const int world_size = unit->group_ != nullptr ? group->size() : 1;
  EK_ASSIGN_OR_RETURN(unit->layout_, policy.Layout(unit->specs_, world_size));
  for (const ParameterSpec& spec : unit->specs_) {
    if (spec.trainable && HasMaster(spec.dtype)) unit->has_master_ = true;
    if (spec.dtype == DType::kF64) unit->gradient_dtype_ = DType::kF64;
  }
  const int64_t element = SizeOf(unit->gradient_dtype_);
  EK_ASSIGN_OR_RETURN(unit->weights_, AllocateZero(devices.weights, unit->layout_.shard_bytes, 1));
  EK_ASSIGN_OR_RETURN(unit->gradients_, AllocateZero(devices.gradients, unit->gradient_count(), element));
  if (unit->has_master_) {
    EK_ASSIGN_OR_RETURN(unit->masters_, AllocateZero(devices.states, unit->gradient_count(), element));
  }
  for (int s = 0; s < num_states; ++s) {
    EK_ASSIGN_OR_RETURN(Buffer state, AllocateZero(devices.states, unit->gradient_count(), element));
    unit->states_.push_back(std::move(state));
  }
  unit->BuildRuns();
  if (unit->resident()) unit->BindResidentViews();
  return unit;
}

// Padding between two fragments is zero in every buffer and stays zero, so that a run may cross it.
void Unit::BuildRuns() {
  bool open = false;
  for (const ShardFragment& f : fragments()) {
    const ParameterSpec& spec = specs_[static_cast<size_t>(f.parameter)];
    if (!spec.trainable) {
      open = false;
      continue;
    }
    const int64_t size = SizeOf(spec.dtype);
    if (open) {
      OptimizerRun& run = runs_.back();
      const int64_t ahead = f.gradient_offset - run.gradient_offset;
      if (run.dtype == spec.dtype && run.weight_decay == spec.weight_decay &&
          f.weight_offset - run.weight_offset == ahead * size) {
        run.count = ahead + f.count;
        continue;
      }
    }
    runs_.push_back({spec.dtype, spec.weight_decay, f.weight_offset, f.gradient_offset, f.count});
    open = true;
  }
}

void Unit::BindResidentViews() {
  resident_views_.resize(specs_.size());
  for (size_t p = 0; p < specs_.size(); ++p) resident_views_[p] = {nullptr, specs_[p].dtype, specs_[p].shape};
  for (const ShardFragment& f : fragments()) {
    const size_t p = static_cast<size_t>(f.parameter);
    resident_views_[p] = {weights_.data() + f.weight_offset, specs_[p].dtype, specs_[p].shape};
  }
}

TensorView Unit::weight_shard() const { return TensorView(weights_.data(), DType::kU8, Shape({layout_.shard_bytes})); }

TensorView Unit::Weights(int64_t offset_bytes, DType dtype, int64_t count) const {
  return TensorView(weights_.data() + offset_bytes, dtype, Shape({count}));
}

TensorView Unit::Gradients(int64_t offset, int64_t count) const {
  return TensorView(gradients_.data() + offset * SizeOf(gradient_dtype_), gradient_dtype_, Shape({count}));
}

TensorView Unit::Masters(int64_t offset, int64_t count) const {
  return TensorView(masters_.data() + offset * SizeOf(gradient_dtype_), gradient_dtype_, Shape({count}));
}

TensorView Unit::State(int index, int64_t offset, int64_t count) const {
  std::byte* base = states_[static_cast<size_t>(index)].data();
  return TensorView(base + offset * SizeOf(gradient_dtype_), gradient_dtype_, Shape({count}));
}

absl::Status Unit::Initialize(uint64_t seed, Stream& stream) {
  constexpr int64_t kChunk = int64_t{1} << 16;
  std::vector<double> values;
  std::vector<float> floats;
  std::vector<BF16> brains;
  std::vector<F16> halves;
  for (const ShardFragment& f : fragments()) {
    const ParameterSpec& spec = specs_[static_cast<size_t>(f.parameter)];
    for (int64_t done = 0; done < f.count; done += kChunk) {
      const int64_t count = std::min(kChunk, f.count - done);
      values.resize(static_cast<size_t>(count));
      FillInitialValues(spec, seed, f.begin + done, count, values.data());
      const TensorView weights = Weights(f.weight_offset + done * SizeOf(spec.dtype), spec.dtype, count);
      if (spec.dtype == DType::kF64) {
        EK_RETURN_IF_ERROR(UploadDoubles(values, weights, stream));
      } else if (spec.dtype == DType::kF32) {
        EK_RETURN_IF_ERROR(Upload(values, floats, weights, stream));
      } else {
        EK_RETURN_IF_ERROR(spec.dtype == DType::kF16 ? Upload(values, halves, weights, stream)
                                                     : Upload(values, brains, weights, stream));
        if (!spec.trainable) continue;
        EK_RETURN_IF_ERROR(Upload(values, floats, Masters(f.gradient_offset + done, count), stream));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Unit::WeightsFromMasters(Stream& stream) {
  for (const OptimizerRun& run : runs_) {
    if (!HasMaster(run.dtype)) continue;
    EK_RETURN_IF_ERROR(
        Cast(Masters(run.gradient_offset, run.count), Weights(run.weight_offset, run.dtype, run.count), stream));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::zero3

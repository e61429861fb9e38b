#include "evenkeel/testing/global_record.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/testing/bitwise_judge.h"
#include "evenkeel/testing/tensor_difference.h"

namespace evenkeel::testutil {
namespace {

// What a step computes first comes first. What a step leaves comes behind all else of it.
constexpr int64_t kPerKind = int64_t{1} << 32;
constexpr int64_t kPerTensor = int64_t{1} << 20;  // batches
enum KindPlace : int64_t { kForward, kLosses, kBackward, kGradients, kLeft };

}  // namespace

GlobalRecord::GlobalRecord(const LanguageModelConfig& config, const comm::Mesh& mesh, const GlobalRecord* baseline)
    : mesh_(mesh), baseline_(baseline) {
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    std::map<std::string, zero3::ParameterSpec>& specs = specs_.emplace_back();
    for (zero3::ParameterSpec& spec : DescribeLanguageModel(config, mesh, rank).parameters) {
      const std::string name = spec.name;
      specs.emplace(name, std::move(spec));
    }
  }
  boundaries_["embedding"] = 0;
  for (int64_t l = 0; l < config.layers; ++l) {
    boundaries_[absl::StrCat("layer.", l, ".attention")] = 1 + 2 * l;
    boundaries_[absl::StrCat("layer.", l, ".moe")] = 2 + 2 * l;
  }
}

const zero3::ParameterSpec* GlobalRecord::SpecOf(int rank, const Tap& tap) const {
  if (tap.kind != TapKind::kParameter && tap.kind != TapKind::kGradient) return nullptr;
  const auto it = specs_[rank].find(std::string(tap.name));
  return it == specs_[rank].end() ? nullptr : &it->second;
}

void GlobalRecord::Show(int rank, int64_t step, const Tap& tap) {
  const zero3::ParameterSpec* const spec = SpecOf(rank, tap);
  const Key key(tap.kind, std::string(tap.name), spec != nullptr ? 0 : tap.batch);
  absl::MutexLock lock(&mutex_);
  Whole& whole = steps_[step][key];
  if (whole.bytes.empty()) {
    whole.dtype = tap.value.dtype();
    whole.elements = 1;
    for (int64_t extent : spec != nullptr ? spec->global_shape : std::vector<int64_t>{tap.value.num_elements()}) {
      whole.elements *= extent;
    }
    whole.bytes.resize(whole.elements * SizeOf(whole.dtype));
    whole.shown.assign(whole.elements, false);
  }
  Put(rank, step, key, tap, spec, &whole);
}

// Row by row: a slice's rows are contiguous in the whole.
void GlobalRecord::Put(int rank, int64_t step, const Key& key, const Tap& tap, const zero3::ParameterSpec* spec,
                       Whole* whole) {
  const int64_t element = SizeOf(whole->dtype), count = tap.value.num_elements();
  const bool sliced = spec != nullptr && spec->shape.rank() > 0;
  const int64_t columns = sliced ? spec->shape.dim(spec->shape.rank() - 1) : count;
  const auto* from = static_cast<const std::byte*>(tap.value.raw());
  for (int64_t i = 0; i < count; i += columns) {
    const int64_t at = sliced ? zero3::GlobalIndex(*spec, i) : i;
    std::byte* const to = whole->bytes.data() + at * element;
    if (!whole->shown[at]) {
      std::memcpy(to, from + i * element, columns * element);
      std::fill_n(whole->shown.begin() + at, columns, true);
    } else if (std::memcmp(to, from + i * element, columns * element) != 0) {
      const std::optional<TensorDifference> found =
          CompareBits(ConstTensorView(to, whole->dtype, Shape({columns})),
                      ConstTensorView(from + i * element, whole->dtype, Shape({columns})));
      FirstDifference difference;
      difference.rank = rank;
      if (found.has_value()) {
        difference.index = at + found->index;
        difference.reference = found->reference;
        difference.candidate = found->candidate;
        difference.ulps = found->ulps;
        finding_.max_abs_diff = std::max(finding_.max_abs_diff, found->max_abs_diff);
      }
      Differ(step, key, std::move(difference), " (another value than on a rank before)");
    }
  }
}

void GlobalRecord::EndStep(int64_t step) {
  absl::MutexLock lock(&mutex_);
  if (++ended_[step] < mesh_.world_size()) return;
  FinishStep(step, steps_[step]);
  if (baseline_ != nullptr) steps_.erase(step);
}

void GlobalRecord::FinishStep(int64_t step, Step& shown) {
  for (const auto& [key, whole] : shown) {
    Digest(key, whole);
    if (std::find(whole.shown.begin(), whole.shown.end(), false) == whole.shown.end()) continue;
    Differ(step, key, {}, " (no rank shows all of it)");
  }
  if (baseline_ == nullptr) return;
  absl::MutexLock lock(&baseline_->mutex_);
  const auto theirs = baseline_->steps_.find(step);
  const Step none;
  const Step& wanted = theirs == baseline_->steps_.end() ? none : theirs->second;
  for (const auto& [key, whole] : shown) {
    const auto it = wanted.find(key);
    if (it == wanted.end()) {
      Differ(step, key, {}, " (the baseline does not show it)");
    } else {
      Compare(step, key, whole, it->second);
    }
  }
  for (const auto& [key, whole] : wanted) {
    if (shown.count(key) == 0) Differ(step, key, {}, " (only the baseline shows it)");
  }
}

void GlobalRecord::Compare(int64_t step, const Key& key, const Whole& whole, const Whole& wanted) {
  if (whole.dtype != wanted.dtype || whole.elements != wanted.elements) {
    Differ(step, key, {}, " (another shape than in the baseline)");
    return;
  }
  finding_.values_compared += whole.elements;
  const std::optional<TensorDifference> found = CompareBits(wanted.view(), whole.view());
  if (!found.has_value()) return;
  finding_.max_abs_diff = std::max(finding_.max_abs_diff, found->max_abs_diff);
  FirstDifference difference;
  difference.index = found->index;
  difference.reference = found->reference;
  difference.candidate = found->candidate;
  difference.ulps = found->ulps;
  Differ(step, key, std::move(difference), "");
}

void GlobalRecord::Digest(const Key& key, const Whole& whole) {
  const auto& [kind, name, batch] = key;
  uint64_t* digest = kind == TapKind::kLoss        ? &digests_.losses
                     : kind == TapKind::kGradient  ? &digests_.gradients
                     : kind == TapKind::kParameter ? &digests_.parameters
                                                   : &digests_.activations;
  const uint64_t which = CombineDigests(Digest64(TapText(kind, name)), static_cast<uint64_t>(batch));
  *digest = CombineDigests(*digest, CombineDigests(which, Digest64(whole.bytes.data(), whole.bytes.size())));
}

int64_t GlobalRecord::PlaceOf(const Key& key) const {
  const auto& [kind, name, batch] = key;
  const auto it = boundaries_.find(name);
  const int64_t boundary = it == boundaries_.end() ? 0 : it->second;
  switch (kind) {
    case TapKind::kActivation:
      return kForward * kPerKind + boundary * kPerTensor + batch;
    case TapKind::kLoss:
      return kLosses * kPerKind + batch;
    case TapKind::kActivationGradient:
      return kBackward * kPerKind + (static_cast<int64_t>(boundaries_.size()) - boundary) * kPerTensor + batch;
    case TapKind::kGradient:
      return kGradients * kPerKind;
    case TapKind::kParameter:
      break;
  }
  return kLeft * kPerKind;
}

// `difference` says where and what; step and name are added here.
void GlobalRecord::Differ(int64_t step, const Key& key, FirstDifference difference, absl::string_view remark) {
  const auto& [kind, name, batch] = key;
  const bool left_by_last_step = kind == TapKind::kParameter && step > 0;
  difference.step = left_by_last_step ? step - 1 : step;
  difference.tensor = absl::StrCat(kind == TapKind::kParameter && step == 0 ? "initial " : "", TapText(kind, name));
  const bool of_a_batch =
      kind == TapKind::kActivation || kind == TapKind::kActivationGradient || (kind == TapKind::kLoss && name.empty());
  if (of_a_batch) absl::StrAppend(&difference.tensor, " of batch ", batch);
  absl::StrAppend(&difference.tensor, remark);
  if (!remark.empty()) finding_.max_abs_diff = std::max(finding_.max_abs_diff, std::numeric_limits<double>::infinity());
  // What a step starts from was left by the one before, except the initial values.
  finding_.Add(kind == TapKind::kParameter && step == 0 ? -1 : PlaceOf(key), std::move(difference));
}

Finding GlobalRecord::finding() const {
  absl::MutexLock lock(&mutex_);
  return finding_;
}

RecordDigests GlobalRecord::digests() const {
  absl::MutexLock lock(&mutex_);
  return digests_;
}

}  // namespace evenkeel::testutil

#include "evenkeel/moe/tree_sum.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

// Sums one output row at a time; `level` buffers hold the right-hand sums that wait.
template <typename In, typename Acc>
class RowSummer {
 public:
  RowSummer(const In* source, const RowLists& lists, int64_t n) : source_(source), lists_(lists), n_(n) {}

  // Into `out` [n]: entries [begin, end) of the lists, whose keys are in [first, last).
  void Sum(int64_t begin, int64_t end, int32_t first, int32_t last, size_t level, Acc* out) {
    if (end - begin == 1) return Leaf(begin, out);
    const int32_t middle = first + Split(last - first);
    int64_t split = begin;
    while (split < end && lists_.keys[split] < middle) ++split;
    if (split == begin) return Sum(begin, end, middle, last, level, out);
    if (split == end) return Sum(begin, end, first, middle, level, out);
    if (levels_.size() <= level) levels_.resize(level + 1);
    levels_[level].resize(n_);
    Sum(begin, split, first, middle, level, out);
    // The recursion may grow `levels_`, so take the pointer of each use afresh.
    std::vector<Acc> right = std::move(levels_[level]);
    Sum(split, end, middle, last, level + 1, right.data());
    for (int64_t i = 0; i < n_; ++i) out[i] += right[i];
    levels_[level] = std::move(right);
  }

 private:
  static int32_t Split(int32_t length) {
    int32_t power = 1;
    while (power * 2 < length) power *= 2;
    return power;
  }

  void Leaf(int64_t entry, Acc* out) const {
    const In* row = source_ + lists_.rows[entry] * n_;
    if (lists_.weights.empty()) {
      for (int64_t i = 0; i < n_; ++i) out[i] = static_cast<Acc>(row[i]);
      return;
    }
    const Acc weight = static_cast<Acc>(lists_.weights[entry]);
    for (int64_t i = 0; i < n_; ++i) out[i] = weight * static_cast<Acc>(row[i]);
  }

  const In* source_;
  const RowLists& lists_;
  const int64_t n_;
  std::vector<std::vector<Acc>> levels_;
};

template <typename In, typename Acc, typename Out>
absl::Status Run(ConstTensorView source, const RowLists& lists, TensorView out) {
  const int64_t n = source.shape().dim(1);
  RowSummer<In, Acc> summer(source.data<In>(), lists, n);
  std::vector<Acc> sum(n);
  Out* const to = out.data<Out>();
  for (int64_t i = 0; i < lists.outputs(); ++i) {
    const int64_t begin = i * lists.width;
    int64_t end = begin;
    while (end < begin + lists.width && lists.rows[end] >= 0) ++end;
    std::fill(sum.begin(), sum.end(), Acc(0));
    if (end > begin) summer.Sum(begin, end, lists.first_key, lists.end_key, 0, sum.data());
    for (int64_t j = 0; j < n; ++j) to[i * n + j] = static_cast<Out>(sum[j]);
  }
  return absl::OkStatus();
}

absl::Status Check(const ConstTensorView& source, const RowLists& lists, const TensorView& out) {
  const bool shapes = source.shape().rank() == 2 && out.shape().rank() == 2 && out.shape().dim(0) == lists.outputs() &&
                      out.shape().dim(1) == source.shape().dim(1) && lists.keys.size() == lists.rows.size() &&
                      (lists.weights.empty() || lists.weights.size() == lists.rows.size());
  if (!shapes) {
    return absl::InvalidArgumentError(absl::StrCat("TreeSumRows: source ", source.shape().ToString(), ", out ",
                                                   out.shape().ToString(), ", ", lists.outputs(), " lists"));
  }
  for (size_t i = 0; i < lists.rows.size(); ++i) {
    if (lists.rows[i] < 0) continue;
    const bool first = i % lists.width == 0;
    const bool increasing = first || (lists.rows[i - 1] >= 0 && lists.keys[i - 1] < lists.keys[i]);
    const bool in_range = lists.keys[i] >= lists.first_key && lists.keys[i] < lists.end_key;
    if (lists.rows[i] < source.shape().dim(0) && in_range && increasing) continue;
    return absl::InvalidArgumentError(absl::StrCat("TreeSumRows: entry ", i, " is row ", lists.rows[i], " of ",
                                                   source.shape().dim(0), " with key ", lists.keys[i],
                                                   ", wants increasing ", lists.first_key, "..", lists.end_key - 1));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TreeSumRows(ConstTensorView source, const RowLists& lists, TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(Check(source, lists, out));
  const DType from = source.dtype(), to = out.dtype();
  absl::Status (*run)(ConstTensorView, const RowLists&, TensorView) = nullptr;
  if (from == DType::kF32 && to == DType::kF32) run = Run<float, float, float>;
  if (from == DType::kF64 && to == DType::kF64) run = Run<double, double, double>;
  if (from == DType::kBF16 && to == DType::kBF16) run = Run<BF16, float, BF16>;
  if (from == DType::kBF16 && to == DType::kF32) run = Run<BF16, float, float>;
  if (from == DType::kF32 && to == DType::kBF16) run = Run<float, float, BF16>;
  if (from == DType::kF16 && to == DType::kF16) run = Run<F16, float, F16>;
  if (from == DType::kF16 && to == DType::kF32) run = Run<F16, float, float>;
  if (from == DType::kF32 && to == DType::kF16) run = Run<float, float, F16>;
  if (run == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("TreeSumRows: no sum from ", DTypeName(from), " to ", DTypeName(to)));
  }
  return stream.Launch([run, source, &lists, out] { return run(source, lists, out); });
}

}  // namespace evenkeel::moe

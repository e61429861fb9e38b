// Judges a run by the bits of another in the same layout, tensor by tensor as both go along.
//
//   StepRecord record;                           // of the reference's step on this rank
//   reference->Step(step, [&](const Tap& tap) { record.Add(tap); });
//   BitwiseJudge judge(rank);
//   judge.StartStep(step, &record);
//   candidate->Step(step, [&](const Tap& tap) { judge.See(tap); });
//   judge.EndStep();
#ifndef EVENKEEL_TESTING_BITWISE_JUDGE_H_
#define EVENKEEL_TESTING_BITWISE_JUDGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/testing/finding.h"
#include "evenkeel/testing/language_model.h"

namespace evenkeel::testutil {

// "gradient layer.0.moe.w_in".
std::string TapText(TapKind kind, absl::string_view name);

// Copies of everything that one rank's step showed, in order. Not thread-safe.
class StepRecord {
 public:
  void Clear() { entries_.clear(); }
  void Add(const Tap& tap);

  struct Entry {
    TapKind kind = TapKind::kActivation;
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;
    std::vector<std::byte> bytes;
    ConstTensorView view() const { return ConstTensorView(bytes.data(), dtype, shape); }
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

// Not thread-safe.
class BitwiseJudge {
 public:
  explicit BitwiseJudge(int rank) : rank_(rank) {}

  // `record` is the reference's of the same step and outlives EndStep.
  void StartStep(int64_t step, const StepRecord* record);
  // The next thing the candidate shows; the reference has shown the same kind and name at this place. A parameter is
  // as the step before left it, and is counted there.
  void See(const Tap& tap);
  // Whatever the reference has shown beyond that is missing.
  void EndStep();

  const Finding& finding() const { return finding_; }

 private:
  const int rank_;
  int64_t step_ = 0;
  size_t next_ = 0;
  const StepRecord* record_ = nullptr;
  Finding finding_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_BITWISE_JUDGE_H_

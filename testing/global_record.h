// What a run shows, put together from all of its ranks by name and global index: the same tensors in every layout.
//
//   GlobalRecord baseline(config, nullptr), record(other, &baseline);
//   // on every rank's thread, for every tap:
//   record.Show(rank, step, tap);
//   record.EndStep(step);                      // once per rank; the last one compares the step with the baseline's
//   record.finding().first;
#ifndef EVENKEEL_TESTING_GLOBAL_RECORD_H_
#define EVENKEEL_TESTING_GLOBAL_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/testing/finding.h"
#include "evenkeel/testing/language_model.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/zero3/parameter_spec.h"

namespace evenkeel::testutil {

// Digests of everything shown, over all steps, independent of the layout.
struct RecordDigests {
  uint64_t losses = 0;  // of every batch, and their means
  uint64_t gradients = 0;
  uint64_t parameters = 0;
  uint64_t activations = 0;  // and their gradients
  friend bool operator==(const RecordDigests&, const RecordDigests&) = default;
};

// Thread-safe.
class GlobalRecord {
 public:
  // `mesh` is the run's own, etp included. `baseline` is complete and outlives this; null: this is the baseline, which
  // keeps everything it is shown.
  GlobalRecord(const LanguageModelConfig& config, const comm::Mesh& mesh, const GlobalRecord* baseline);

  // A rank shows a tap of `step`. A tensor that was shown before must be shown with the same bits.
  void Show(int rank, int64_t step, const Tap& tap);
  // The rank shows no more of `step`.
  void EndStep(int64_t step);

  Finding finding() const;
  RecordDigests digests() const;

 private:
  using Key = std::tuple<TapKind, std::string, int64_t>;  // with the batch
  struct Whole {
    DType dtype = DType::kF32;
    int64_t elements = 0;
    std::vector<std::byte> bytes;
    std::vector<bool> shown;  // by element
    ConstTensorView view() const { return ConstTensorView(bytes.data(), dtype, Shape({elements})); }
  };
  using Step = std::map<Key, Whole>;

  // The parameter's slice on that rank; null for what is no parameter.
  const zero3::ParameterSpec* SpecOf(int rank, const Tap& tap) const;
  void Put(int rank, int64_t step, const Key& key, const Tap& tap, const zero3::ParameterSpec* spec, Whole* whole)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishStep(int64_t step, Step& shown) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Compare(int64_t step, const Key& key, const Whole& whole, const Whole& wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Digest(const Key& key, const Whole& whole) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Differ(int64_t step, const Key& key, FirstDifference difference, absl::string_view remark)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where in a step a tensor is computed.
  int64_t PlaceOf(const Key& key) const;

  const comm::Mesh mesh_;
  const GlobalRecord* const baseline_;
  std::vector<std::map<std::string, zero3::ParameterSpec>> specs_;  // by rank
  std::map<std::string, int64_t> boundaries_;                       // places by name

  mutable absl::Mutex mutex_;
  std::map<int64_t, Step> steps_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, int> ended_ ABSL_GUARDED_BY(mutex_);  // ranks
  RecordDigests digests_ ABSL_GUARDED_BY(mutex_);
  Finding finding_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_GLOBAL_RECORD_H_

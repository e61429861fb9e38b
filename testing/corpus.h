// Real text as training data: the bytes of a file or a folder, and batches that do not depend on the layout.
//
//   EK_ASSIGN_OR_RETURN(Corpus corpus, Corpus::Read("/usr/share/common-licenses"));
//   CorpusBatch batch = corpus.Batch({.seed = 1, .step = 7, .replica = 3}, /*sequences=*/1, /*length=*/32);
#ifndef EVENKEEL_TESTING_CORPUS_H_
#define EVENKEEL_TESTING_CORPUS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::testutil {

// The licence texts that every Debian machine has.
inline constexpr char kDefaultCorpus[] = "/usr/share/common-licenses";

// What a batch is for. Equal keys give equal batches on any rank of any layout.
struct BatchKey {
  uint64_t seed = 1;
  int64_t step = 0;
  int64_t replica = 0;  // data-parallel coordinate
};

// Sequences back to back; targets[i] is the byte after inputs[i] in the text.
struct CorpusBatch {
  std::vector<int32_t> inputs;   // [sequences * length], in [0, 256)
  std::vector<int32_t> targets;  // the same
};

// A text in memory. Immutable, thread-safe.
class Corpus {
 public:
  // The regular files of a folder (not of its subfolders) in the order of their names, or one file, as bytes.
  // NotFound when `path` is missing, InvalidArgument when there is not a byte in it, more than 4 GiB, or when it is
  // neither file nor folder, PermissionDenied when a file may not be read; each names the path.
  static absl::StatusOr<Corpus> Read(absl::string_view path);
  // A text at hand, for tests. InvalidArgument when empty.
  static absl::StatusOr<Corpus> FromText(std::string text);

  int64_t size() const { return static_cast<int64_t>(text_.size()); }
  absl::string_view text() const { return text_; }
  // InvalidArgument when the text is too short for a sequence of `length` bytes and the byte after it.
  absl::Status CheckLength(int64_t length) const;
  // `sequences` stretches of `length` bytes, their starts drawn by Philox from (seed, step, replica, sequence).
  // CheckLength(length) has been OK.
  CorpusBatch Batch(const BatchKey& key, int64_t sequences, int64_t length) const;

 private:
  explicit Corpus(std::string text) : text_(std::move(text)) {}
  std::string text_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_CORPUS_H_

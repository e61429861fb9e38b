#include "evenkeel/testing/corpus.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/user_file.h"

namespace evenkeel::testutil {
namespace {

namespace fs = std::filesystem;

// A corpus is held in memory by every process.
constexpr int64_t kMaxBytes = int64_t{1} << 32;

absl::StatusOr<std::vector<fs::path>> FilesOf(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::directory_iterator it(folder, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored)) files.push_back(it->path());
  }
  if (error) {
    return absl::PermissionDeniedError(absl::StrCat("corpus: cannot list ", folder.string(), ": ", error.message()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

absl::StatusOr<Corpus> Corpus::Read(absl::string_view path) {
  const fs::path root{std::string(path)};
  std::error_code error;
  const fs::file_status status = fs::status(root, error);
  if (!fs::exists(status)) return absl::NotFoundError(absl::StrCat("corpus: ", path, " does not exist"));
  std::vector<fs::path> files = {root};
  if (fs::is_directory(status)) {
    EK_ASSIGN_OR_RETURN(files, FilesOf(root));
  }
  std::string text;
  for (const fs::path& file : files) {
    const absl::StatusOr<std::string> bytes =
        ReadUserFile(file.string(), kMaxBytes - static_cast<int64_t>(text.size()));
    if (!bytes.ok()) {
      return absl::Status(bytes.status().code(), absl::StrCat("corpus: ", bytes.status().message()));
    }
    text += *bytes;
  }
  if (text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("corpus: ", path, " holds no text (", files.size(), " files)"));
  }
  return Corpus(std::move(text));
}

absl::StatusOr<Corpus> Corpus::FromText(std::string text) {
  if (text.empty()) return absl::InvalidArgumentError("corpus: the text is empty");
  return Corpus(std::move(text));
}

absl::Status Corpus::CheckLength(int64_t length) const {
  if (length >= 1 && length < size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("corpus: a text of ", size(), " bytes has no sequence of ", length, " bytes and the byte after it"));
}

CorpusBatch Corpus::Batch(const BatchKey& key, int64_t sequences, int64_t length) const {
  EK_CHECK(length >= 1 && length < size());
  const PhiloxStream starts(PhiloxKey(key.seed).Add("corpus").Add(key.step).Add(key.replica));
  CorpusBatch batch;
  batch.inputs.reserve(sequences * length);
  batch.targets.reserve(sequences * length);
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t start = static_cast<int64_t>(starts.Below(sequence, size() - length));
    for (int64_t i = start; i < start + length; ++i) {
      batch.inputs.push_back(static_cast<unsigned char>(text_[i]));
      batch.targets.push_back(static_cast<unsigned char>(text_[i + 1]));
    }
  }
  return batch;
}

}  // namespace evenkeel::testutil

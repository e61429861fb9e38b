// The one payload that every error of every room carries: who, what, where, and
// what to do next.
//
//   ErrorContext where{.module = "comm", .operation = "all_to_all_v", .group =
//   "ep", .epoch = 3,
//                      .sequence = 8812, .rank = 1, .size = 4};
//   where.findings.push_back({0, "sends 5 elements to rank 1"});
//   return MakeError(absl::StatusCode::kFailedPrecondition, where, "split
//   matrix differs");
//
// gives the message
//   comm all_to_all_v group=ep epoch=3 seq=8812 rank=1/4: split matrix differs;
//   rank 0 sends 5 elements to rank 1
// and a machine-readable payload, read back with GetErrorContext().
#ifndef EVENKEEL_RUNTIME_BASE_ERROR_CONTEXT_H_
#define EVENKEEL_RUNTIME_BASE_ERROR_CONTEXT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

// What one rank had that others did not have (or that it was absent).
struct RankFinding {
  int rank = -1;
  std::string had;

  friend bool operator==(const RankFinding&, const RankFinding&) = default;
};

// Where an error happened. Fields that do not apply keep their defaults and are
// not printed.
struct ErrorContext {
  std::string module = {};     // "comm", "moe", "zero3", "testing", "tools"
  std::string operation = {};  // "all_to_all_v", "fetch", ...
  std::string group = {};      // "ep", "tp", "dp", ... or a leaf, layer or file name
  int64_t epoch = -1;
  int64_t sequence = -1;
  int rank = -1;
  int size = -1;
  std::vector<RankFinding> findings = {};         // the odd ranks and what each had
  absl::Duration elapsed = absl::ZeroDuration();  // with `limit`, for deadlines
  absl::Duration limit = absl::ZeroDuration();
  std::string next_step = {};  // "the group is broken; create a new one"

  friend bool operator==(const ErrorContext&, const ErrorContext&) = default;
};

// Builds the status: a message in the fixed order above, and the payload.
// `code` must not be kOk.
absl::Status MakeError(absl::StatusCode code, const ErrorContext& context, absl::string_view what);

// The payload of `status`, or nothing when it carries none.
std::optional<ErrorContext> GetErrorContext(const absl::Status& status);

// Adds "`prefix`: " in front of the message and keeps code and payloads.
// Annotate once, at the layer that knows.
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_ERROR_CONTEXT_H_

// Macros that pass a failed absl::Status up, and checks for our own bugs.
//
// The distribution's Abseil (20220623) has no status_macros.h, so these few
// lines are ours.
//
//   absl::Status Train() {
//     EK_ASSIGN_OR_RETURN(std::unique_ptr<Arena> arena, Arena::Create(device,
//     bytes)); EK_RETURN_IF_ERROR(arena->Poison()); return absl::OkStatus();
//   }
#ifndef EVENKEEL_RUNTIME_BASE_STATUS_MACROS_H_
#define EVENKEEL_RUNTIME_BASE_STATUS_MACROS_H_

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace evenkeel::base_internal {

inline const absl::Status& AsStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& AsStatus(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}

[[noreturn]] inline void CheckFailed(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
  std::fflush(stderr);
  std::abort();
}

}  // namespace evenkeel::base_internal

#define EK_CONCAT_INNER_(a, b) a##b
#define EK_CONCAT_(a, b) EK_CONCAT_INNER_(a, b)

// Returns the status of `expr` from the enclosing function when it is not OK.
#define EK_RETURN_IF_ERROR(expr)                                 \
  do {                                                           \
    absl::Status ek_status_ = (expr);                            \
    if (ABSL_PREDICT_FALSE(!ek_status_.ok())) return ek_status_; \
  } while (false)

// Assigns the value of the StatusOr `expr` to `lhs`, or returns its status.
#define EK_ASSIGN_OR_RETURN(lhs, ...) EK_ASSIGN_OR_RETURN_IMPL_(EK_CONCAT_(ek_status_or_, __LINE__), lhs, (__VA_ARGS__))
#define EK_ASSIGN_OR_RETURN_IMPL_(temp, lhs, expr)                     \
  auto temp = expr;                                                    \
  if (ABSL_PREDICT_FALSE(!temp.ok())) return std::move(temp).status(); \
  lhs = std::move(temp).value()

// Ends the process when an invariant of ours is broken. Never for a caller's
// mistake.
#define EK_CHECK(condition) \
  (ABSL_PREDICT_TRUE(condition) ? (void)0 : ::evenkeel::base_internal::CheckFailed(__FILE__, __LINE__, #condition))
#define EK_CHECK_OK(expr)                                                                                          \
  do {                                                                                                             \
    const auto& ek_checked_ = (expr);                                                                              \
    if (ABSL_PREDICT_FALSE(!ek_checked_.ok())) {                                                                   \
      ::evenkeel::base_internal::CheckFailed(__FILE__, __LINE__,                                                   \
                                             ::evenkeel::base_internal::AsStatus(ek_checked_).ToString().c_str()); \
    }                                                                                                              \
  } while (false)

#endif  // EVENKEEL_RUNTIME_BASE_STATUS_MACROS_H_

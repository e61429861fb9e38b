#include "evenkeel/comm/transport.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::comm {
namespace {

constexpr char kNextStep[] = "the group is broken; create a new one";

}  // namespace

uint64_t GroupDigest(const Group& group) {
  const auto axis = static_cast<uint8_t>(group.axis);
  return CombineDigests(Digest64(&axis, 1), Digest64(group.ranks.data(), group.ranks.size() * sizeof(int)));
}

ErrorContext CallContext(const Group& group, int64_t epoch, int rank, const Call& call) {
  ErrorContext context;
  context.module = "comm";
  context.operation = std::string(OperationName(call.operation));
  context.group = group.name.empty() ? std::string(AxisName(group.axis)) : group.name;
  context.epoch = epoch;
  context.sequence = call.sequence;
  context.rank = rank;
  context.size = group.size();
  return context;
}

absl::Status TransportError(absl::StatusCode code, ErrorContext context, absl::string_view what) {
  context.next_step = kNextStep;
  return MakeError(code, context, what);
}

absl::Status BrokenGroupError(ErrorContext context, const absl::Status& first_cause) {
  if (const auto cause = GetErrorContext(first_cause); cause.has_value()) context.findings = cause->findings;
  context.next_step = kNextStep;
  // The findings stand in the cause's own text: print them once, carry them in the payload.
  ErrorContext printed = context;
  printed.findings.clear();
  const absl::Status text = MakeError(absl::StatusCode::kAborted, printed,
                                      absl::StrCat("the group was broken before by: ", first_cause.message()));
  absl::Status status(absl::StatusCode::kAborted, text.message());
  MakeError(absl::StatusCode::kAborted, context, "")
      .ForEachPayload([&status](absl::string_view url, const absl::Cord& payload) { status.SetPayload(url, payload); });
  return status;
}

}  // namespace evenkeel::comm

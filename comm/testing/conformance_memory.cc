// The conformance case in which memory runs out.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/conformance_calls.h"
#include "evenkeel/comm/testing/failing_scratch.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr Operation kOperations[] = {Operation::kAllReduce,     Operation::kAllGather,      Operation::kAllGatherV,
                                     Operation::kReduceScatter, Operation::kReduceScatterV, Operation::kAllToAll,
                                     Operation::kAllToAllV,     Operation::kBroadcast,      Operation::kGrouped};
constexpr int64_t kMostAllocations = 100;

absl::Status CheckRefused(const absl::Status& status, const ConformanceOptions& options, Communicator& group, int odd,
                          const CallBuffers& buffers) {
  const bool is_odd = group.rank() == odd;
  const absl::string_view text = is_odd ? "no memory for" : "has no memory for the call; nothing was transferred";
  if (status.code() != absl::StatusCode::kResourceExhausted || !absl::StrContains(status.message(), text)) {
    return Wrong(absl::StrCat("ResourceExhausted with '", text, "' wanted"), status);
  }
  if (!is_odd) EK_RETURN_IF_ERROR(CheckContext(status, group, 0, odd));
  EK_RETURN_IF_ERROR(buffers.CheckUntouched());
  return CheckBroken(options, group);
}

// Allocation number `n` of rank `odd` in one call fails. `came`: there was one, on any rank's word.
absl::Status FailOnce(Backend& backend, const ConformanceOptions& options, Operation operation, int odd, int64_t n,
                      bool* came) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  const CallSpec spec{.operation = operation, .dtype = DType::kBF16, .n = 300, .matrix_seed = odd};
  CallBuffers buffers(spec, group->size(), group->rank());
  if (group->rank() == odd) options.scratch->FailOnThisThread(n);
  const absl::Status status = stream.Await(IssueCall(spec, *group, *stream, &buffers));
  int64_t happened = group->rank() == odd && options.scratch->StopFailing() ? 1 : 0;
  *came = true;
  if (!status.ok()) return CheckRefused(status, options, *group, odd, buffers);
  // Small blocks that find no memory for a copy go another way: the call is right all the same.
  const TensorView view(&happened, DType::kI64, Shape({1}));
  EK_RETURN_IF_ERROR(stream.Await(group->AllReduce(view, view, ReduceOp::kMax, *stream)));
  *came = happened != 0;
  return absl::OkStatus();
}

absl::Status MemoryRunsOut(Backend& backend, const ConformanceOptions& options) {
  for (const Operation operation : kOperations) {
    for (int odd = 0; odd < backend.size(); ++odd) {
      int64_t n = 0;
      for (bool came = true; came && n < kMostAllocations; ++n) {
        const absl::Status status = FailOnce(backend, options, operation, odd, n, &came);
        if (status.ok()) continue;
        return absl::Status(status.code(), absl::StrCat(OperationName(operation), ", allocation ", n, " of rank ", odd,
                                                        ": ", status.message()));
      }
      if (n == kMostAllocations) return absl::InternalError("one call makes too many allocations");
      if (n == 1 && operation == Operation::kAllReduce) return absl::InternalError("no allocation has failed");
    }
  }
  return NextGroupWorks(backend, options);
}

}  // namespace

std::vector<ConformanceCase> MemoryCases(const ConformanceOptions& options) {
  if (options.scratch == nullptr || options.stream_mode != HostDevice::StreamMode::kInline) return {};
  return {{"C31_EveryAllocationOfEveryRankFails", 2,
           [options](Backend& backend) { return MemoryRunsOut(backend, options); }}};
}

}  // namespace evenkeel::comm

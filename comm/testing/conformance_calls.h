// What the conformance cases that go wrong share: a call as data, its buffers, and what must hold after an error.
#ifndef EVENKEEL_COMM_TESTING_CONFORMANCE_CALLS_H_
#define EVENKEEL_COMM_TESTING_CONFORMANCE_CALLS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/grouped_call.h"
#include "evenkeel/comm/operation.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {

// One call as data; extents follow from `n` as the operation wants them.
struct CallSpec {
  Operation operation = Operation::kAllReduce;
  DType dtype = DType::kF32;
  ReduceOp reduce = ReduceOp::kSum;
  int64_t n = 16;
  int root = 0;
  // Of v-calls: entry `changed_entry` of the send counts, then of the receive counts, becomes `changed_to`.
  int changed_entry = -1;
  int64_t changed_to = 0;
  // Of all_to_all_v: the counts are a random matrix with entries in [0, 12] instead of n everywhere.
  int64_t matrix_seed = -1;
  // Of v-calls: counts are a mixture of 0, 7, n / 2 and n, other ones for each value from 0.
  int64_t mixture = -1;
  // Where the operation allows it.
  bool in_place = false;
};

// What rank `from` sends to rank `to` in the matrix of `seed`.
int64_t MatrixEntry(int64_t seed, int from, int to);

// The buffers of one call, filled, and what they held before it. Both have room for a few elements more.
struct CallBuffers {
  CallBuffers(const CallSpec& spec, int size, int rank);
  absl::Status CheckUntouched() const;
  GuardedBuffer send;
  GuardedBuffer recv;
};

// The call of `spec`, which is no barrier and not grouped, on rank `rank` of `size`.
GroupedCall MakeCall(const CallSpec& spec, int size, int rank, CallBuffers* buffers);

// Makes the call of `spec`. kGrouped groups an all_reduce of n elements with an all_to_all_v.
absl::Status IssueCall(const CallSpec& spec, Communicator& group, Stream& stream, CallBuffers* buffers);

// Internal: "`what`, got: ...".
absl::Status Wrong(absl::string_view what, const absl::Status& got);

// The fields that every error of comm carries, and that rank `odd` is among the findings.
absl::Status CheckContext(const absl::Status& status, const Communicator& group, int64_t sequence, int odd);

// A stream that has seen no error yet.
class FreshStream {
 public:
  explicit FreshStream(const ConformanceOptions& options);
  Stream& operator*() { return *stream_; }
  // What the call came to, however the stream runs.
  absl::Status Await(const absl::Status& issued);

 private:
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
};

// The group answers Aborted and keeps its first cause.
absl::Status CheckBroken(const ConformanceOptions& options, Communicator& group);

// A new group of all ranks gives the right sum.
absl::Status NextGroupWorks(Backend& backend, const ConformanceOptions& options);

// Grouped calls (conformance_grouped.cc): part of OperationCases and AgreementCases.
std::vector<ConformanceCase> GroupedOperationCases(const ConformanceOptions& options);
std::vector<ConformanceCase> GroupedAgreementCases(const ConformanceOptions& options);

// Cases in which one rank's own arguments are bad (conformance_refusals.cc): part of AgreementCases.
std::vector<ConformanceCase> RefusalCases(const ConformanceOptions& options);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_CONFORMANCE_CALLS_H_

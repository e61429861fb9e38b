// One rank's part of a right call with data, guards and booked bytes checked: what the operation cases are made of.
#ifndef EVENKEEL_COMM_TESTING_CONFORMANCE_RIG_H_
#define EVENKEEL_COMM_TESTING_CONFORMANCE_RIG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {

using Bytes = std::vector<std::byte>;
using Counts = std::vector<int64_t>;

// One rank of the world under test, with a group of all ranks and a stream of its own. Not thread-safe.
class Rig {
 public:
  static absl::StatusOr<std::unique_ptr<Rig>> Create(Backend& backend, const ConformanceOptions& options);
  // With another group that holds this rank.
  static absl::StatusOr<std::unique_ptr<Rig>> Create(Backend& backend, const ConformanceOptions& options,
                                                     const Group& group);

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  Communicator& group() { return *group_; }
  Stream& stream() { return *stream_; }

  // Awaits the call, then checks the bytes that it booked.
  absl::Status Finish(const absl::Status& issued, int64_t expected_bytes);

 private:
  explicit Rig(Backend& backend) : backend_(backend), before_(backend.ledger().Snapshot()) {}

  Backend& backend_;
  LedgerCounts before_;
  bool check_bytes_ = true;
  std::unique_ptr<Communicator> group_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
};

// Each makes one call on data that is unique by rank and position, and holds the result against what it must be, bit
// for bit. `skew` shifts the buffers from their alignment. `equal`: the form without counts.
absl::Status AllReduceOnce(Rig& rig, DType dtype, ReduceOp op, int64_t n, bool in_place, int skew);
absl::Status AllGatherOnce(Rig& rig, DType dtype, const Counts& counts, bool equal, bool in_place);
absl::Status ReduceScatterOnce(Rig& rig, DType dtype, ReduceOp op, const Counts& counts, bool equal, bool in_place);
// matrix[i][j]: elements from rank i to rank j.
absl::Status AllToAllOnce(Rig& rig, DType dtype, const std::vector<Counts>& matrix, bool equal, int skew);
absl::Status BroadcastOnce(Rig& rig, DType dtype, int root, int64_t n);
// A token goes round the ring: rank 0 sends first, the others pass on what they got.
absl::Status SendRecvOnce(Rig& rig, DType dtype, int64_t n);

// Cases about values and places rather than operations (conformance_values.cc): part of OperationCases.
std::vector<ConformanceCase> ValueCases(const ConformanceOptions& options);
// `body` on a rig of its own, as a case.
ConformanceCase RigCase(const ConformanceOptions& options, std::string name, std::function<absl::Status(Rig&)> body);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_CONFORMANCE_RIG_H_

// Every collective on position-unique data, each result as a digest: equal digests on two backends mean equal bits.
#ifndef EVENKEEL_COMM_MESSAGE_TESTING_OPERATION_DIGESTS_H_
#define EVENKEEL_COMM_MESSAGE_TESTING_OPERATION_DIGESTS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {

// What was done, and the digest of this rank's result.
using OperationDigest = std::pair<std::string, uint64_t>;

// `n` elements of `dtype` that depend on (seed, rank, position); floating ones differ in magnitude, so that the order
// of a sum shows in its bits.
std::vector<char> PositionUnique(DType dtype, int64_t n, int64_t seed, int rank);

// All operations on a group of all ranks, for each dtype and each number of elements, then send and receive around the
// ring. DataLoss naming the operation when a guard byte around a result was overwritten.
absl::StatusOr<std::vector<OperationDigest>> DigestAllOperations(Backend& rank, const std::vector<DType>& dtypes,
                                                                 const std::vector<int64_t>& sizes);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_TESTING_OPERATION_DIGESTS_H_

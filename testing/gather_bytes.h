// Messages of any size from every rank of a group to its first.
#ifndef EVENKEEL_TESTING_GATHER_BYTES_H_
#define EVENKEEL_TESTING_GATHER_BYTES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel::testutil {

// What all ranks brought, one after the other; `bytes` is empty on ranks above 0.
struct GatheredBytes {
  std::vector<uint8_t> bytes;
  std::vector<int64_t> sizes;  // by rank
};

// Collective over `group`; finished on return. Errors of the communicator.
absl::StatusOr<GatheredBytes> GatherBytes(const std::vector<uint8_t>& mine, comm::Communicator& group, Stream& stream);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_GATHER_BYTES_H_

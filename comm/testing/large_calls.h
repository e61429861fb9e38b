// Calls whose blocks are longer than 2^31 bytes, really moved: each once, between two ranks, with every byte checked.
// Takes 4.5 GiB of memory and some seconds a call, so the tests that run it are manual.
#ifndef EVENKEEL_COMM_TESTING_LARGE_CALLS_H_
#define EVENKEEL_COMM_TESTING_LARGE_CALLS_H_

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::comm {

// One rank's part; the world has two ranks. Internal naming the call and the byte that is wrong.
absl::Status RunLargeCalls(Backend& backend);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_LARGE_CALLS_H_

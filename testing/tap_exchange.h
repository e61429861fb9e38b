// Brings what the ranks of a run show to one GlobalRecord when they are processes: each keeps a step's taps and sends
// them to rank 0 at its end.
//
//   TapExchange exchange(&world, &stream, record);       // rank 0's record; null elsewhere
//   job.observe = [&](int, int64_t, const Tap& tap) { exchange.Keep(tap); };
//   job.end_step = [&](int64_t step) { exchange.EndStep(step, /*takes_part=*/true); };
//   ... ranks of the world that have no part in the run: EndStep(step, false) for every step
//   EK_RETURN_IF_ERROR(exchange.status());
#ifndef EVENKEEL_TESTING_TAP_EXCHANGE_H_
#define EVENKEEL_TESTING_TAP_EXCHANGE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/testing/global_record.h"
#include "evenkeel/testing/language_model.h"

namespace evenkeel::testutil {

// One rank's side. Not thread-safe. Everything given outlives it.
class TapExchange {
 public:
  // A rank's number in the run is its rank in `world`: a run has the first ranks.
  TapExchange(comm::Communicator* world, Stream* stream, GlobalRecord* record)
      : world_(*world), stream_(*stream), record_(record) {}

  void Keep(const Tap& tap);
  // Collective over the world. After an error it does nothing any more.
  void EndStep(int64_t step, bool takes_part);
  // The first error of an exchange.
  const absl::Status& status() const { return status_; }

 private:
  absl::Status Exchange(int64_t step, bool takes_part);

  comm::Communicator& world_;
  Stream& stream_;
  GlobalRecord* const record_;
  std::vector<uint8_t> kept_;
  absl::Status status_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_TAP_EXCHANGE_H_

// Finds buffers of queued calls that are used too early: on a stream that is not inline, a call has the memory from the
// moment it is issued to the moment the stream has passed it.
//
//   BufferWatch watch;                                           // one for any number of ranks
//   auto watched = ObserveBackend(&world->backend(r), &watch);
//
// At issue it fills what the call will write with 0xff bytes (NaN in every floating type), so that whoever reads it
// early sees it, and remembers a digest of what the call will read. Before and after the call, in stream order, it
// compares: FailedPrecondition naming the call and the buffer when either was written meanwhile. What an earlier queued
// call still uses is left out: there the stream's order decides. A buffer that was freed is AddressSanitizer's to find:
// the comparison touches it.
#ifndef EVENKEEL_COMM_TESTING_BUFFER_WATCH_H_
#define EVENKEEL_COMM_TESTING_BUFFER_WATCH_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "evenkeel/comm/testing/observer.h"

namespace evenkeel::comm {

// Thread-safe. May go before the streams that it watched.
class BufferWatch final : public CallObserver {
 public:
  BufferWatch();
  absl::Status Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override;

 private:
  class InFlight;  // the memory of queued calls
  class Use;       // that of one call
  const std::shared_ptr<InFlight> in_flight_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_BUFFER_WATCH_H_

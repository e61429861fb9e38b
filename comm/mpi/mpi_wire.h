// The Wire over MPI: non-blocking sends and receives on a communicator of its own, polled.
//
// Thread rule: MPI is initialized as MPI_THREAD_SERIALIZED, and every MPI call is made under one lock, held for one
// poll and never while waiting. So several threads may wait in different groups at the same time; they take turns.
#ifndef EVENKEEL_COMM_MPI_MPI_WIRE_H_
#define EVENKEEL_COMM_MPI_MPI_WIRE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/mpi/hello.h"
#include "evenkeel/comm/mpi/process_watch.h"

namespace evenkeel::comm {

// From now on the first SIGTERM only makes every wire's status Unavailable; another one a second later ends the
// process. Does nothing where the program has a handler of its own.
void CatchSigterm();

class MpiWire : public Wire {
 public:
  struct Options {
    absl::Duration spin = absl::Microseconds(100);       // of yielding, before a wait sleeps
    absl::Duration max_sleep = absl::Microseconds(500);  // between two polls
    absl::Duration start_limit = absl::Seconds(30);
    Hello hello = {};  // rank, size and process are filled in
  };

  // Compares the hellos of all ranks and makes a communicator. MPI is initialized. Errors: those of CompareHellos;
  // DeadlineExceeded naming the ranks that did not say hello within the limit; Unimplemented when tags are too narrow.
  static absl::StatusOr<std::unique_ptr<MpiWire>> Create(const Options& options);

  // By rank.
  virtual absl::Span<const Hello> hellos() const = 0;
  // Waits until every rank has called it: true. False when the limit passes, a rank dies, or the wire is condemned.
  virtual bool AwaitAll(absl::Duration limit) = 0;
  // This rank, and how the processes of all others are: what is left to say when the process must end.
  virtual std::string DescribeWorld() const = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_MPI_WIRE_H_

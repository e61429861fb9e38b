// This process as a member of an MPI job: MPI_Init and MPI_Finalize with limits.
//
// A process that ends without MPI_Finalize after a failure lingers a moment first: mpirun kills the whole job as soon
// as a second process has ended that way, and the others should have time to say what they saw.
//
// The two calls block inside MPI without a limit of their own, and both must be called by the same thread: a thread of
// this object makes the two calls, and the caller waits for it as long as it wants to.
#ifndef EVENKEEL_COMM_MPI_MPI_JOB_H_
#define EVENKEEL_COMM_MPI_MPI_JOB_H_

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel::comm {

class MpiJob {
 public:
  // Joins the job. When the program has initialized MPI itself, it also finalizes it. FailedPrecondition when MPI
  // offers less than MPI_THREAD_SERIALIZED, or when it has been finalized; DeadlineExceeded when MPI_Init does not
  // return within `limit`: some rank of the job has not got there. After that the process can only end (EndProcess).
  static absl::StatusOr<std::unique_ptr<MpiJob>> Join(absl::Duration limit);

  // Without Leave: MPI is not finalized, and the launcher takes the end of the process for a failure of the job.
  ~MpiJob();

  // MPI_Finalize, which waits for all ranks. When it does not return within `limit`, prints `state()` and ends the
  // process with kStuckInMpiExitCode (end_process.h).
  void Leave(absl::Duration limit, absl::FunctionRef<std::string()> state);

 private:
  struct State;
  explicit MpiJob(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;  // null: the program owns MPI
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_MPI_JOB_H_

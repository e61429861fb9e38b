// The hard way out of a job, for a rank whose MPI calls do not return.
#ifndef EVENKEEL_COMM_MPI_END_PROCESS_H_
#define EVENKEEL_COMM_MPI_END_PROCESS_H_

namespace evenkeel::comm {

// Exit code of a process that ended itself because MPI_Finalize did not return.
inline constexpr int kStuckInMpiExitCode = 86;

// Ends this process without destructors and exit handlers, which may wait for other ranks or threads. Output is
// flushed.
[[noreturn]] void EndProcess(int exit_code);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_END_PROCESS_H_

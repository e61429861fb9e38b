// Calls of MPI that go wrong in one rank: a program that links this passes through hooks of its own, by way of MPI's
// profiling interface (MPI 3.1, chapter 14).
#ifndef EVENKEEL_COMM_MPI_TESTING_MPI_HOOKS_H_
#define EVENKEEL_COMM_MPI_TESTING_MPI_HOOKS_H_

#include <functional>

namespace evenkeel::comm {

struct MpiHooks {
  std::function<void()> after_init;       // MPI_Init_thread has returned
  std::function<void()> before_finalize;  // MPI_Finalize is about to be called
  int claimed_rank = -1;                  // MPI_Comm_rank says this instead of the truth; negative: the truth
};

// Set before MPI is used.
MpiHooks& GetMpiHooks();

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_TESTING_MPI_HOOKS_H_

// The MPI job that a test program runs in. Link :mpi_test_main, which joins it before the tests and leaves it after.
//
//   TEST(AllReduceTest, Sums) {                      // every rank runs every test, in the same order
//     ASSERT_OK_AND_ASSIGN(auto world, MpiTestWorld().CreateGroup(...));
//   }
#ifndef EVENKEEL_COMM_MPI_TESTING_MPI_TEST_WORLD_H_
#define EVENKEEL_COMM_MPI_TESTING_MPI_TEST_WORLD_H_

#include "evenkeel/comm/mpi/mpi_backend.h"
#include "evenkeel/comm/testing/failing_scratch.h"

namespace evenkeel::comm {

// Dies outside a program with :mpi_test_main.
MpiBackend& MpiTestWorld();

// The scratch memory of that world.
FailingScratch* MpiTestScratch();

// How many ranks the launcher has started, before the job is joined: for parameters of tests. 1 without a launcher.
int LaunchedWorldSize();

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_TESTING_MPI_TEST_WORLD_H_

#include "evenkeel/comm/mpi/testing/mpi_hooks.h"

#include <mpi.h>

namespace evenkeel::comm {

MpiHooks& GetMpiHooks() {
  static auto* hooks = new MpiHooks;
  return *hooks;
}

}  // namespace evenkeel::comm

extern "C" {

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  const int code = PMPI_Init_thread(argc, argv, required, provided);
  if (evenkeel::comm::GetMpiHooks().after_init != nullptr) evenkeel::comm::GetMpiHooks().after_init();
  return code;
}

int MPI_Finalize() {
  if (evenkeel::comm::GetMpiHooks().before_finalize != nullptr) evenkeel::comm::GetMpiHooks().before_finalize();
  return PMPI_Finalize();
}

int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  const int code = PMPI_Comm_rank(comm, rank);
  if (evenkeel::comm::GetMpiHooks().claimed_rank >= 0) *rank = evenkeel::comm::GetMpiHooks().claimed_rank;
  return code;
}

}  // extern "C"

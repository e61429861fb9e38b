// The rows of the comm benchmark whose ranks are processes: a job of //tools/bench:comm_mpi that sleeps between rows.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<MpiRanks> ranks, MpiRanks::Start(4));
//   EK_ASSIGN_OR_RETURN(double seconds, ranks->Run(Kind::kRawMpi, Op::kAllToAll, 1 << 20, 8));
#ifndef EVENKEEL_TOOLS_BENCH_MPI_RANKS_H_
#define EVENKEEL_TOOLS_BENCH_MPI_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/tools/bench/comm_rows.h"

namespace evenkeel::bench {

// The launcher's path, or empty when this machine has none.
std::string FindMpirun();

// Not thread-safe.
class MpiRanks {
 public:
  // Starts `ranks` processes. Unavailable when the launcher or a rank ends, or says nothing for half a minute.
  static absl::StatusOr<std::unique_ptr<MpiRanks>> Start(int ranks);
  // Ends the job and waits for it.
  virtual ~MpiRanks() = default;

  // Makes `calls` calls on every rank at once. Returns the seconds of the slowest rank.
  virtual absl::StatusOr<double> Run(Kind kind, Op op, int64_t bytes, int64_t calls) = 0;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_MPI_RANKS_H_

// The rows of the comm benchmark, and what the program and the MPI ranks that it starts say to each other.
#ifndef EVENKEEL_TOOLS_BENCH_COMM_ROWS_H_
#define EVENKEEL_TOOLS_BENCH_COMM_ROWS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace evenkeel::bench {

// kAllGatherX16: sixteen all_gathers of different buffers, one after the other, as one call; kGroupedX16: grouped.
enum class Op : int32_t { kAllGather, kAllToAll, kReduceScatter, kAllReduce, kBarrier, kAllGatherX16, kGroupedX16 };
inline constexpr int kX16 = 16;
inline bool IsX16(Op op) { return op == Op::kAllGatherX16 || op == Op::kGroupedX16; }

// in_process: ranks as threads. copy: only the memory copies of the same call, nobody waits for anybody. gloo: Gloo's
// call between the same threads. mpi: ranks as processes. raw_mpi: the blocking call of MPI, its own reduction
// included, between the same processes.
enum class Kind : int32_t { kInProcess, kCopy, kGloo, kMpi, kRawMpi };

struct Row {
  Kind kind = Kind::kInProcess;
  Op op = Op::kAllGather;
  int ranks = 2;
  int64_t bytes = 0;  // one rank's block, of each all_gather
};

// Floats that a rank's send and receive buffers need.
inline int64_t BufferElements(Op op, int64_t bytes, int ranks) { return bytes / 4 * ranks * (IsX16(op) ? kX16 : 1); }

// "in_process/all_gather/ranks:2/bytes:1024"
std::string RowName(const Row& row);
const char* OpName(Op op);

// All rows: 2 and 4 ranks from 1 KiB to 64 MiB, 16 and 64 threads at 1 KiB.
std::vector<Row> AllRows();

// Calls between two looks at the clock: some milliseconds of them.
int64_t CallsPerWindow(int64_t bytes);

// Bytes that one rank takes from the others in one call.
int64_t MovedBytes(const Row& row);

inline bool NeedsProcesses(Kind kind) { return kind == Kind::kMpi || kind == Kind::kRawMpi; }

// What every MPI rank is told, and that rank 0 answers with the seconds (double) that the slowest rank took.
struct WindowOrder {
  Kind kind = Kind::kMpi;
  Op op = Op::kAllGather;
  int64_t bytes = 0;
  int64_t calls = 0;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_COMM_ROWS_H_

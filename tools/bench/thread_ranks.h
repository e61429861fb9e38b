// The rows of the comm benchmark whose ranks are threads of this process.
#ifndef EVENKEEL_TOOLS_BENCH_THREAD_RANKS_H_
#define EVENKEEL_TOOLS_BENCH_THREAD_RANKS_H_

#include <cstdint>
#include <memory>

#include "evenkeel/tools/bench/comm_rows.h"

namespace evenkeel::bench {

// One world of `ranks` threads with its buffers; made once, so that all its rows use the same memory. Not thread-safe.
class ThreadRanks {
 public:
  static std::unique_ptr<ThreadRanks> Create(int ranks);
  virtual ~ThreadRanks() = default;

  // Makes `calls` calls on every rank at once. Returns the seconds of the slowest rank.
  virtual double Run(Kind kind, Op op, int64_t bytes, int64_t calls) = 0;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_THREAD_RANKS_H_

// Jobs of fault_rank, the program whose ranks go wrong on demand, and what its ranks reported.
#ifndef EVENKEEL_COMM_MPI_TESTING_FAULT_JOB_H_
#define EVENKEEL_COMM_MPI_TESTING_FAULT_JOB_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "evenkeel/comm/mpi/testing/job.h"

namespace evenkeel::comm {

inline constexpr int kFaultRanks = 4;
inline constexpr int64_t kFaultDeadlineMs = 1000;

inline int64_t Milliseconds(int64_t ns) { return ns / 1'000'000; }

// What a rank reported under `key`: -1 or "" when nothing.
int64_t Number(const RankReport& report, const std::string& key);
std::string Text(const RankReport& report, const std::string& key);

// Four ranks with a deadline of a second, of which `victims` ("2", "0,3") do `action`. `more`: further arguments.
JobResult RunWithFault(const std::string& action, const std::string& victims, std::vector<std::string> more,
                       std::function<void(pid_t launcher)> meanwhile = nullptr);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_TESTING_FAULT_JOB_H_

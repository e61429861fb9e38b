// Runs a program as an MPI job, watches the clock, and looks for processes left behind.
//
//   JobResult job = RunJob({.program = "comm/mpi/testing/fault_rank", .ranks = 4, .arguments = {"--action=kill"}});
#ifndef EVENKEEL_COMM_MPI_TESTING_JOB_H_
#define EVENKEEL_COMM_MPI_TESTING_JOB_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace evenkeel::comm {

struct JobSpec {
  std::string program;  // relative to the working directory
  int ranks = 4;
  std::vector<std::string> arguments = {};
  std::string folder;  // of the ranks' reports; made empty
  absl::Duration watchdog = absl::Seconds(40);
  // Called again and again while the job runs.
  std::function<void(pid_t launcher)> meanwhile = nullptr;
};

using RankReport = std::map<std::string, std::string>;

struct JobResult {
  bool finished = false;            // before the watchdog ended it: the launcher, or at least all ranks
  int exit_code = -1;               // of the launcher
  int64_t end_ns = 0;               // when the launcher had ended, monotonic
  std::vector<RankReport> reports;  // by rank; empty where a rank wrote none
  absl::Duration stalled;           // how long the machine kept a waiting thread from running meanwhile (stall_meter.h)
  std::string log;                  // what the launcher and the ranks printed
  std::vector<int> orphans;         // ranks whose process still lives half a second later
};

// Through the launcher script, which is a test's data. Not thread-safe.
JobResult RunJob(const JobSpec& spec);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_TESTING_JOB_H_

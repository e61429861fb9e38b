#include "evenkeel/comm/mpi/testing/fault_job.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {

int64_t Number(const RankReport& report, const std::string& key) {
  const auto found = report.find(key);
  int64_t value = -1;
  if (found != report.end() && !absl::SimpleAtoi(found->second, &value)) value = -1;
  return value;
}

std::string Text(const RankReport& report, const std::string& key) {
  const auto found = report.find(key);
  return found == report.end() ? "" : found->second;
}

JobResult RunWithFault(const std::string& action, const std::string& victims, std::vector<std::string> more,
                       std::function<void(pid_t launcher)> meanwhile) {
  std::vector<std::string> arguments = {absl::StrCat("--action=", action), absl::StrCat("--victim=", victims),
                                        absl::StrCat("--deadline_ms=", kFaultDeadlineMs)};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunJob({.program = "comm/mpi/testing/fault_rank",
                 .ranks = kFaultRanks,
                 .arguments = arguments,
                 .folder = absl::StrCat(::testing::TempDir(), "/job"),
                 .meanwhile = std::move(meanwhile)});
}

}  // namespace evenkeel::comm

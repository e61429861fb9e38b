// What every backend must do, as cases that each rank runs its part of. Threads, processes and simulated ranks run the
// same list.
//
//   for (const ConformanceCase& c : ConformanceCases({})) {
//     if (world->size() < c.min_world) continue;
//     for (const absl::Status& s : RunRanks(*world, c.run)) EXPECT_OK(s) << c.name;
//   }
//
// Everything a rank expects it computes itself (data is a function of rank and position), so a case needs no help from
// outside the backend: each rank returns OK or what was wrong. Cases whose names begin with C and a number cover that
// row of the fault table.
#ifndef EVENKEEL_COMM_TESTING_CONFORMANCE_H_
#define EVENKEEL_COMM_TESTING_CONFORMANCE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/testing/failing_scratch.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {

struct ConformanceOptions {
  // Elements of the largest blocks: above every eager limit and piece size of the backend.
  int64_t large = 20011;
  HostDevice::StreamMode stream_mode = HostDevice::StreamMode::kInline;
  // The world uses the two-level form, which books other bytes than the direct one.
  bool two_level = false;
  // The world's scratch memory: set, there are cases in which it runs out (on inline streams).
  FailingScratch* scratch = nullptr;
};

struct ConformanceCase {
  std::string name;  // CamelCase with an optional "C01_" in front
  int min_world = 1;
  // One rank's part. All ranks of the backend's world call it; each makes groups of all ranks.
  std::function<absl::Status(Backend&)> run;
};

// Correct calls: every operation, dtype, operator, extent and placement, data and guards checked bit for bit, bytes
// booked equal to the closed forms.
std::vector<ConformanceCase> OperationCases(const ConformanceOptions& options);
// Calls that disagree between ranks or are refused by one: the same code and findings everywhere, buffers untouched,
// the group broken, the next group works.
std::vector<ConformanceCase> AgreementCases(const ConformanceOptions& options);
// Memory that runs out at every allocation of every rank in turn: ResourceExhausted everywhere, naming the rank, with
// buffers untouched. None without options.scratch.
std::vector<ConformanceCase> MemoryCases(const ConformanceOptions& options);
// All of them.
std::vector<ConformanceCase> ConformanceCases(const ConformanceOptions& options);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_CONFORMANCE_H_

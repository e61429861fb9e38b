#include "evenkeel/tools/late_ranks.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::tools {

comm::StragglerOptions LateRanks::Options() {
  comm::StragglerOptions options;
  options.count = [this](const comm::StragglerReport& report) { Count(report); };
  return options;
}

void LateRanks::Count(const comm::StragglerReport& report) {
  absl::MutexLock lock(&mutex_);
  for (const int rank : report.late_world) {
    comm::StragglerCount& count = counts_[rank];
    ++count.calls;
    count.total += report.waited;
    count.longest = std::max(count.longest, report.waited);
  }
}

absl::StatusOr<std::vector<testutil::LateRank>> LateRanks::Gather(comm::Backend& backend) {
  const int size = backend.size();
  std::vector<int64_t> sums(2 * static_cast<size_t>(size), 0), longest(static_cast<size_t>(size), 0);
  {
    absl::MutexLock lock(&mutex_);
    // Ranks of one process share the counts: the first of them brings them along.
    for (int rank = 0; rank < size && !gathered_; ++rank) {
      sums[2 * rank] = counts_[rank].calls;
      sums[2 * rank + 1] = absl::ToInt64Microseconds(counts_[rank].total);
      longest[rank] = absl::ToInt64Microseconds(counts_[rank].longest);
    }
    gathered_ = true;
  }
  const std::unique_ptr<HostDevice> device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->CreateStream("late_ranks"));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> all, backend.CreateGroup(comm::WorldGroup(size)));
  const TensorView sums_view(sums.data(), DType::kI64, Shape({2 * size}));
  const TensorView longest_view(longest.data(), DType::kI64, Shape({size}));
  EK_RETURN_IF_ERROR(all->AllReduce(sums_view, sums_view, comm::ReduceOp::kSum, *stream));
  EK_RETURN_IF_ERROR(all->AllReduce(longest_view, longest_view, comm::ReduceOp::kMax, *stream));
  EK_RETURN_IF_ERROR(stream->Synchronize());
  std::vector<testutil::LateRank> late;
  for (int rank = 0; rank < size; ++rank) {
    if (sums[2 * rank] == 0) continue;
    late.push_back({.rank = rank,
                    .calls = sums[2 * rank],
                    .waited_ms = static_cast<double>(sums[2 * rank + 1]) / 1000,
                    .longest_ms = static_cast<double>(longest[rank]) / 1000});
  }
  return late;
}

std::string DescribeLateRanks(absl::Span<const testutil::LateRank> late_ranks) {
  std::vector<comm::StragglerCount> counts;
  for (const testutil::LateRank& late : late_ranks) {
    counts.resize(static_cast<size_t>(late.rank) + 1);
    counts.back() = {late.calls, absl::Milliseconds(late.waited_ms), absl::Milliseconds(late.longest_ms)};
  }
  return comm::DescribeStragglerCounts(counts);
}

}  // namespace evenkeel::tools

// What one rank called, in order, as text that can be compared between ranks.
//
//   std::vector<OperationLog> logs(world->size());            // one a rank
//   auto watched = ObserveBackend(&world->backend(r), &logs[r]);
//   ... run ...
//   EXPECT_EQ(FindLogDifference(logs), "");                    // all ranks did the same
#ifndef EVENKEEL_COMM_TESTING_OPERATION_LOG_H_
#define EVENKEEL_COMM_TESTING_OPERATION_LOG_H_

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/comm/testing/observer.h"

namespace evenkeel::comm {

// Thread-safe; entries are in the order in which the calls were issued.
class OperationLog final : public CallObserver {
 public:
  absl::Status Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override;

  // One JSON object a call, one a line: operation, group, sequence, dtype, operator, elements, root. Nothing in it
  // depends on the rank, so ranks that do the same have equal texts; the element counts of all_to_all_v, which follow
  // the data, are left out.
  std::string ToJson() const;
  // The same lines with what is the rank's own too: its rank, epoch, ranks of the group, counts, status.
  std::string ToDetailedJson() const;
  int64_t size() const;

 private:
  struct Entry {
    std::string common;
    std::string own;
  };
  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// "" when all ranks' logs are equal, else the first line that differs and what each of the two ranks called there.
std::string FindLogDifference(absl::Span<const OperationLog> logs);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_OPERATION_LOG_H_

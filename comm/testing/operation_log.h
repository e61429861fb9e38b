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

  // One JSON object a collective, one a line: operation, group, sequence, dtype, operator, elements, root; of grouped
  // calls the same for each in "calls". Nothing in it depends on the rank, so ranks that do the same have equal texts;
  // the element counts of all_to_all_v, which follow the data, and send and recv, which only two ranks call, are left
  // out.
  std::string ToJson() const;
  // All calls, with what is the rank's own too: its rank, epoch, ranks of the group, counts, peer, status.
  std::string ToDetailedJson() const;
  // Of all calls.
  int64_t size() const;

 private:
  struct Entry {
    std::string common;
    std::string own;
    bool is_collective = true;
  };
  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// "" when all ranks' logs are equal, else the first line that differs and what each of the two ranks called there.
std::string FindLogDifference(absl::Span<const OperationLog> logs);
// The same for texts of ToJson, such as the files that processes wrote; texts[r] is rank r's.
std::string FindLogDifference(absl::Span<const std::string> texts);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_OPERATION_LOG_H_

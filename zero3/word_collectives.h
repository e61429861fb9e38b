// Small collectives over host words (votes, exact sums, lists) that the host waits for.
//
//   std::array<int64_t, 2> words = {flags, digest};
//   EK_RETURN_IF_ERROR(collectives->AllReduce(dp, absl::MakeSpan(words), comm::ReduceOp::kBitOr, *comm_stream));
//
// A null group is a group of one: nothing is sent. All ranks of the group call, in the same order.
#ifndef EVENKEEL_ZERO3_WORD_COLLECTIVES_H_
#define EVENKEEL_ZERO3_WORD_COLLECTIVES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel::zero3 {

// Not thread-safe. The device outlives it.
class WordCollectives {
 public:
  // Room for AllReduce of `max_words` without asking for memory again.
  static absl::StatusOr<WordCollectives> Create(Device* device, int64_t max_words);

  // Every word of `words` over the group, in place.
  absl::Status AllReduce(comm::Communicator* group, absl::Span<int64_t> words, comm::ReduceOp op, Stream& stream);
  // Every rank's list; they may differ in length, and be empty.
  absl::StatusOr<std::vector<std::vector<int64_t>>> GatherLists(comm::Communicator* group,
                                                                absl::Span<const int64_t> own, Stream& stream);

 private:
  Device* device_ = nullptr;
  Buffer words_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_WORD_COLLECTIVES_H_

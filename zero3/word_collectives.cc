#include "evenkeel/zero3/word_collectives.h"

#include <cstddef>
#include <numeric>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::zero3 {
namespace {

constexpr int64_t kWordBytes = static_cast<int64_t>(sizeof(int64_t));

TensorView Words(const Buffer& buffer, int64_t begin, int64_t count) {
  return TensorView(buffer.data() + begin * kWordBytes, DType::kI64, Shape({count}));
}

int SizeOfGroup(const comm::Communicator* group) { return group == nullptr ? 1 : group->size(); }

}  // namespace

absl::StatusOr<WordCollectives> WordCollectives::Create(Device* device, int64_t max_words) {
  WordCollectives collectives;
  collectives.device_ = device;
  EK_ASSIGN_OR_RETURN(collectives.words_, device->Allocate(max_words * kWordBytes));
  return collectives;
}

absl::Status WordCollectives::AllReduce(comm::Communicator* group, absl::Span<int64_t> words, comm::ReduceOp op,
                                        Stream& stream) {
  if (SizeOfGroup(group) == 1) return absl::OkStatus();
  const int64_t bytes = static_cast<int64_t>(words.size()) * kWordBytes;
  if (bytes > words_.bytes()) {
    EK_ASSIGN_OR_RETURN(words_, device_->Allocate(bytes));
  }
  const TensorView view = Words(words_, 0, static_cast<int64_t>(words.size()));
  EK_RETURN_IF_ERROR(stream.Copy(view.raw(), words.data(), bytes));
  EK_RETURN_IF_ERROR(group->AllReduce(view, view, op, stream));
  EK_RETURN_IF_ERROR(stream.Copy(words.data(), view.raw(), bytes));
  return stream.Synchronize();
}

absl::StatusOr<std::vector<std::vector<int64_t>>> WordCollectives::GatherLists(comm::Communicator* group,
                                                                               absl::Span<const int64_t> own,
                                                                               Stream& stream) {
  const int size = SizeOfGroup(group);
  if (size == 1) return std::vector<std::vector<int64_t>>{{own.begin(), own.end()}};
  int64_t length = static_cast<int64_t>(own.size());
  std::vector<int64_t> lengths(static_cast<size_t>(size));
  EK_ASSIGN_OR_RETURN(const Buffer length_words, device_->Allocate((size + 1) * kWordBytes));
  EK_RETURN_IF_ERROR(stream.Copy(Words(length_words, size, 1).raw(), &length, kWordBytes));
  EK_RETURN_IF_ERROR(group->AllGather(Words(length_words, size, 1), Words(length_words, 0, size), stream));
  EK_RETURN_IF_ERROR(stream.Copy(lengths.data(), length_words.data(), size * kWordBytes));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  std::vector<int64_t> all(static_cast<size_t>(total));
  EK_ASSIGN_OR_RETURN(const Buffer list_words, device_->Allocate((total + length) * kWordBytes));
  if (length > 0) {
    EK_RETURN_IF_ERROR(stream.Copy(Words(list_words, total, length).raw(), own.data(), length * kWordBytes));
  }
  EK_RETURN_IF_ERROR(group->AllGatherV(Words(list_words, total, length), Words(list_words, 0, total), lengths, stream));
  if (total > 0) EK_RETURN_IF_ERROR(stream.Copy(all.data(), list_words.data(), total * kWordBytes));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<std::vector<int64_t>> lists;
  auto at = all.begin();
  for (int64_t n : lengths) {
    lists.emplace_back(at, at + n);
    at += n;
  }
  return lists;
}

}  // namespace evenkeel::zero3

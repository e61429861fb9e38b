#include "evenkeel/comm/testing/large_calls.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {
namespace {

// Above 2^31 and no multiple of anything.
constexpr int64_t kBytes = (int64_t{1} << 31) + 4099;
constexpr int64_t kBlock = 1 << 20;

// Memory that the system gives only where it is touched.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes), data_(new uint8_t[static_cast<size_t>(bytes)]) {}
  TensorView view() { return TensorView(data_.get(), DType::kU8, Shape({bytes_})); }
  // Byte i of rank r's data tells both, also when blocks of 2^32 bytes are confused.
  // `begin` is a multiple of 8.
  static void Pattern(int rank, int64_t begin, int64_t n, uint8_t* to) {
    for (int64_t i = 0; i < n; i += 8) {
      const uint64_t word = static_cast<uint64_t>(begin + i) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(rank);
      std::memcpy(to + i, &word, static_cast<size_t>(std::min<int64_t>(8, n - i)));
    }
  }
  void Fill(int rank) {
    for (int64_t begin = 0; begin < bytes_; begin += kBlock) {
      Pattern(rank, begin, std::min(kBlock, bytes_ - begin), data_.get() + begin);
    }
  }
  // Bytes [0, n) are `expected(begin, length, buffer)`.
  template <typename Expected>
  absl::Status Check(const char* what, const Expected& expected) const {
    std::vector<uint8_t> block(kBlock);
    for (int64_t begin = 0; begin < bytes_; begin += kBlock) {
      const int64_t length = std::min(kBlock, bytes_ - begin);
      expected(begin, length, block.data());
      if (std::memcmp(block.data(), data_.get() + begin, static_cast<size_t>(length)) == 0) continue;
      int64_t at = 0;
      while (block[at] == data_[begin + at]) ++at;
      return absl::InternalError(absl::StrCat(what, ": byte ", begin + at, " of ", bytes_, " is wrong"));
    }
    return absl::OkStatus();
  }

 private:
  const int64_t bytes_;
  const std::unique_ptr<uint8_t[]> data_;
};

// `what`: the data of rank 0 are in `memory`.
absl::Status CheckFromZero(const char* what, const Memory& memory) {
  return memory.Check(what, [](int64_t begin, int64_t n, uint8_t* to) { Memory::Pattern(0, begin, n, to); });
}

absl::Status SendAndBroadcast(Communicator& group, Stream& stream) {
  Memory memory(kBytes);
  if (group.rank() == 0) {
    memory.Fill(0);
    EK_RETURN_IF_ERROR(group.Send(memory.view(), 1, stream));
  } else {
    EK_RETURN_IF_ERROR(group.Recv(memory.view(), 0, stream));
  }
  EK_RETURN_IF_ERROR(CheckFromZero("send", memory));
  if (group.rank() == 1) std::memset(memory.view().raw(), 0, static_cast<size_t>(kBytes));
  EK_RETURN_IF_ERROR(group.Broadcast(memory.view(), 0, stream));
  return CheckFromZero("broadcast", memory);
}

// Rank 0 has all, rank 1 nothing.
absl::Status Gather(Communicator& group, Stream& stream) {
  Memory memory(kBytes);
  const std::vector<int64_t> counts = {kBytes, 0};
  if (group.rank() == 0) memory.Fill(0);
  const TensorView own = group.rank() == 0 ? memory.view() : TensorView(nullptr, DType::kU8, Shape({0}));
  EK_RETURN_IF_ERROR(group.AllGatherV(own, memory.view(), counts, stream));
  return CheckFromZero("all_gather_v", memory);
}

absl::Status Exchange(Communicator& group, Stream& stream) {
  Memory memory(kBytes);
  const TensorView none(nullptr, DType::kU8, Shape({0}));
  if (group.rank() == 1) {
    EK_RETURN_IF_ERROR(group.AllToAllV(none, {0, 0}, memory.view(), {kBytes, 0}, stream));
    return CheckFromZero("all_to_all_v", memory);
  }
  memory.Fill(0);
  return group.AllToAllV(memory.view(), {0, kBytes}, none, {0, 0}, stream);
}

// In place; each byte of the sum wraps.
absl::Status Sum(Communicator& group, Stream& stream) {
  Memory memory(kBytes);
  memory.Fill(group.rank());
  EK_RETURN_IF_ERROR(group.AllReduce(memory.view(), memory.view(), ReduceOp::kSum, stream));
  std::vector<uint8_t> other(kBlock);
  return memory.Check("all_reduce", [&other](int64_t begin, int64_t n, uint8_t* to) {
    Memory::Pattern(0, begin, n, to);
    Memory::Pattern(1, begin, n, other.data());
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(to[i] + other[i]);
  });
}

}  // namespace

absl::Status RunLargeCalls(Backend& backend) {
  if (backend.size() != 2) return absl::InvalidArgumentError("two ranks, please");
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("large"));
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(2)));
  EK_RETURN_IF_ERROR(group->SetDeadline(absl::Minutes(5)));
  const int64_t before = backend.ledger().Snapshot().bytes(Axis::kWorld);
  for (const auto run : {SendAndBroadcast, Gather, Exchange, Sum}) {
    EK_RETURN_IF_ERROR(run(*group, *stream));
    EK_RETURN_IF_ERROR(group->Barrier(*stream));  // the memory of one call is given back before the next
  }
  // The four calls in which rank 0 has everything, and a sum: a block to the peer and the own one back.
  const int64_t expected = backend.rank() == 0 ? 5 * kBytes : kBytes;
  const int64_t booked = backend.ledger().Snapshot().bytes(Axis::kWorld) - before;
  if (booked == expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("booked ", booked, " bytes, wanted ", expected));
}

}  // namespace evenkeel::comm

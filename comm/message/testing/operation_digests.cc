#include "evenkeel/comm/message/testing/operation_digests.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {
namespace {

constexpr int64_t kGuard = 64;
constexpr char kGuardByte = 0x5a;

// Memory for a result with guards on both sides.
class Guarded {
 public:
  Guarded(DType dtype, int64_t n)
      : dtype_(dtype), n_(n), bytes_(n * SizeOf(dtype)), memory_(bytes_ + 2 * kGuard, kGuardByte) {}
  char* data() { return memory_.data() + kGuard; }
  TensorView view() { return TensorView(data(), dtype_, Shape({n_})); }
  TensorView part(int64_t begin, int64_t n) { return TensorView(data() + begin * SizeOf(dtype_), dtype_, Shape({n})); }
  bool intact() const {
    for (int64_t i = 0; i < kGuard; ++i) {
      if (memory_[i] != kGuardByte || memory_[kGuard + bytes_ + i] != kGuardByte) return false;
    }
    return true;
  }
  uint64_t digest() { return Digest64(data(), static_cast<size_t>(bytes_)); }

 private:
  DType dtype_;
  int64_t n_;
  int64_t bytes_;
  std::vector<char> memory_;
};

// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of either sign, magnitudes from 2^-6 to 2^6.
template <typename T>
void FillFloating(uint64_t key, int64_t n, char* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = Mix(key + static_cast<uint64_t>(i));
    const auto mantissa = static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-31f;
    const T value = static_cast<T>(mantissa * static_cast<float>(1 << (bits % 7)));
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
  }
}

// One pass over all operations with one dtype and size.
class Pass {
 public:
  Pass(Communicator& group, Stream& stream, DType dtype, int64_t n, std::vector<OperationDigest>* out)
      : group_(group), stream_(stream), dtype_(dtype), n_(n), out_(out) {}

  absl::Status Run() {
    EK_RETURN_IF_ERROR(Reductions());
    EK_RETURN_IF_ERROR(Gathers());
    EK_RETURN_IF_ERROR(Exchanges());
    EK_RETURN_IF_ERROR(Broadcasts());
    EK_RETURN_IF_ERROR(Ring());
    return group_.Barrier(stream_);
  }

 private:
  ConstTensorView Data(int64_t n, int64_t salt) {
    data_ = PositionUnique(dtype_, n, salt, group_.rank());
    return ConstTensorView(data_.data(), dtype_, Shape({n}));
  }
  absl::Status Note(absl::string_view what, Guarded& result) {
    const std::string name = absl::StrCat(what, " ", DTypeName(dtype_), " ", n_);
    if (!result.intact()) return absl::DataLossError(absl::StrCat(name, ": a guard byte was overwritten"));
    out_->push_back({name, result.digest()});
    return absl::OkStatus();
  }
  bool Offered(ReduceOp op) const {
    if (op == ReduceOp::kBitOr) return !IsFloating(dtype_);
    return op != ReduceOp::kAvg || IsFloating(dtype_);
  }
  // Uneven counts with a zero, equal on all ranks.
  std::vector<int64_t> Counts() const {
    std::vector<int64_t> counts(group_.size());
    for (int i = 0; i < group_.size(); ++i) counts[i] = (i * 7 + 3) % 4 == 1 ? 0 : n_ + i;
    return counts;
  }

  absl::Status Reductions() {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg, ReduceOp::kBitOr}) {
      if (!Offered(op)) continue;
      Guarded all(dtype_, n_);
      EK_RETURN_IF_ERROR(group_.AllReduce(Data(n_, 1), all.view(), op, stream_));
      EK_RETURN_IF_ERROR(Note(absl::StrCat("all_reduce ", ReduceOpName(op)), all));
      Guarded own(dtype_, n_);
      EK_RETURN_IF_ERROR(group_.ReduceScatter(Data(n_ * group_.size(), 2), own.view(), op, stream_));
      EK_RETURN_IF_ERROR(Note(absl::StrCat("reduce_scatter ", ReduceOpName(op)), own));
    }
    const std::vector<int64_t> counts = Counts();
    Guarded own(dtype_, counts[group_.rank()]);
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    EK_RETURN_IF_ERROR(group_.ReduceScatterV(Data(total, 3), own.view(), counts, ReduceOp::kSum, stream_));
    EK_RETURN_IF_ERROR(Note("reduce_scatter_v", own));
    Guarded in_place(dtype_, n_);
    const std::vector<char> mine = PositionUnique(dtype_, n_, 4, group_.rank());
    std::copy(mine.begin(), mine.end(), in_place.data());
    EK_RETURN_IF_ERROR(group_.AllReduce(in_place.view(), in_place.view(), ReduceOp::kSum, stream_));
    return Note("all_reduce in place", in_place);
  }

  absl::Status Gathers() {
    Guarded all(dtype_, n_ * group_.size());
    EK_RETURN_IF_ERROR(group_.AllGather(Data(n_, 5), all.view(), stream_));
    EK_RETURN_IF_ERROR(Note("all_gather", all));
    const std::vector<int64_t> counts = Counts();
    Guarded uneven(dtype_, std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    EK_RETURN_IF_ERROR(group_.AllGatherV(Data(counts[group_.rank()], 6), uneven.view(), counts, stream_));
    return Note("all_gather_v", uneven);
  }

  absl::Status Exchanges() {
    Guarded all(dtype_, n_ * group_.size());
    EK_RETURN_IF_ERROR(group_.AllToAll(Data(n_ * group_.size(), 7), all.view(), stream_));
    EK_RETURN_IF_ERROR(Note("all_to_all", all));
    // Rank i sends n * ((i + 2j) mod 3) elements to rank j.
    std::vector<int64_t> to(group_.size()), from(group_.size());
    for (int i = 0; i < group_.size(); ++i) {
      to[i] = n_ * ((group_.rank() + 2 * i) % 3);
      from[i] = n_ * ((i + 2 * group_.rank()) % 3);
    }
    Guarded uneven(dtype_, std::accumulate(from.begin(), from.end(), int64_t{0}));
    const int64_t total = std::accumulate(to.begin(), to.end(), int64_t{0});
    EK_RETURN_IF_ERROR(group_.AllToAllV(Data(total, 8), to, uneven.view(), from, stream_));
    return Note("all_to_all_v", uneven);
  }

  absl::Status Broadcasts() {
    for (int root = 0; root < group_.size(); ++root) {
      Guarded buffer(dtype_, n_);
      if (root == group_.rank()) {
        const std::vector<char> mine = PositionUnique(dtype_, n_, 9, root);
        std::copy(mine.begin(), mine.end(), buffer.data());
      }
      EK_RETURN_IF_ERROR(group_.Broadcast(buffer.view(), root, stream_));
      EK_RETURN_IF_ERROR(Note("broadcast", buffer));
    }
    return absl::OkStatus();
  }

  // Even ranks send first; the last of an odd ring receives first.
  absl::Status Ring() {
    if (group_.size() == 1) return absl::OkStatus();
    const int next = (group_.rank() + 1) % group_.size(), before = (group_.rank() + group_.size() - 1) % group_.size();
    Guarded got(dtype_, n_);
    const ConstTensorView mine = Data(n_, 10);
    const bool first = group_.rank() % 2 == 0 && next != 0;
    if (first) EK_RETURN_IF_ERROR(group_.Send(mine, next, stream_));
    EK_RETURN_IF_ERROR(group_.Recv(got.view(), before, stream_));
    if (!first) EK_RETURN_IF_ERROR(group_.Send(mine, next, stream_));
    return Note("ring", got);
  }

  Communicator& group_;
  Stream& stream_;
  const DType dtype_;
  const int64_t n_;
  std::vector<OperationDigest>* out_;
  std::vector<char> data_;
};

}  // namespace

std::vector<char> PositionUnique(DType dtype, int64_t n, int64_t seed, int rank) {
  std::vector<char> bytes(static_cast<size_t>(n * SizeOf(dtype)));
  const uint64_t key = Mix(Mix(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(rank));
  switch (dtype) {
    case DType::kF32:
      FillFloating<float>(key, n, bytes.data());
      break;
    case DType::kF64:
      FillFloating<double>(key, n, bytes.data());
      break;
    case DType::kBF16:
      FillFloating<BF16>(key, n, bytes.data());
      break;
    case DType::kF16:
      FillFloating<F16>(key, n, bytes.data());
      break;
    default:
      for (size_t i = 0; i < bytes.size(); i += sizeof(uint32_t)) {
        const auto bits = static_cast<uint32_t>(Mix(key + i));
        std::memcpy(bytes.data() + i, &bits, std::min(sizeof(bits), bytes.size() - i));
      }
  }
  return bytes;
}

absl::StatusOr<std::vector<OperationDigest>> DigestAllOperations(Backend& rank, const std::vector<DType>& dtypes,
                                                                 const std::vector<int64_t>& sizes) {
  const std::unique_ptr<HostDevice> device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream("digests"));
  Group world{.axis = Axis::kWorld, .name = "world", .ranks = std::vector<int>(rank.size())};
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, rank.CreateGroup(world));
  std::vector<OperationDigest> digests;
  for (const DType dtype : dtypes) {
    for (const int64_t n : sizes) EK_RETURN_IF_ERROR(Pass(*group, *stream, dtype, n, &digests).Run());
  }
  return digests;
}

}  // namespace evenkeel::comm

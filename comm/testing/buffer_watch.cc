#include "evenkeel/comm/testing/buffer_watch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr std::byte kPoison{0xff};

// Memory of a call, and what it held when the call was issued.
struct Remembered {
  const void* data = nullptr;
  int64_t bytes = 0;
  uint64_t digest = 0;

  static Remembered Of(const void* data, int64_t bytes) {
    return {data, bytes, bytes == 0 ? 0 : Digest64(data, static_cast<size_t>(bytes))};
  }
  bool IsUnchanged() const { return bytes == 0 || Digest64(data, static_cast<size_t>(bytes)) == digest; }
};

bool Overlap(const ConstTensorView& a, const ConstTensorView& b) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a.raw()), b_begin = reinterpret_cast<uintptr_t>(b.raw());
  return a_begin < b_begin + static_cast<uint64_t>(b.num_bytes()) &&
         b_begin < a_begin + static_cast<uint64_t>(a.num_bytes());
}

ConstTensorView Const(const TensorView& view) { return ConstTensorView(view.raw(), view.dtype(), view.shape()); }

ErrorContext Where(const CallInfo& info) {
  ErrorContext where;
  where.module = "comm";
  where.operation = std::string(OperationName(info.operation));
  where.group = info.group->name.empty() ? std::string(AxisName(info.group->axis)) : info.group->name;
  where.epoch = info.epoch;
  where.sequence = info.sequence;
  where.rank = info.rank;
  where.size = info.group->size();
  where.next_step = "leave the buffers of a call alone until its stream has passed it";
  return where;
}

absl::Status Written(const ErrorContext& where, const char* what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, where, what);
}

}  // namespace

class BufferWatch::InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  bool Reads(const ConstTensorView& memory) { return Find(memory, true); }
  bool Writes(const ConstTensorView& memory) { return Find(memory, false); }
  // From now on a queued call reads `send` and writes `recv`, until nobody keeps what is returned.
  std::shared_ptr<void> Add(const ConstTensorView& send, const ConstTensorView& recv) {
    absl::MutexLock lock(&mutex_);
    const auto place = calls_.insert(calls_.end(), {send, recv});
    return std::shared_ptr<void>(nullptr, [self = shared_from_this(), place](void*) {
      absl::MutexLock last_lock(&self->mutex_);
      self->calls_.erase(place);
    });
  }

 private:
  struct Memory {
    ConstTensorView send, recv;
  };
  bool Find(const ConstTensorView& memory, bool reads) {
    absl::MutexLock lock(&mutex_);
    return std::any_of(calls_.begin(), calls_.end(),
                       [&memory, reads](const Memory& call) { return Overlap(memory, reads ? call.send : call.recv); });
  }

  absl::Mutex mutex_;
  std::list<Memory> calls_ ABSL_GUARDED_BY(mutex_);
};

BufferWatch::BufferWatch() : in_flight_(std::make_shared<InFlight>()) {}

absl::Status BufferWatch::Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) {
  if (stream.is_inline()) return call();
  const bool reads_only = info.operation == Operation::kBroadcast && info.rank == info.peer;
  const bool writes_only = info.operation == Operation::kBroadcast && !reads_only;
  const ConstTensorView written = Const(info.recv);
  const bool in_place = info.operation != Operation::kBroadcast && Overlap(info.send, written);
  const bool recv_is_free = !in_flight_->Reads(written) && !in_flight_->Writes(written);
  const bool send_is_there = !in_flight_->Writes(info.send);
  if (recv_is_free && !reads_only && !in_place && info.recv.num_bytes() > 0) {
    std::memset(info.recv.raw(), static_cast<int>(kPoison), static_cast<size_t>(info.recv.num_bytes()));
  }
  Remembered send, recv;
  if (send_is_there && !writes_only) send = Remembered::Of(info.send.raw(), info.send.num_bytes());
  if (recv_is_free) recv = Remembered::Of(info.recv.raw(), info.recv.num_bytes());
  std::shared_ptr<void> in_flight = in_flight_->Add(info.send, written);
  const ErrorContext where = Where(info);
  EK_RETURN_IF_ERROR(stream.Launch([where, send, recv] {
    if (!send.IsUnchanged()) return Written(where, "the send buffer was written while the call was queued");
    if (!recv.IsUnchanged()) return Written(where, "the receive buffer was written while the call was queued");
    return absl::OkStatus();
  }));
  EK_RETURN_IF_ERROR(call());
  return stream.Launch([where, send, in_place, in_flight = std::move(in_flight)] {
    return in_place || send.IsUnchanged() ? absl::OkStatus()
                                          : Written(where, "the send buffer was written while the call ran");
  });
}

}  // namespace evenkeel::comm

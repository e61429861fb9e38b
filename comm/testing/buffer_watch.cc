#include "evenkeel/comm/testing/buffer_watch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <string>
#include <utility>
#include <vector>

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
  struct Memory {
    ConstTensorView send, recv;
  };
  bool Reads(const ConstTensorView& memory) { return Find(memory, true); }
  bool Writes(const ConstTensorView& memory) { return Find(memory, false); }
  // From now on a queued call reads and writes `memory`, until nobody keeps what is returned.
  std::shared_ptr<void> Add(Memory memory) {
    absl::MutexLock lock(&mutex_);
    const auto place = calls_.insert(calls_.end(), std::move(memory));
    return std::shared_ptr<void>(nullptr, [self = shared_from_this(), place](void*) {
      absl::MutexLock last_lock(&self->mutex_);
      self->calls_.erase(place);
    });
  }

 private:
  bool Find(const ConstTensorView& memory, bool reads) {
    absl::MutexLock lock(&mutex_);
    return std::any_of(calls_.begin(), calls_.end(),
                       [&memory, reads](const Memory& call) { return Overlap(memory, reads ? call.send : call.recv); });
  }

  absl::Mutex mutex_;
  std::list<Memory> calls_ ABSL_GUARDED_BY(mutex_);
};

BufferWatch::BufferWatch() : in_flight_(std::make_shared<InFlight>()) {}

// Poisons what one call will write and remembers what its memory holds.
class BufferWatch::Use {
 public:
  Use(const CallInfo& info, InFlight* in_flight) {
    const bool is_broadcast = info.operation == Operation::kBroadcast;
    const bool reads_only = is_broadcast && info.rank == info.peer;
    const bool writes_only = is_broadcast && !reads_only;
    const ConstTensorView written(info.recv);
    in_place_ = !is_broadcast && Overlap(info.send, written);
    const bool recv_is_free = !in_flight->Reads(written) && !in_flight->Writes(written);
    const bool send_is_there = !in_flight->Writes(info.send);
    if (recv_is_free && !reads_only && !in_place_ && info.recv.num_bytes() > 0) {
      std::memset(info.recv.raw(), static_cast<int>(kPoison), static_cast<size_t>(info.recv.num_bytes()));
    }
    if (send_is_there && !writes_only) send_ = Remembered::Of(info.send.raw(), info.send.num_bytes());
    if (recv_is_free) recv_ = Remembered::Of(info.recv.raw(), info.recv.num_bytes());
    queued_ = in_flight->Add({info.send, written});
  }

  absl::Status CheckBefore(const ErrorContext& where) const {
    if (!send_.IsUnchanged()) return Written(where, "the send buffer was written while the call was queued");
    if (!recv_.IsUnchanged()) return Written(where, "the receive buffer was written while the call was queued");
    return absl::OkStatus();
  }
  absl::Status CheckAfter(const ErrorContext& where) const {
    if (in_place_ || send_.IsUnchanged()) return absl::OkStatus();
    return Written(where, "the send buffer was written while the call ran");
  }

 private:
  bool in_place_ = false;
  Remembered send_, recv_;
  std::shared_ptr<void> queued_;
};

absl::Status BufferWatch::Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) {
  if (stream.is_inline()) return call();
  const auto uses = std::make_shared<std::vector<Use>>();
  if (info.operation != Operation::kGrouped) uses->emplace_back(info, in_flight_.get());
  for (const CallInfo& part : info.grouped) uses->emplace_back(part, in_flight_.get());
  const ErrorContext where = Where(info);
  EK_RETURN_IF_ERROR(stream.Launch([where, uses]() -> absl::Status {
    for (const Use& use : *uses) EK_RETURN_IF_ERROR(use.CheckBefore(where));
    return absl::OkStatus();
  }));
  EK_RETURN_IF_ERROR(call());
  return stream.Launch([where, uses]() -> absl::Status {
    for (const Use& use : *uses) EK_RETURN_IF_ERROR(use.CheckAfter(where));
    return absl::OkStatus();
  });
}

}  // namespace evenkeel::comm

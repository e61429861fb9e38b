// Memory and order: devices, streams, events and buffers.
//
// One rule for everything asynchronous: an operation takes a Stream and returns
// absl::Status, and OK means *enqueued in stream order*. Completion and late
// errors come from the stream (Synchronize) or an Event. Whatever a queued
// operation touches must outlive it. An inline host stream runs at once; a
// worker stream is really asynchronous.
//
//   ASSIGN Buffer buffer = device->Allocate(bytes);
//   stream->Copy(buffer.data(), source, bytes);
//   stream->Record(event);  other_stream->Wait(event);   // an edge between two
//   streams stream->Synchronize();                               // first error
//   since the stream was made
#ifndef EVENKEEL_RUNTIME_DEVICE_DEVICE_H_
#define EVENKEEL_RUNTIME_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/runtime/device/work_counters.h"

namespace evenkeel {

class Device;

// Owns bytes on a device; frees them in its destructor. Empty buffers have a
// null pointer. Movable, not copyable. Not thread-safe.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device* device, void* data, int64_t bytes) : device_(device), data_(data), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { Reset(); }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }
  Device* device() const { return device_; }
  // Frees now. The caller has made sure that no queued operation still uses the
  // bytes.
  void Reset();

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// A point in a stream's order. Created by a device; may be recorded again and
// again (the last record counts). Thread-safe.
class Event {
 public:
  virtual ~Event() = default;
  // True when all work before the last Record has finished, or when never
  // recorded.
  virtual bool IsDone() const = 0;
  // Blocks the host until IsDone().
  virtual void Synchronize() = 0;
};

// An ordered queue of work. Calls from several threads are serialised, but
// their mutual order is the callers' duty. The first error sticks: later
// operations are skipped, and every call returns it.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual absl::string_view name() const = 0;
  virtual Device* device() const = 0;

  // Runs `work` in stream order (on CUDA: as a host callback). Counts one
  // launch.
  virtual absl::Status Launch(absl::AnyInvocable<absl::Status()> work) = 0;
  // As Launch, but counts one collective instead of one launch.
  virtual absl::Status LaunchCollective(absl::AnyInvocable<absl::Status()> work) = 0;
  // Copies `bytes` bytes; the ranges must not overlap. Counts one copy.
  virtual absl::Status Copy(void* destination, const void* source, int64_t bytes) = 0;
  // Sets `bytes` bytes to `value`. Counts one fill.
  virtual absl::Status Fill(void* destination, int value, int64_t bytes) = 0;
  // Makes `event` stand for everything enqueued so far. The event must outlive
  // the work.
  virtual absl::Status Record(Event* event) = 0;
  // Later work of this stream starts only when `event` is done.
  virtual absl::Status Wait(Event* event) = 0;
  // Blocks until the queue is empty; returns the first error since the stream
  // was made.
  virtual absl::Status Synchronize() = 0;
  // The first error so far, without waiting.
  virtual absl::Status status() const = 0;
  // True when operations run inside the call that enqueues them.
  virtual bool is_inline() const = 0;
};

// A place that has memory and runs work. Thread-safe. Outlives its buffers,
// streams and events.
class Device {
 public:
  virtual ~Device() = default;
  virtual absl::string_view name() const = 0;
  // At least `bytes` bytes aligned to 64. 0 bytes: an empty buffer.
  // InvalidArgument when negative; ResourceExhausted (with the numbers) when
  // there is no memory or the device's limit would be passed.
  virtual absl::StatusOr<Buffer> Allocate(int64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream(absl::string_view name) = 0;
  virtual std::unique_ptr<Event> CreateEvent() = 0;
  // Sets bytes outside any stream, finished on return. For fresh memory that no
  // stream uses yet.
  virtual absl::Status FillNow(void* destination, int value, int64_t bytes) = 0;
  virtual WorkCounters& counters() = 0;

 private:
  friend class Buffer;
  virtual void Free(void* data, int64_t bytes) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_DEVICE_DEVICE_H_

#include "evenkeel/runtime/device/host_device.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int kPoison = 0xff;

// Done when `finished_` has caught up with `recorded_`; each Record takes a new
// number.
class HostEvent final : public Event {
 public:
  bool IsDone() const override {
    absl::MutexLock lock(&mutex_);
    return finished_ >= recorded_;
  }
  void Synchronize() override {
    absl::MutexLock lock(&mutex_);
    WaitFor(recorded_);
  }
  int64_t StartRecord() {
    absl::MutexLock lock(&mutex_);
    return ++recorded_;
  }
  void FinishRecord(int64_t number) {
    absl::MutexLock lock(&mutex_);
    if (number > finished_) finished_ = number;
  }
  int64_t recorded() const {
    absl::MutexLock lock(&mutex_);
    return recorded_;
  }
  void WaitUntil(int64_t number) {
    absl::MutexLock lock(&mutex_);
    WaitFor(number);
  }

 private:
  void WaitFor(int64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto reached = [this, number]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return finished_ >= number; };
    mutex_.Await(absl::Condition(&reached));
  }

  mutable absl::Mutex mutex_;
  int64_t recorded_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t finished_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What both kinds of host stream share: counting, and turning each call into
// one closure.
class HostStream : public Stream {
 public:
  HostStream(HostDevice* device, absl::string_view name) : device_(device), name_(name) {}

  absl::string_view name() const override { return name_; }
  Device* device() const override { return device_; }

  absl::Status Launch(absl::AnyInvocable<absl::Status()> work) override {
    device_->counters().AddLaunch();
    return Enqueue(std::move(work));
  }
  absl::Status LaunchCollective(absl::AnyInvocable<absl::Status()> work) override {
    device_->counters().AddCollective();
    return Enqueue(std::move(work));
  }
  absl::Status Copy(void* destination, const void* source, int64_t bytes) override {
    device_->counters().AddCopy(bytes);
    return Enqueue([destination, source, bytes] {
      if (bytes > 0) std::memcpy(destination, source, static_cast<size_t>(bytes));
      return absl::OkStatus();
    });
  }
  absl::Status Fill(void* destination, int value, int64_t bytes) override {
    device_->counters().AddFill();
    return Enqueue([destination, value, bytes] {
      if (bytes > 0) std::memset(destination, value, static_cast<size_t>(bytes));
      return absl::OkStatus();
    });
  }

 protected:
  virtual absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) = 0;

  HostDevice* const device_;
  const std::string name_;
};

class InlineStream final : public HostStream {
 public:
  using HostStream::HostStream;

  absl::Status Record(Event* event) override {
    device_->counters().AddEventRecord();
    auto* host_event = static_cast<HostEvent*>(event);
    host_event->FinishRecord(host_event->StartRecord());
    return status();
  }
  absl::Status Wait(Event* event) override {
    device_->counters().AddEventWait();
    event->Synchronize();
    return status();
  }
  absl::Status Synchronize() override { return status(); }
  absl::Status status() const override {
    if (!has_failed_.load(std::memory_order_acquire)) return absl::OkStatus();  // asked by every operation
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  bool is_inline() const override { return true; }

 private:
  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) override {
    EK_RETURN_IF_ERROR(status());
    absl::Status result = work();
    if (!result.ok()) {
      absl::MutexLock lock(&mutex_);
      if (status_.ok()) status_ = result;
      has_failed_.store(true, std::memory_order_release);
    }
    return result;
  }

  std::atomic<bool> has_failed_{false};  // set after status_
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

class WorkerStream final : public HostStream {
 public:
  WorkerStream(HostDevice* device, absl::string_view name) : HostStream(device, name), worker_([this] { Run(); }) {}
  ~WorkerStream() override {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    worker_.join();
  }

  // Events fire even after an error, so that nobody waits for ever on a failed
  // stream.
  absl::Status Record(Event* event) override {
    device_->counters().AddEventRecord();
    auto* host_event = static_cast<HostEvent*>(event);
    const int64_t number = host_event->StartRecord();
    return Push({.work =
                     [host_event, number] {
                       host_event->FinishRecord(number);
                       return absl::OkStatus();
                     },
                 .always = true});
  }
  absl::Status Wait(Event* event) override {
    device_->counters().AddEventWait();
    auto* host_event = static_cast<HostEvent*>(event);
    return Push({.work =
                     [host_event, number = host_event->recorded()] {
                       host_event->WaitUntil(number);
                       return absl::OkStatus();
                     },
                 .always = true});
  }
  absl::Status Synchronize() override {
    absl::MutexLock lock(&mutex_);
    auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return queue_.empty() && !running_; };
    mutex_.Await(absl::Condition(&idle));
    return status_;
  }
  absl::Status status() const override {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  bool is_inline() const override { return false; }

 private:
  struct Item {
    absl::AnyInvocable<absl::Status()> work;
    bool always = false;  // also runs after an error
  };

  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) override { return Push({.work = std::move(work)}); }

  absl::Status Push(Item item) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok() || item.always) queue_.push_back(std::move(item));
    return status_;
  }

  void Run() {
    auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !queue_.empty() || stopping_; };
    for (int64_t n = 0;; ++n) {
      Item item;
      bool skip = false;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(&ready));
        if (queue_.empty()) return;
        item = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
        skip = !status_.ok() && !item.always;
      }
      const auto& delay = device_->options().delay;
      if (delay) device_->options().clock->Sleep(delay(name_, n));
      const absl::Status result = skip ? absl::OkStatus() : item.work();
      item.work = nullptr;
      absl::MutexLock lock(&mutex_);
      running_ = false;
      if (status_.ok() && !result.ok()) status_ = result;
    }
  }

  mutable absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread worker_;
};

}  // namespace

HostDevice::HostDevice(Options options) : options_(std::move(options)) {}
HostDevice::~HostDevice() = default;

std::unique_ptr<HostDevice> HostDevice::Create(Options options) {
  return std::unique_ptr<HostDevice>(new HostDevice(std::move(options)));
}

absl::StatusOr<Buffer> HostDevice::Allocate(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  if (bytes == 0) return Buffer(this, nullptr, 0);
  EK_ASSIGN_OR_RETURN(const int64_t padded, CheckedRoundUp(bytes, kAlignment));
  const int64_t live = counters_.ReserveLive(bytes, options_.max_live_bytes);
  if (live < 0) {
    return absl::ResourceExhaustedError(absl::StrCat(options_.name, ": ", bytes, " bytes wanted, ",
                                                     counters_.Snapshot().live_bytes, " live of a limit of ",
                                                     options_.max_live_bytes));
  }
  void* data = std::aligned_alloc(kAlignment, static_cast<size_t>(padded));
  if (data == nullptr) {
    counters_.CancelLive(bytes);
    return absl::ResourceExhaustedError(absl::StrCat(options_.name, ": no memory for ", bytes, " bytes"));
  }
  if (options_.poison) std::memset(data, kPoison, static_cast<size_t>(padded));
  counters_.AddAllocation(bytes, live);
  return Buffer(this, data, bytes);
}

void HostDevice::Free(void* data, int64_t bytes) {
  if (options_.poison) std::memset(data, kPoison, static_cast<size_t>(bytes));
  std::free(data);
  counters_.AddFree(bytes);
}

absl::StatusOr<std::unique_ptr<Stream>> HostDevice::CreateStream(absl::string_view name) {
  if (options_.stream_mode == StreamMode::kInline) return std::make_unique<InlineStream>(this, name);
  return std::make_unique<WorkerStream>(this, name);
}

std::unique_ptr<Event> HostDevice::CreateEvent() { return std::make_unique<HostEvent>(); }

absl::Status HostDevice::FillNow(void* destination, int value, int64_t bytes) {
  if (bytes > 0) std::memset(destination, value, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

}  // namespace evenkeel

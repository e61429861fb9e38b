// absl::Mutex and its companions for builds under ThreadSanitizer.
//
// The distribution's Abseil is compiled without instrumentation, so the
// sanitizer does not see that its locks order anything and reports every
// guarded access as a race. This file defines the same members again, on
// std::mutex and std::condition_variable, which the sanitizer knows. A program
// that links it uses these, and so does the Abseil library in that program.
//
// A lock's word holds a pointer to its State, made at first use. Every unlock
// wakes all waiters, which is slow and simple.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "absl/base/internal/tsan_mutex_interface.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

// What else happens inside uninstrumented libraries: reference counts whose
// last holder frees.
extern "C" const char* __tsan_default_suppressions() {
  return "race:Status*UnrefNonInlined\n"
         "race:absl*CordRep*Destroy\n"
         "called_from_lib:libabsl_status.so\n"
         "called_from_lib:libabsl_cord.so\n"
         "called_from_lib:libprotobuf.so\n"
         "called_from_lib:libdnnl.so\n"
         "called_from_lib:libgomp.so\n";
}

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  int readers = 0;
  bool writer = false;
};

struct Signals {
  std::mutex mutex;
  std::condition_variable sent;
  int64_t waiting = 0;   // tickets drawn
  int64_t released = 0;  // tickets below this one may go
};

template <typename T>
T& Of(std::atomic<intptr_t>& word) {
  intptr_t seen = word.load(std::memory_order_acquire);
  if (seen == 0) {
    T* made = new T;
    if (word.compare_exchange_strong(seen, reinterpret_cast<intptr_t>(made), std::memory_order_acq_rel)) return *made;
    delete made;
  }
  return *reinterpret_cast<T*>(seen);
}

template <typename T>
void Free(std::atomic<intptr_t>& word) {
  delete reinterpret_cast<T*>(word.load(std::memory_order_acquire));
}

// Waits on `changed` until `ready`, at most until `deadline`; false when late.
template <typename Ready>
bool WaitUntil(std::condition_variable& changed, std::unique_lock<std::mutex>& held, Time deadline, Ready ready) {
  if (deadline == InfiniteFuture()) {
    changed.wait(held, ready);
    return true;
  }
  const auto limit = std::chrono::steady_clock::now() + ToChronoNanoseconds(deadline - Now());
  return changed.wait_until(held, limit, ready);
}

bool Holds(const Condition* condition) { return condition == nullptr || condition->Eval(); }

// Takes the lock when it is free and the condition holds. After the deadline
// it is taken as soon as it is free; returns whether the condition held.
bool Acquire(State& state, bool exclusive, const Condition* condition, Time deadline) {
  std::unique_lock<std::mutex> held(state.mutex);
  const auto is_free = [&] { return !state.writer && (!exclusive || state.readers == 0); };
  bool in_time = WaitUntil(state.changed, held, deadline, [&] { return is_free() && Holds(condition); });
  if (!in_time) {
    state.changed.wait(held, is_free);
    in_time = Holds(condition);
  }
  if (exclusive) {
    state.writer = true;
  } else {
    ++state.readers;
  }
  return in_time;
}

bool TryAcquire(State& state, bool exclusive) {
  std::unique_lock<std::mutex> held(state.mutex);
  if (state.writer || (exclusive && state.readers > 0)) return false;
  if (exclusive) {
    state.writer = true;
  } else {
    ++state.readers;
  }
  return true;
}

// Gives the lock back; returns whether it was held for writing.
bool Release(State& state) {
  std::unique_lock<std::mutex> held(state.mutex);
  const bool exclusive = state.writer;
  if (exclusive) {
    state.writer = false;
  } else if (state.readers-- == 0) {
    std::fputs("a mutex was unlocked that nobody held\n", stderr);
    std::abort();
  }
  state.changed.notify_all();
  return exclusive;
}

bool Await(State& state, const Condition& condition, Time deadline) {
  return Acquire(state, Release(state), &condition, deadline);
}

void CheckHeld(State& state, bool for_writing) {
  std::unique_lock<std::mutex> held(state.mutex);
  if (state.writer || (!for_writing && state.readers > 0)) return;
  std::fputs("a mutex is not held although it must be\n", stderr);
  std::abort();
}

}  // namespace

Mutex::~Mutex() {
  ABSL_TSAN_MUTEX_DESTROY(this, __tsan_mutex_not_static);
  Free<State>(mu_);
}
void Mutex::Lock() { Acquire(Of<State>(mu_), true, nullptr, InfiniteFuture()); }
void Mutex::ReaderLock() { Acquire(Of<State>(mu_), false, nullptr, InfiniteFuture()); }
void Mutex::Unlock() { Release(Of<State>(mu_)); }
void Mutex::ReaderUnlock() { Release(Of<State>(mu_)); }
bool Mutex::TryLock() { return TryAcquire(Of<State>(mu_), true); }
bool Mutex::ReaderTryLock() { return TryAcquire(Of<State>(mu_), false); }
void Mutex::AssertHeld() const { CheckHeld(Of<State>(const_cast<Mutex*>(this)->mu_), true); }
void Mutex::AssertReaderHeld() const { CheckHeld(Of<State>(const_cast<Mutex*>(this)->mu_), false); }
void Mutex::AssertNotHeld() const {}
void Mutex::ForgetDeadlockInfo() {}
void Mutex::EnableDebugLog(const char*) {}
void Mutex::EnableInvariantDebugging(void (*)(void*), void*) {}

void Mutex::Await(const Condition& condition) { absl::Await(Of<State>(mu_), condition, InfiniteFuture()); }
bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return absl::Await(Of<State>(mu_), condition, Now() + timeout);
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  return absl::Await(Of<State>(mu_), condition, deadline);
}
void Mutex::LockWhen(const Condition& condition) { Acquire(Of<State>(mu_), true, &condition, InfiniteFuture()); }
bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return Acquire(Of<State>(mu_), true, &condition, Now() + timeout);
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  return Acquire(Of<State>(mu_), true, &condition, deadline);
}
void Mutex::ReaderLockWhen(const Condition& condition) { Acquire(Of<State>(mu_), false, &condition, InfiniteFuture()); }
bool Mutex::ReaderLockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return Acquire(Of<State>(mu_), false, &condition, Now() + timeout);
}
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, Time deadline) {
  return Acquire(Of<State>(mu_), false, &condition, deadline);
}

void ReleasableMutexLock::Release() {
  mu_->Unlock();
  mu_ = nullptr;
}

CondVar::~CondVar() { Free<Signals>(cv_); }
void CondVar::EnableDebugLog(const char*) {}
void CondVar::Wait(Mutex* mutex) { WaitWithDeadline(mutex, InfiniteFuture()); }
bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) { return WaitWithDeadline(mutex, Now() + timeout); }
bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  Signals& signals = Of<Signals>(cv_);
  State& state = Of<State>(mutex->mu_);
  bool in_time;
  bool exclusive;
  {
    std::unique_lock<std::mutex> held(signals.mutex);
    const int64_t ticket = signals.waiting++;
    exclusive = absl::Release(state);
    in_time = WaitUntil(signals.sent, held, deadline, [&] { return ticket < signals.released; });
  }
  Acquire(state, exclusive, nullptr, InfiniteFuture());
  return !in_time;
}
void CondVar::Signal() {
  Signals& signals = Of<Signals>(cv_);
  std::unique_lock<std::mutex> held(signals.mutex);
  if (signals.released < signals.waiting) ++signals.released;
  signals.sent.notify_all();
}
void CondVar::SignalAll() {
  Signals& signals = Of<Signals>(cv_);
  std::unique_lock<std::mutex> held(signals.mutex);
  signals.released = signals.waiting;
  signals.sent.notify_all();
}

Notification::~Notification() { MutexLock lock(&mutex_); }
void Notification::Notify() {
  MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}
void Notification::WaitForNotification() const { WaitForNotificationWithDeadline(InfiniteFuture()); }
bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  return WaitForNotificationWithDeadline(Now() + timeout);
}
bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  const auto notified = [this] { return HasBeenNotified(); };
  const bool in_time = mutex_.LockWhenWithDeadline(Condition(&notified), deadline);
  mutex_.Unlock();
  return in_time;
}

BlockingCounter::BlockingCounter(int initial_count)
    : count_(initial_count), num_waiting_(0), done_(initial_count == 0) {}
bool BlockingCounter::DecrementCount() {
  MutexLock lock(&lock_);
  if (count_.fetch_sub(1) > 1) return false;
  done_ = true;
  return true;
}
void BlockingCounter::Wait() {
  MutexLock lock(&lock_);
  lock_.Await(Condition(&done_));
}

ABSL_NAMESPACE_END
}  // namespace absl

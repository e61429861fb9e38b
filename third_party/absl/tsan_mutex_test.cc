// The stand-in locks order what they guard and keep absl's meaning: run with
// --config=tsan; in other builds the same tests run against Abseil itself.

#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace {

TEST(MutexTest, GuardsACounterOfManyThreads) {
  absl::Mutex mutex;
  int count = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 500; ++n) {
        absl::MutexLock lock(&mutex);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 2000);
}

TEST(MutexTest, AwaitSeesWhatWasWrittenBeforeTheUnlock) {
  absl::Mutex mutex;
  int stage = 0;
  int payload = 0;
  std::thread other([&] {
    absl::MutexLock lock(&mutex);
    payload = 7;
    stage = 1;
    const auto answered = [&] { return stage == 2; };
    mutex.Await(absl::Condition(&answered));
    ++payload;
  });
  {
    const auto filled = [&] { return stage == 1; };
    absl::MutexLock lock(&mutex, absl::Condition(&filled));
    EXPECT_EQ(payload, 7);
    stage = 2;
  }
  other.join();
  EXPECT_EQ(payload, 8);
}

TEST(MutexTest, TimeoutsReturnWithTheLockHeld) {
  absl::Mutex mutex;
  bool never = false;
  absl::MutexLock lock(&mutex);
  EXPECT_FALSE(mutex.AwaitWithTimeout(absl::Condition(&never), absl::Milliseconds(5)));
  mutex.AssertHeld();
  absl::CondVar signal;
  EXPECT_TRUE(signal.WaitWithTimeout(&mutex, absl::Milliseconds(5)));  // true: it timed out
  mutex.AssertHeld();
}

TEST(MutexTest, ReadersShareAndWritersExclude) {
  absl::Mutex mutex;
  mutex.ReaderLock();
  std::thread reader([&] {
    absl::ReaderMutexLock lock(&mutex);  // does not wait for the other reader
    EXPECT_FALSE(mutex.TryLock());
  });
  reader.join();
  mutex.ReaderUnlock();
  const bool locked = mutex.TryLock();
  if (locked) mutex.Unlock();
  EXPECT_TRUE(locked);
}

TEST(CondVarTest, SignalAllWakesEveryWaiter) {
  absl::Mutex mutex;
  absl::CondVar changed;
  bool go = false;
  int woken = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      absl::MutexLock lock(&mutex);
      while (!go) changed.Wait(&mutex);
      ++woken;
    });
  }
  {
    absl::MutexLock lock(&mutex);
    go = true;
    changed.SignalAll();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(woken, 3);
}

TEST(NotificationTest, OrdersWhatCameBefore) {
  absl::Notification done;
  absl::BlockingCounter both(2);
  int value = 0;
  std::thread writer([&] {
    value = 5;
    done.Notify();
    both.DecrementCount();
  });
  std::thread reader([&] {
    done.WaitForNotification();
    EXPECT_EQ(value, 5);
    both.DecrementCount();
  });
  both.Wait();
  EXPECT_TRUE(done.HasBeenNotified());
  writer.join();
  reader.join();
}

}  // namespace

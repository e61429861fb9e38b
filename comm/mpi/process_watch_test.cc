#include "evenkeel/comm/mpi/process_watch.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "evenkeel/comm/mpi/build_id.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::testing::HasSubstr;

// A child that does nothing until it is killed.
pid_t StartChild() {
  const pid_t pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  return pid;
}

ProcessIdentity IdentityOf(pid_t pid) {
  ProcessIdentity identity = ProcessIdentity::Self();
  identity.pid = pid;
  return identity;
}

TEST(ProcessWatchTest, SeesDeathBeforeTheParentCollectsIt) {
  const pid_t child = StartChild();
  ASSERT_GT(child, 0);
  ProcessWatch watch(2);
  watch.Add(1, IdentityOf(child));
  ASSERT_TRUE(watch.CanKnow(1));
  EXPECT_FALSE(watch.IsDead(1));
  EXPECT_THAT(watch.Describe(1), HasSubstr("is alive"));
  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);  // ended, and not collected
  EXPECT_TRUE(watch.IsDead(1));
  EXPECT_THAT(watch.Describe(1), HasSubstr("is dead"));
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(watch.IsDead(1));
}

TEST(ProcessWatchTest, StoppedIsNotDead) {
  const pid_t child = StartChild();
  ProcessWatch watch(2);
  watch.Add(1, IdentityOf(child));
  kill(child, SIGSTOP);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WSTOPPED | WNOWAIT);
  EXPECT_FALSE(watch.IsDead(1));
  EXPECT_THAT(watch.Describe(1), HasSubstr("is stopped"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(ProcessWatchTest, ProcessThatEndedBeforeItWasWatchedIsDead) {
  const pid_t child = StartChild();
  const ProcessIdentity identity = IdentityOf(child);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  ProcessWatch watch(2);
  watch.Add(1, identity);
  EXPECT_TRUE(watch.IsDead(1));
}

TEST(ProcessWatchTest, ProcessesOfOtherHostsAreUnknown) {
  ProcessIdentity identity = ProcessIdentity::Self();
  identity.host ^= 1;
  ProcessWatch watch(2);
  watch.Add(1, identity);
  EXPECT_FALSE(watch.CanKnow(1));
  EXPECT_FALSE(watch.IsDead(1));
  EXPECT_THAT(watch.Describe(1), HasSubstr("cannot be watched"));
}

TEST(BuildIdTest, IsTheSameEveryTimeAndNotZero) {
  EXPECT_NE(RunningBuildDigest(), 0u);
  EXPECT_EQ(RunningBuildDigest(), RunningBuildDigest());
}

}  // namespace
}  // namespace evenkeel::comm

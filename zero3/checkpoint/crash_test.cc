// Power cuts at every operation of a save, with every subset of what was not synced.
//
// What is covered, exactly. A crash point is an operation that changes the disk (create, append, sync, make, rename,
// remove); it and everything after it fails. What is volatile then is: every sector of every append since its file's
// last sync, and every change of a name since its folder's last sync (a rename is one change). Every subset of these
// survives, one after the other: no limit and no sampling. Two subsets that leave a disk which no reader can tell apart
// are one case for the checks that follow: the newest valid checkpoint is found, is the old or the new one (the new one
// where the save had reported success), has every value, and the next save succeeds.
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/reshard.h"
#include "evenkeel/zero3/testing/small_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::DiskModel;
using ::testing::AnyOf;

// Calls f(disk) for every subset of the volatile items of `disk` that a crash may keep.
void ForEachCrash(const DiskModel& disk, const std::function<void(DiskModel&)>& f) {
  std::vector<int> choices;  // of the crash that comes next; those behind its end begin with "lost"
  while (true) {
    const std::unique_ptr<DiskModel> crashed = disk.Clone();
    size_t asked = 0;
    crashed->Crash([&](int) {
      if (asked == choices.size()) choices.push_back(0);
      return choices[asked++];
    });
    choices.resize(asked);
    f(*crashed);
    while (!choices.empty() && choices.back() == 1) choices.pop_back();
    if (choices.empty()) return;
    choices.back() = 1;
  }
}

struct Crashes {
  int64_t subsets = 0;
  int64_t disks = 0;  // that differ, per crash point
};

// A save that may be cut off: what was there before it, the save itself, and the one after it.
struct Scenario {
  std::function<absl::Status(DiskModel&)> before;
  std::function<absl::Status(DiskModel&)> save;
  std::function<absl::Status(DiskModel&)> next;
  std::function<absl::Status(const CheckpointReader&)> check;
  std::string root = "ckpt";
  int64_t old_step = 0;
  int64_t new_step = 0;
};

void CheckAfterCrash(const Scenario& scenario, DiskModel& disk, bool saved, const std::string& where) {
  const absl::StatusOr<FoundCheckpoint> found = FindLatestCheckpoint(&disk, scenario.root);
  ASSERT_OK(found.status()) << where;
  ASSERT_THAT(found->reader->step(), AnyOf(saved ? scenario.new_step : scenario.old_step, scenario.new_step)) << where;
  ASSERT_OK(scenario.check(*found->reader)) << where;
  ASSERT_OK(scenario.next(disk)) << where;
}

Crashes CrashEverywhere(const Scenario& scenario, int64_t sector_bytes) {
  const auto prepared = [&] {
    auto disk = std::make_unique<DiskModel>();
    EXPECT_OK(scenario.before(*disk));
    disk->SplitAppends(sector_bytes);
    return disk;
  };
  const std::unique_ptr<DiskModel> probe = prepared();
  const int64_t begin = probe->operations();
  EXPECT_OK(scenario.save(*probe));
  Crashes crashes;
  for (int64_t at = begin; at <= probe->operations() && !::testing::Test::HasFailure(); ++at) {
    const std::unique_ptr<DiskModel> disk = prepared();
    disk->CrashAt(at);
    const bool saved = scenario.save(*disk).ok();
    std::set<uint64_t> seen;
    ForEachCrash(*disk, [&](DiskModel& crashed) {
      ++crashes.subsets;
      if (!seen.insert(crashed.StateDigest()).second || ::testing::Test::HasFailure()) return;
      ++crashes.disks;
      CheckAfterCrash(scenario, crashed, saved, absl::StrCat("crash at operation ", at - begin, " of the save"));
    });
  }
  return crashes;
}

Scenario SavesOfOneRank(int64_t before) {
  Scenario scenario;
  scenario.old_step = before;
  scenario.new_step = before + 1;
  scenario.before = [before](DiskModel& disk) -> absl::Status {
    for (int64_t step = 1; step <= before; ++step) EK_RETURN_IF_ERROR(SaveOne(disk, step));
    return absl::OkStatus();
  };
  scenario.save = [before](DiskModel& disk) { return SaveOne(disk, before + 1); };
  scenario.next = [before](DiskModel& disk) { return SaveOne(disk, before + 2); };
  scenario.check = [](const CheckpointReader& reader) { return CheckLoad(reader, {}, 0); };
  return scenario;
}

// Sectors of 512 bytes: both files have several. The third save also removes the first checkpoint.
TEST(CrashTest, C44_EveryOperationAndEverySubsetOfOneRanksSave) {
  for (int64_t before : {1, 2}) {
    const Crashes crashes = CrashEverywhere(SavesOfOneRank(before), 256);
    RecordProperty(absl::StrCat("subsets_", before), absl::StrCat(crashes.subsets));
    EXPECT_GE(crashes.subsets, 700) << before;
    EXPECT_GE(crashes.disks, 700) << before;
  }
}

// Three ranks as threads: at the crash several files and names are unsynced at once, in whatever order the threads
// came.
TEST(CrashTest, C44_EveryOperationAndEverySubsetOfThreeRanksSave) {
  const SmallLayout layout = {.dp = 3};
  Scenario scenario;
  scenario.old_step = 1;
  scenario.new_step = 2;
  scenario.before = [layout](DiskModel& disk) { return SaveAtLayout(disk, layout, 1, "ckpt"); };
  scenario.save = [layout](DiskModel& disk) { return SaveAtLayout(disk, layout, 2, "ckpt"); };
  scenario.next = [layout](DiskModel& disk) { return SaveAtLayout(disk, layout, 3, "ckpt"); };
  scenario.check = [](const CheckpointReader& reader) { return CheckLoad(reader, {.dp = 2}, 1); };
  const Crashes crashes = CrashEverywhere(scenario, 2048);
  EXPECT_GE(crashes.subsets, 100);
}

// Resharding commits by the same protocol; the source stays as it is.
TEST(CrashTest, C44_EveryOperationAndEverySubsetOfAReshard) {
  const auto reshard = [](DiskModel& disk) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const FoundCheckpoint source, FindLatestCheckpoint(&disk, "ckpt"));
    return ReshardCheckpoint(*source.reader, &disk, "out", {.world = 3, .ep = 1, .tp = 1});
  };
  Scenario scenario = SavesOfOneRank(1);
  scenario.new_step = 1;
  scenario.save = reshard;
  scenario.next = [reshard](DiskModel& disk) -> absl::Status {
    if (FindLatestCheckpoint(&disk, "out").ok()) return absl::OkStatus();
    EK_RETURN_IF_ERROR(reshard(disk));
    EK_ASSIGN_OR_RETURN(const FoundCheckpoint made, FindLatestCheckpoint(&disk, "out"));
    return CheckLoad(*made.reader, {}, 0);
  };
  const Crashes crashes = CrashEverywhere(scenario, 1024);
  EXPECT_GE(crashes.subsets, 100);
}

// The save after a crash is itself cut off at every operation, from every disk that the first crash can leave.
TEST(CrashTest, C44_TheSaveAfterACrashMayCrashToo) {
  DiskModel probe;
  ASSERT_OK(SaveOne(probe, 1));
  const int64_t begin = probe.operations();
  ASSERT_OK(SaveOne(probe, 2));
  int64_t disks = 0;
  std::set<uint64_t> seen;
  for (int64_t at = begin; at <= probe.operations(); ++at) {
    DiskModel disk;
    ASSERT_OK(SaveOne(disk, 1));
    disk.CrashAt(at);
    SaveOne(disk, 2).IgnoreError();
    ForEachCrash(disk, [&](DiskModel& crashed) {
      if (!seen.insert(crashed.StateDigest()).second || HasFailure()) return;
      ++disks;
      const std::shared_ptr<DiskModel> start = crashed.Clone();
      const absl::StatusOr<FoundCheckpoint> found = FindLatestCheckpoint(start.get(), "ckpt");
      ASSERT_OK(found.status());
      Scenario again = SavesOfOneRank(found->reader->step());
      const int64_t first = start->operations();
      const std::unique_ptr<DiskModel> second_probe = start->Clone();
      ASSERT_OK(again.save(*second_probe));
      for (int64_t then = first; then <= second_probe->operations(); ++then) {
        const std::unique_ptr<DiskModel> second = start->Clone();
        second->CrashAt(then);
        const bool saved = again.save(*second).ok();
        std::set<uint64_t> seen_again;
        ForEachCrash(*second, [&](DiskModel& twice) {
          if (!seen_again.insert(twice.StateDigest()).second || HasFailure()) return;
          CheckAfterCrash(again, twice, saved, absl::StrCat("crash at ", at - begin, ", then at ", then - first));
        });
      }
    });
  }
  EXPECT_GE(disks, 12);
}

}  // namespace
}  // namespace evenkeel::zero3

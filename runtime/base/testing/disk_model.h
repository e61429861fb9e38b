// A disk in memory that forgets what was not synced, fails when told, and crashes at any operation.
//
// Bytes are volatile until their file is synced; names are volatile until their folder is synced. Crash() keeps an
// arbitrary choice of the volatile part: any subset of unsynced appends (or of their sectors; a lost one inside the
// file reads as zeros, the last kept one sets the length) and any subset of unsynced changes of names.
//
//   DiskModel disk;
//   disk.CrashAt(17);                            // the 18th operation and all later ones fail
//   Save(disk).IgnoreError();
//   disk.Crash([&](int choices) { return random() % choices; });
//   Load(disk);                                  // must find the old or the new state
#ifndef EVENKEEL_RUNTIME_BASE_TESTING_DISK_MODEL_H_
#define EVENKEEL_RUNTIME_BASE_TESTING_DISK_MODEL_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/file_system.h"

namespace evenkeel::testutil {

// Thread-safe. Holds one root folder "/" and whatever is made below it; paths are absolute or relative to it.
class DiskModel final : public FileSystem {
 public:
  DiskModel();
  ~DiskModel() override;

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<int64_t> FileSize(const std::string& path) override;
  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset, int64_t length) override;
  absl::Status ReadInto(const std::string& path, int64_t offset, int64_t length, void* destination) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<DirectoryEntry>> List(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;

  // Operations that change the disk or sync it, so far (reads do not count).
  int64_t operations() const;
  // Operation number `n` (0-based, counted from construction) and every later one fail with Unavailable "crashed".
  void CrashAt(int64_t n);
  // Operation number `n` alone fails with `error` and changes nothing (an Append writes half of its bytes).
  void FailAt(int64_t n, absl::Status error);
  // Appends fail with ResourceExhausted once the files together would hold more.
  void LimitBytes(int64_t bytes);
  // Power cut: `choose(c)` returns a number in [0, c) and decides for each volatile item whether it is kept (c == 2).
  // Afterwards operations work again, and open files and locks are dead.
  void Crash(const std::function<int(int choices)>& choose);
  // Number of volatile items that Crash would ask about now, if it kept everything.
  int64_t volatile_items() const;
  // From now on an append is cut at every multiple of `bytes` of its file, and its parts survive or are lost one by
  // one.
  void SplitAppends(int64_t bytes);
  // The same disk, with no open files and no locks. For trying several crashes from one state.
  std::unique_ptr<DiskModel> Clone() const;
  // Of all names and bytes as they are seen now: equal for two disks that no reader can tell apart.
  uint64_t StateDigest() const;
  // Flips bits or cuts for tests of readers: the bytes of a file, to be changed in place.
  void Mutate(const std::string& path, const std::function<void(std::string&)>& change);

 private:
  friend class ModelFile;
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  struct NameChange;
  struct Node {
    bool is_directory = false;
    // Files: bytes that survive, and appends since the last sync.
    std::string durable;
    std::vector<std::string> pending;
    // Folders: names that survive, names as seen now, and the changes between them in order.
    std::map<std::string, NodePtr> durable_names;
    std::map<std::string, NodePtr> names;
    std::vector<NameChange> changes;
  };
  // One change of a folder. A rename adds one name and removes another: both stand or fall together.
  struct NameChange {
    std::string name;
    NodePtr node;             // null: removed
    std::string also_remove;  // the old name of a rename
  };

  absl::StatusOr<NodePtr> Find(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<NodePtr> FindFile(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<NodePtr> FindFolder(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status Begin(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Append(const NodePtr& node, int64_t life, const std::string& path, absl::string_view bytes);
  absl::Status Sync(const NodePtr& node, int64_t life, const std::string& path);
  static std::string Content(const Node& file);
  static NodePtr CloneNode(const NodePtr& node, std::map<const Node*, NodePtr>& done);
  static uint64_t NodeDigest(const Node& node);

  mutable absl::Mutex mutex_;
  NodePtr root_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> locks_ ABSL_GUARDED_BY(mutex_);
  int64_t operations_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t crash_at_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<int64_t>::max();
  int64_t fail_at_ ABSL_GUARDED_BY(mutex_) = -1;
  absl::Status fail_with_ ABSL_GUARDED_BY(mutex_);
  int64_t byte_limit_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<int64_t>::max();
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t sector_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: appends are whole
  int64_t life_ ABSL_GUARDED_BY(mutex_) = 0;          // counts crashes; older handles are dead
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_RUNTIME_BASE_TESTING_DISK_MODEL_H_

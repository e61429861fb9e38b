#include "evenkeel/runtime/base/testing/disk_model.h"

#include <cstddef>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::testutil {
namespace {

struct Split {
  std::string folder;
  std::string name;
};

Split SplitPath(const std::string& path) {
  std::vector<std::string> parts = absl::StrSplit(path, '/', absl::SkipEmpty());
  EK_CHECK(!parts.empty());
  Split split;
  split.name = parts.back();
  parts.pop_back();
  split.folder = absl::StrJoin(parts, "/");
  return split;
}

}  // namespace

class ModelFile final : public WritableFile {
 public:
  ModelFile(DiskModel* disk, DiskModel::NodePtr node, int64_t life, std::string path)
      : disk_(disk), node_(std::move(node)), life_(life), path_(std::move(path)) {}
  absl::Status Append(absl::string_view bytes) override { return disk_->Append(node_, life_, path_, bytes); }
  absl::Status Sync() override { return disk_->Sync(node_, life_, path_); }
  absl::Status Close() override { return absl::OkStatus(); }

 private:
  DiskModel* const disk_;
  const DiskModel::NodePtr node_;
  const int64_t life_;
  const std::string path_;
};

namespace {

class ModelLock final : public FileLock {
 public:
  explicit ModelLock(std::function<void()> release) : release_(std::move(release)) {}
  ~ModelLock() override { release_(); }

 private:
  const std::function<void()> release_;
};

}  // namespace

DiskModel::DiskModel() : root_(std::make_shared<Node>()) { root_->is_directory = true; }
DiskModel::~DiskModel() = default;

absl::Status DiskModel::Begin(const std::string& what) {
  const int64_t number = operations_++;
  if (number >= crash_at_) return absl::UnavailableError(absl::StrCat("crashed before: ", what));
  if (number == fail_at_) return fail_with_;
  return absl::OkStatus();
}

absl::StatusOr<DiskModel::NodePtr> DiskModel::Find(const std::string& path) const {
  NodePtr node = root_;
  for (absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (part == ".") continue;
    const auto found = node->names.find(std::string(part));
    if (!node->is_directory || found == node->names.end()) return absl::NotFoundError(absl::StrCat("no ", path));
    node = found->second;
  }
  return node;
}

absl::StatusOr<DiskModel::NodePtr> DiskModel::FindFile(const std::string& path) const {
  EK_ASSIGN_OR_RETURN(NodePtr node, Find(path));
  if (node->is_directory) return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  return node;
}

absl::StatusOr<DiskModel::NodePtr> DiskModel::FindFolder(const std::string& path) const {
  EK_ASSIGN_OR_RETURN(NodePtr node, Find(path));
  if (!node->is_directory) return absl::InvalidArgumentError(absl::StrCat(path, " is not a folder"));
  return node;
}

std::string DiskModel::Content(const Node& file) {
  std::string content = file.durable;
  for (const std::string& bytes : file.pending) content += bytes;
  return content;
}

absl::StatusOr<std::unique_ptr<WritableFile>> DiskModel::Create(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Begin("create " + path));
  const Split split = SplitPath(path);
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(split.folder));
  auto node = std::make_shared<Node>();
  if (!folder->names.emplace(split.name, node).second) return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  folder->changes.push_back({split.name, node, ""});
  return std::make_unique<ModelFile>(this, node, life_, path);
}

absl::Status DiskModel::Append(const NodePtr& node, int64_t life, const std::string& path, absl::string_view bytes) {
  absl::MutexLock lock(&mutex_);
  if (life != life_) return absl::UnavailableError(absl::StrCat(path, ": opened before a crash"));
  const absl::Status begun = Begin("append to " + path);
  if (!begun.ok()) {
    node->pending.emplace_back(bytes.substr(0, bytes.size() / 2));
    return begun;
  }
  if (static_cast<int64_t>(bytes.size()) > byte_limit_ - bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot write ", path, ": no space left"));
  }
  bytes_ += static_cast<int64_t>(bytes.size());
  if (sector_bytes_ <= 0) {
    node->pending.emplace_back(bytes);
    return absl::OkStatus();
  }
  int64_t at = static_cast<int64_t>(Content(*node).size());
  while (!bytes.empty()) {
    const int64_t room = sector_bytes_ - at % sector_bytes_;
    const absl::string_view part = bytes.substr(0, static_cast<size_t>(room));
    node->pending.emplace_back(part);
    at += static_cast<int64_t>(part.size());
    bytes.remove_prefix(part.size());
  }
  return absl::OkStatus();
}

absl::Status DiskModel::Sync(const NodePtr& node, int64_t life, const std::string& path) {
  absl::MutexLock lock(&mutex_);
  if (life != life_) return absl::UnavailableError(absl::StrCat(path, ": opened before a crash"));
  EK_RETURN_IF_ERROR(Begin("sync " + path));
  node->durable = Content(*node);
  node->pending.clear();
  return absl::OkStatus();
}

absl::StatusOr<int64_t> DiskModel::FileSize(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_ASSIGN_OR_RETURN(const NodePtr node, FindFile(path));
  return static_cast<int64_t>(Content(*node).size());
}

absl::StatusOr<std::string> DiskModel::Read(const std::string& path, int64_t offset, int64_t length) {
  absl::MutexLock lock(&mutex_);
  EK_ASSIGN_OR_RETURN(const NodePtr node, FindFile(path));
  const std::string content = Content(*node);
  const int64_t size = static_cast<int64_t>(content.size());
  if (offset < 0 || length < 0) return absl::InvalidArgumentError(absl::StrCat(path, ": negative range"));
  if (offset > size || length > size - offset) {
    return absl::DataLossError(
        absl::StrCat(path, ": ", length, " bytes wanted at ", offset, ", the file has ", size, " bytes"));
  }
  return content.substr(static_cast<size_t>(offset), static_cast<size_t>(length));
}

absl::Status DiskModel::ReadInto(const std::string& path, int64_t offset, int64_t length, void* destination) {
  EK_ASSIGN_OR_RETURN(const std::string bytes, Read(path, offset, length));
  if (!bytes.empty()) std::memcpy(destination, bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::Status DiskModel::MakeDirectory(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Begin("make folder " + path));
  const Split split = SplitPath(path);
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(split.folder));
  auto node = std::make_shared<Node>();
  node->is_directory = true;
  if (!folder->names.emplace(split.name, node).second) return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  folder->changes.push_back({split.name, node, ""});
  return absl::OkStatus();
}

absl::Status DiskModel::SyncDirectory(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Begin("sync folder " + path));
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(path));
  folder->durable_names = folder->names;
  folder->changes.clear();
  return absl::OkStatus();
}

absl::Status DiskModel::Rename(const std::string& from, const std::string& to) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Begin(absl::StrCat("rename ", from, " to ", to)));
  const Split source = SplitPath(from), target = SplitPath(to);
  // One folder on both sides: all that a commit needs, and one durable change.
  if (source.folder != target.folder) {
    return absl::InvalidArgumentError(absl::StrCat("the model renames inside one folder only: ", from, " to ", to));
  }
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(source.folder));
  const auto found = folder->names.find(source.name);
  if (found == folder->names.end()) return absl::NotFoundError(absl::StrCat("no ", from));
  const NodePtr node = found->second;
  if (!folder->names.emplace(target.name, node).second) return absl::AlreadyExistsError(absl::StrCat(to, " exists"));
  folder->names.erase(source.name);
  folder->changes.push_back({target.name, node, source.name});
  return absl::OkStatus();
}

absl::Status DiskModel::RemoveFile(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Begin("remove " + path));
  EK_ASSIGN_OR_RETURN(const NodePtr node, FindFile(path));
  const Split split = SplitPath(path);
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(split.folder));
  bytes_ -= static_cast<int64_t>(Content(*node).size());
  folder->names.erase(split.name);
  folder->changes.push_back({split.name, nullptr, ""});
  return absl::OkStatus();
}

absl::Status DiskModel::RemoveDirectory(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Begin("remove folder " + path));
  EK_ASSIGN_OR_RETURN(const NodePtr node, FindFolder(path));
  if (!node->names.empty()) return absl::AlreadyExistsError(absl::StrCat(path, " is not empty"));
  const Split split = SplitPath(path);
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(split.folder));
  folder->names.erase(split.name);
  folder->changes.push_back({split.name, nullptr, ""});
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DirectoryEntry>> DiskModel::List(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  EK_ASSIGN_OR_RETURN(const NodePtr folder, FindFolder(path));
  std::vector<DirectoryEntry> entries;
  for (const auto& [name, node] : folder->names) entries.push_back({name, node->is_directory, !node->is_directory});
  return entries;
}

absl::StatusOr<std::unique_ptr<FileLock>> DiskModel::Lock(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  const auto [held, inserted] = locks_.emplace(path, life_);
  if (!inserted && held->second == life_) {
    return absl::FailedPreconditionError(absl::StrCat("another holder has the lock ", path));
  }
  held->second = life_;
  return std::make_unique<ModelLock>([this, path, life = life_] {
    absl::MutexLock release_lock(&mutex_);
    const auto found = locks_.find(path);
    if (found != locks_.end() && found->second == life) locks_.erase(found);
  });
}

int64_t DiskModel::operations() const {
  absl::MutexLock lock(&mutex_);
  return operations_;
}

void DiskModel::CrashAt(int64_t n) {
  absl::MutexLock lock(&mutex_);
  crash_at_ = n;
}

void DiskModel::FailAt(int64_t n, absl::Status error) {
  absl::MutexLock lock(&mutex_);
  fail_at_ = n;
  fail_with_ = std::move(error);
}

void DiskModel::LimitBytes(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  byte_limit_ = bytes;
}

void DiskModel::Crash(const std::function<int(int choices)>& choose) {
  absl::MutexLock lock(&mutex_);
  // A folder that a lost change would have named is unreachable, but its content is settled all the same.
  std::vector<NodePtr> queue = {root_};
  std::set<Node*> seen;
  for (size_t i = 0; i < queue.size(); ++i) {
    const NodePtr node = queue[i];
    if (!seen.insert(node.get()).second) continue;
    if (!node->is_directory) {
      std::string content = node->durable;
      size_t at = content.size();
      for (const std::string& bytes : node->pending) {
        if (choose(2) == 1) {
          content.resize(at, '\0');  // what was lost before it reads as zeros
          content += bytes;
        }
        at += bytes.size();
      }
      node->durable = content;
      node->pending.clear();
      continue;
    }
    for (const NameChange& change : node->changes) {
      if (choose(2) == 0) continue;
      if (!change.also_remove.empty()) node->durable_names.erase(change.also_remove);
      if (change.node == nullptr) {
        node->durable_names.erase(change.name);
      } else {
        node->durable_names[change.name] = change.node;
      }
    }
    node->names = node->durable_names;
    node->changes.clear();
    for (const auto& [name, child] : node->names) queue.push_back(child);
  }
  crash_at_ = std::numeric_limits<int64_t>::max();
  fail_at_ = -1;
  ++life_;
}

void DiskModel::SplitAppends(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  sector_bytes_ = bytes;
}

// A node may have several names, or none that is seen now.
DiskModel::NodePtr DiskModel::CloneNode(const NodePtr& node, std::map<const Node*, NodePtr>& done) {
  if (node == nullptr) return nullptr;
  NodePtr& copy = done[node.get()];
  if (copy != nullptr) return copy;
  copy = std::make_shared<Node>();
  const NodePtr made = copy;
  made->is_directory = node->is_directory;
  made->durable = node->durable;
  made->pending = node->pending;
  for (const auto& [name, child] : node->durable_names) made->durable_names[name] = CloneNode(child, done);
  for (const auto& [name, child] : node->names) made->names[name] = CloneNode(child, done);
  for (const NameChange& change : node->changes) {
    made->changes.push_back({change.name, CloneNode(change.node, done), change.also_remove});
  }
  return made;
}

std::unique_ptr<DiskModel> DiskModel::Clone() const {
  absl::MutexLock lock(&mutex_);
  auto copy = std::make_unique<DiskModel>();
  absl::MutexLock copy_lock(&copy->mutex_);
  std::map<const Node*, NodePtr> done;
  copy->root_ = CloneNode(root_, done);
  copy->operations_ = operations_;
  copy->crash_at_ = crash_at_;
  copy->fail_at_ = fail_at_;
  copy->fail_with_ = fail_with_;
  copy->byte_limit_ = byte_limit_;
  copy->bytes_ = bytes_;
  copy->sector_bytes_ = sector_bytes_;
  return copy;
}

uint64_t DiskModel::NodeDigest(const Node& node) {
  if (!node.is_directory) return CombineDigests(1, Digest64(Content(node)));
  uint64_t digest = 2;
  for (const auto& [name, child] : node.names) {
    digest = CombineDigests(CombineDigests(digest, Digest64(name)), NodeDigest(*child));
  }
  return digest;
}

uint64_t DiskModel::StateDigest() const {
  absl::MutexLock lock(&mutex_);
  return NodeDigest(*root_);
}

int64_t DiskModel::volatile_items() const {
  absl::MutexLock lock(&mutex_);
  int64_t count = 0;
  std::vector<NodePtr> queue = {root_};
  for (size_t i = 0; i < queue.size(); ++i) {
    count += static_cast<int64_t>(queue[i]->pending.size() + queue[i]->changes.size());
    for (const auto& [name, child] : queue[i]->names) queue.push_back(child);
  }
  return count;
}

void DiskModel::Mutate(const std::string& path, const std::function<void(std::string&)>& change) {
  absl::MutexLock lock(&mutex_);
  const absl::StatusOr<NodePtr> node = FindFile(path);
  EK_CHECK_OK(node);
  std::string content = Content(**node);
  change(content);
  (*node)->durable = std::move(content);
  (*node)->pending.clear();
}

}  // namespace evenkeel::testutil

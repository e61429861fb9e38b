#include "evenkeel/comm/backend_registry.h"

#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

struct Registry {
  absl::Mutex mutex;
  std::map<std::string, WorldFactory> factories ABSL_GUARDED_BY(mutex);
};

Registry& GlobalRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

// What the library has, linked or not.
absl::string_view TargetOf(absl::string_view name) {
  if (name == "in_process") return "//comm";
  if (name == "mpi") return "//comm/mpi";
  if (name == "sim") return "//comm/sim";
  return "";
}

}  // namespace

std::vector<RankStatus> ByRank(std::vector<absl::Status> statuses) {
  std::vector<RankStatus> results;
  for (absl::Status& status : statuses) results.push_back({static_cast<int>(results.size()), std::move(status)});
  return results;
}

bool RegisterBackend(absl::string_view name, WorldFactory factory) {
  Registry& registry = GlobalRegistry();
  absl::MutexLock lock(&registry.mutex);
  const bool inserted = registry.factories.emplace(std::string(name), std::move(factory)).second;
  EK_CHECK(inserted && "two backends have this name");
  return true;
}

absl::StatusOr<std::unique_ptr<NamedWorld>> CreateWorld(absl::string_view name, const WorldOptions& options) {
  WorldFactory factory;
  {
    Registry& registry = GlobalRegistry();
    absl::MutexLock lock(&registry.mutex);
    const auto found = registry.factories.find(std::string(name));
    if (found != registry.factories.end()) factory = found->second;
  }
  if (factory != nullptr) return factory(options);
  const std::string linked = absl::StrCat("; linked: ", absl::StrJoin(BackendNames(), ", "));
  if (TargetOf(name).empty())
    return absl::NotFoundError(absl::StrCat("comm: no backend is called \"", name, "\"", linked));
  return absl::UnimplementedError(
      absl::StrCat("comm: backend ", name, " is not linked into this program: link ", TargetOf(name), linked));
}

std::vector<std::string> BackendNames() {
  Registry& registry = GlobalRegistry();
  absl::MutexLock lock(&registry.mutex);
  std::vector<std::string> names;
  for (const auto& entry : registry.factories) names.push_back(entry.first);
  return names;
}

}  // namespace evenkeel::comm

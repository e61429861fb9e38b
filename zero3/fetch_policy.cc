#include "evenkeel/zero3/fetch_policy.h"

#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

struct Registry {
  absl::Mutex mutex;
  std::map<std::string, const FetchPolicy*> policies ABSL_GUARDED_BY(mutex);
};

Registry& GlobalRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

bool RegisterFetchPolicy(const FetchPolicy* policy) {
  Registry& registry = GlobalRegistry();
  absl::MutexLock lock(&registry.mutex);
  const bool inserted = registry.policies.emplace(std::string(policy->name()), policy).second;
  EK_CHECK(inserted && "two fetch policies have this name");
  return true;
}

absl::StatusOr<const FetchPolicy*> FindFetchPolicy(absl::string_view name) {
  Registry& registry = GlobalRegistry();
  absl::MutexLock lock(&registry.mutex);
  const auto found = registry.policies.find(std::string(name));
  if (found != registry.policies.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& entry : registry.policies) names.push_back(entry.first);
  return absl::NotFoundError(
      absl::StrCat("zero3: no fetch policy \"", name, "\" is linked; there are: ", absl::StrJoin(names, ", ")));
}

std::vector<std::string> FetchPolicyNames() {
  Registry& registry = GlobalRegistry();
  absl::MutexLock lock(&registry.mutex);
  std::vector<std::string> names;
  for (const auto& entry : registry.policies) names.push_back(entry.first);
  return names;
}

}  // namespace evenkeel::zero3

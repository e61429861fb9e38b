#include "evenkeel/moe/router.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/gate_router.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

// Filled while static objects are initialised, only read afterwards.
std::map<std::string, RouterFactory>& Registry() {
  static auto* registry =
      new std::map<std::string, RouterFactory>{{kTopK, CreateGateRouter}, {kExpertChoice, CreateGateRouter}};
  return *registry;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Router>> CreateRouter(const RouterConfig& config, const RouterGroups& groups,
                                                     Device* device) {
  EK_RETURN_IF_ERROR(config.Validate());
  if (groups.tp_size < 1 || (groups.tp != nullptr && groups.tp->size() != groups.tp_size)) {
    return absl::InvalidArgumentError(absl::StrCat("router of layer \"", config.layer, "\": TP size ", groups.tp_size,
                                                   ", TP group of ", groups.tp ? groups.tp->size() : 0));
  }
  const auto found = Registry().find(config.kind);
  if (found == Registry().end()) {
    return absl::NotFoundError(
        absl::StrCat("no router \"", config.kind, "\"; linked: ", absl::StrJoin(RouterNames(), ", ")));
  }
  return found->second(config, groups, device);
}

bool RegisterRouter(absl::string_view name, RouterFactory factory) {
  if (!Registry().emplace(std::string(name), std::move(factory)).second) {
    std::fprintf(stderr, "router \"%s\" is registered twice\n", std::string(name).c_str());
    std::abort();
  }
  return true;
}

std::vector<std::string> RouterNames() {
  std::vector<std::string> names;
  for (const auto& entry : Registry()) names.push_back(entry.first);
  return names;
}

void UpdateSelectionBias(absl::Span<const int64_t> assigned, float rate, absl::Span<float> bias) {
  EK_CHECK(assigned.size() == bias.size());
  absl::int128 total = 0;
  for (const int64_t count : assigned) total += count;
  for (size_t e = 0; e < bias.size(); ++e) {
    const absl::int128 scaled = absl::int128(assigned[e]) * static_cast<int64_t>(bias.size());
    if (scaled < total) bias[e] += rate;
    if (scaled > total) bias[e] -= rate;
  }
}

}  // namespace evenkeel::moe

// The built-in routers: a linear gate, then top-k or expert choice. Reached through CreateRouter (router.h).
#ifndef EVENKEEL_MOE_GATE_ROUTER_H_
#define EVENKEEL_MOE_GATE_ROUTER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/moe/router.h"

namespace evenkeel::moe {

// config.kind is kTopK or kExpertChoice and the configuration is valid.
absl::StatusOr<std::unique_ptr<Router>> CreateGateRouter(const RouterConfig& config, const RouterGroups& groups,
                                                         Device* device);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_GATE_ROUTER_H_

// config.json of a published checkpoint, as far as its MoE block needs it, and the names of the block's tensors.
#ifndef EVENKEEL_MOE_INTEROP_PUBLISHED_CONFIG_H_
#define EVENKEEL_MOE_INTEROP_PUBLISHED_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/moe/router_config.h"

namespace evenkeel::moe {

// A value. `router` has everything but the layer's name.
struct PublishedConfig {
  std::string family;  // "mixtral", "qwen_moe", "deepseek"
  RouterConfig router;
  int64_t ffn = 0;            // of a routed expert
  int64_t shared_ffn = 0;     // of the shared expert; 0: none
  bool gated_shared = false;  // times sigmoid(x . gate)
};

// The names below "model.layers.N.".
struct PublishedNames {
  std::string router;          // [e, h]
  std::string selection_bias;  // [e]; may be absent in the files
  std::string expert_prefix;   // "...experts."; then "I." and the three below
  std::string gate, up, down;  // [f, h], [f, h], [h, f]
  std::string shared_prefix;   // then the three above
  std::string shared_gate;     // [1, h]
};

// Parses the text of config.json. `family` overrides its model_type when not empty. InvalidArgument naming the key that
// is missing, out of range, or of a kind that cannot be run (activation, scoring function).
absl::StatusOr<PublishedConfig> ParsePublishedConfig(absl::string_view json, const std::string& family);

// The tensors of layer `layer` under the names that files of this family have.
PublishedNames NamesOf(const PublishedConfig& config, int64_t layer);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_INTEROP_PUBLISHED_CONFIG_H_

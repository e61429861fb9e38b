#include "evenkeel/moe/interop/published_config.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxConfigBytes = 1 << 20;

// Reads typed values out of one JSON object; the first problem sticks.
class Reader {
 public:
  explicit Reader(const Json& json) : json_(json) {}

  int64_t Integer(const char* key) {
    if (!json_.contains(key)) return Fail(absl::StrCat("no ", key)), 1;
    return IntegerOr(key, 1);
  }
  // null counts as absent.
  int64_t IntegerOr(const char* key, int64_t otherwise) {
    if (!json_.contains(key) || json_[key].is_null()) return otherwise;
    const Json& value = json_[key];
    if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<int32_t>::max()) {
      return Fail(absl::StrCat(key, " is not a size")), 1;
    }
    return value.get<int64_t>();
  }
  double NumberOr(const char* key, double otherwise) {
    if (!json_.contains(key) || json_[key].is_null()) return otherwise;
    if (!json_[key].is_number()) return Fail(absl::StrCat(key, " is not a number")), otherwise;
    return json_[key].get<double>();
  }
  bool FlagOr(const char* key, bool otherwise) {
    if (!json_.contains(key) || json_[key].is_null()) return otherwise;
    if (!json_[key].is_boolean()) return Fail(absl::StrCat(key, " is not a boolean")), otherwise;
    return json_[key].get<bool>();
  }
  std::string TextOr(const char* key, const char* otherwise) {
    if (!json_.contains(key) || json_[key].is_null()) return otherwise;
    if (!json_[key].is_string()) return Fail(absl::StrCat(key, " is not a text")), otherwise;
    return json_[key].get<std::string>();
  }
  void Fail(const std::string& what) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("config.json: ", what));
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json& json_;
  absl::Status status_;
};

std::string FamilyOf(const std::string& model_type) {
  if (model_type == "mixtral") return "mixtral";
  if (model_type == "qwen2_moe" || model_type == "qwen3_moe") return "qwen_moe";
  if (model_type == "deepseek_v2" || model_type == "deepseek_v3") return "deepseek";
  return model_type;
}

void ReadMixtral(Reader& reader, PublishedConfig* config) {
  config->router.experts = static_cast<int>(reader.Integer("num_local_experts"));
  config->ffn = reader.Integer("intermediate_size");
  config->router.normalization = WeightNormalization::kOverKept;
}

void ReadQwen(Reader& reader, PublishedConfig* config) {
  config->router.experts = static_cast<int>(reader.Integer("num_experts"));
  config->ffn = reader.Integer("moe_intermediate_size");
  config->shared_ffn = reader.IntegerOr("shared_expert_intermediate_size", 0);
  config->gated_shared = config->shared_ffn > 0;
  config->router.normalization =
      reader.FlagOr("norm_topk_prob", false) ? WeightNormalization::kOverKept : WeightNormalization::kNone;
}

void ReadDeepSeek(Reader& reader, const std::string& model_type, PublishedConfig* config) {
  config->router.experts = static_cast<int>(reader.Integer("n_routed_experts"));
  config->ffn = reader.Integer("moe_intermediate_size");
  config->shared_ffn = reader.IntegerOr("n_shared_experts", 0) * config->ffn;
  const bool v3 = model_type == "deepseek_v3";
  const std::string scores = reader.TextOr("scoring_func", v3 ? "sigmoid" : "softmax");
  if (scores != "sigmoid" && scores != "softmax") reader.Fail(absl::StrCat("scoring_func '", scores, "'"));
  config->router.score = scores == "sigmoid" ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax;
  const std::string method = reader.TextOr("topk_method", v3 ? "noaux_tc" : "greedy");
  if (method != "greedy") {
    config->router.groups = static_cast<int>(reader.IntegerOr("n_group", 1));
    config->router.groups_kept = static_cast<int>(reader.IntegerOr("topk_group", 1));
  }
  if (method != "greedy" && method != "group_limited_greedy" && method != "noaux_tc") {
    reader.Fail(absl::StrCat("topk_method '", method, "'"));
  }
  config->router.group_score = method == "noaux_tc" ? GroupScore::kTopTwoSum : GroupScore::kMax;
  config->router.normalization =
      reader.FlagOr("norm_topk_prob", v3) ? WeightNormalization::kOverKept : WeightNormalization::kNone;
  config->router.route_scale = reader.NumberOr("routed_scaling_factor", 1.0);
}

}  // namespace

absl::StatusOr<PublishedConfig> ParsePublishedConfig(absl::string_view json, const std::string& family) {
  if (json.size() > kMaxConfigBytes) return absl::InvalidArgumentError("config.json: over 1 MiB");
  const Json parsed = Json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return absl::InvalidArgumentError("config.json: not a JSON object");
  if (!family.empty() && family != "mixtral" && family != "qwen_moe" && family != "deepseek") {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown family '", family, "'; known: mixtral, qwen_moe, deepseek"));
  }
  Reader reader(parsed);
  PublishedConfig config;
  const std::string model_type = reader.TextOr("model_type", "");
  config.family = family.empty() ? FamilyOf(model_type) : family;
  config.router.hidden = reader.Integer("hidden_size");
  config.router.top_k = static_cast<int>(reader.Integer("num_experts_per_tok"));
  config.router.capacity.mode = CapacityMode::kDropless;
  const std::string activation = reader.TextOr("hidden_act", "silu");
  if (activation != "silu") reader.Fail(absl::StrCat("hidden_act '", activation, "', only silu can be run"));
  if (config.family == "mixtral") {
    ReadMixtral(reader, &config);
  } else if (config.family == "qwen_moe") {
    ReadQwen(reader, &config);
  } else if (config.family == "deepseek") {
    ReadDeepSeek(reader, model_type, &config);
  } else {
    reader.Fail(absl::StrCat("model_type '", config.family,
                             "'; known: mixtral, qwen2_moe, qwen3_moe, deepseek_v2, "
                             "deepseek_v3"));
  }
  EK_RETURN_IF_ERROR(reader.status());
  EK_RETURN_IF_ERROR(config.router.Validate());
  return config;
}

PublishedNames NamesOf(const PublishedConfig& config, int64_t layer) {
  const bool mixtral = config.family == "mixtral";
  const std::string block = absl::StrCat("model.layers.", layer, mixtral ? ".block_sparse_moe." : ".mlp.");
  PublishedNames names;
  names.router = block + "gate.weight";
  names.selection_bias = block + "gate.e_score_correction_bias";
  names.expert_prefix = block + "experts.";
  names.gate = mixtral ? "w1.weight" : "gate_proj.weight";
  names.up = mixtral ? "w3.weight" : "up_proj.weight";
  names.down = mixtral ? "w2.weight" : "down_proj.weight";
  names.shared_prefix = block + (config.family == "deepseek" ? "shared_experts." : "shared_expert.");
  names.shared_gate = block + "shared_expert_gate.weight";
  return names;
}

}  // namespace evenkeel::moe

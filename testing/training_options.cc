#include "evenkeel/testing/training_options.h"

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::testutil {
namespace {

using zero3::OptimizerOptions;

absl::Status Bad(absl::string_view why) { return absl::InvalidArgumentError(why); }

absl::Status Parse(absl::string_view value, double* out) {
  return absl::SimpleAtod(value, out) ? absl::OkStatus() : Bad("wanted a number");
}

absl::Status Parse(absl::string_view value, float* out) {
  double number = 0;
  EK_RETURN_IF_ERROR(Parse(value, &number));
  *out = static_cast<float>(number);
  return absl::OkStatus();
}

absl::Status Parse(absl::string_view value, bool* out) {
  return absl::SimpleAtob(value, out) ? absl::OkStatus() : Bad("wanted true or false");
}

absl::Status Parse(absl::string_view value, moe::Rational* out) {
  EK_ASSIGN_OR_RETURN(*out, moe::Rational::Parse(value));
  return absl::OkStatus();
}

absl::Status Parse(absl::string_view value, DType* out) {
  EK_ASSIGN_OR_RETURN(*out, ParseDType(value));
  return absl::OkStatus();
}

template <typename Integer>
absl::Status Parse(absl::string_view value, Integer* out) {
  return absl::SimpleAtoi(value, out) ? absl::OkStatus() : Bad("wanted a whole number");
}

// One of `known` by its name.
template <typename T>
absl::Status Choose(absl::string_view value, const std::vector<std::pair<absl::string_view, T>>& known, T* chosen) {
  std::vector<absl::string_view> names;
  for (const auto& [name, choice] : known) {
    names.push_back(name);
    if (name != value) continue;
    *chosen = choice;
    return absl::OkStatus();
  }
  return Bad(absl::StrCat("known are ", absl::StrJoin(names, ", ")));
}

using Setter = std::function<absl::Status(absl::string_view value, TrainingConfig* config)>;

// A setter of a member of the model or of the mesh.
template <typename T>
Setter Model(T LanguageModelConfig::*member) {
  return [member](absl::string_view value, TrainingConfig* config) { return Parse(value, &(config->model.*member)); };
}
Setter Mesh(int comm::MeshShape::*member) {
  return [member](absl::string_view value, TrainingConfig* config) { return Parse(value, &(config->mesh.*member)); };
}
template <typename T>
Setter ModelChoice(T LanguageModelConfig::*member, std::vector<std::pair<absl::string_view, T>> known) {
  return [member, known](absl::string_view value, TrainingConfig* config) {
    return Choose<T>(value, known, &(config->model.*member));
  };
}

absl::Status SetSeed(absl::string_view value, TrainingConfig* config) {
  EK_RETURN_IF_ERROR(Parse(value, &config->seed));
  config->zero3.seed = config->seed;
  return absl::OkStatus();
}

absl::Status SetOptimizer(absl::string_view value, TrainingConfig* config) {
  OptimizerOptions& optimizer = config->zero3.optimizer;
  EK_RETURN_IF_ERROR(Choose<OptimizerOptions::Kind>(
      value, {{"sgd", OptimizerOptions::Kind::kSgd}, {"adamw", OptimizerOptions::Kind::kAdamW}}, &optimizer.kind));
  optimizer.learning_rate = DefaultLearningRate(optimizer.kind);
  return absl::OkStatus();
}

std::map<std::string, Setter, std::less<>> MakeSetters() {
  using C = LanguageModelConfig;
  using moe::DropPolicy;
  return {
      {"activation", ModelChoice<moe::ExpertActivation>(&C::activation, {{"gelu", moe::ExpertActivation::kGelu},
                                                                         {"swiglu", moe::ExpertActivation::kSwiGlu}})},
      {"batches", [](absl::string_view value, TrainingConfig* config) { return Parse(value, &config->batches); }},
      {"capacity_factor", Model(&C::capacity_factor)},
      {"dp", Mesh(&comm::MeshShape::dp)},
      {"drop", ModelChoice<DropPolicy>(&C::drop, {{"by_top_k", DropPolicy::kByTopK},
                                                  {"probs", DropPolicy::kProbs},
                                                  {"position", DropPolicy::kPosition},
                                                  {"choices_first", DropPolicy::kChoiceThenPosition}})},
      {"dtype", Model(&C::dtype)},
      {"ep", Mesh(&comm::MeshShape::ep)},
      {"etp", Mesh(&comm::MeshShape::etp)},
      {"expert_bias", Model(&C::expert_bias)},
      {"experts", Model(&C::experts)},
      {"ffn", Model(&C::ffn)},
      {"groups", Model(&C::groups)},
      {"groups_kept", Model(&C::groups_kept)},
      {"heads", Model(&C::heads)},
      {"hidden", Model(&C::hidden)},
      {"layers", Model(&C::layers)},
      {"learning_rate", [](absl::string_view value,
                           TrainingConfig* config) { return Parse(value, &config->zero3.optimizer.learning_rate); }},
      {"loss_scale",
       [](absl::string_view value, TrainingConfig* config) { return Parse(value, &config->zero3.loss_scale.initial); }},
      {"numerics", ModelChoice<moe::ExpertNumerics>(&C::numerics, {{"fast", moe::ExpertNumerics::kFast},
                                                                   {"canonical", moe::ExpertNumerics::kCanonical}})},
      {"optimizer", SetOptimizer},
      {"recompute", Model(&C::recompute)},
      {"residual_moe", Model(&C::residual_moe)},
      {"route_scale", Model(&C::route_scale)},
      {"score", ModelChoice<moe::ScoreFunction>(
                    &C::score, {{"softmax", moe::ScoreFunction::kSoftmax}, {"sigmoid", moe::ScoreFunction::kSigmoid}})},
      {"seed", SetSeed},
      {"sequence", Model(&C::sequence)},
      {"shared_experts", Model(&C::shared_experts)},
      {"shared_gate", Model(&C::shared_gate)},
      {"top_k", Model(&C::top_k)},
      {"tp", Mesh(&comm::MeshShape::tp)},
      {"z_coefficient", Model(&C::z_coefficient)},
  };
}

const std::map<std::string, Setter, std::less<>>& Setters() {
  static const auto* const setters = new std::map<std::string, Setter, std::less<>>(MakeSetters());
  return *setters;
}

}  // namespace

absl::Status SetTrainingOption(absl::string_view name, absl::string_view value, TrainingConfig* config) {
  const auto found = Setters().find(std::string(name));
  const absl::Status status =
      found != Setters().end() ? found->second(value, config)
                               : Bad(absl::StrCat("unknown; known are ", absl::StrJoin(TrainingOptionNames(), ", ")));
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(name, "=", value, ": ", status.message()));
}

std::vector<std::string> TrainingOptionNames() {
  std::vector<std::string> names;
  for (const auto& [name, setter] : Setters()) names.push_back(name);
  return names;
}

}  // namespace evenkeel::testutil

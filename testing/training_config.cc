#include "evenkeel/testing/training_config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/user_file.h"
#include "evenkeel/testing/reference_branch.h"
#include "evenkeel/zero3/loss_scale.h"

namespace evenkeel::testutil {
namespace {

constexpr int64_t kMaxOrderBytes = 1 << 20;
constexpr int64_t kMaxExtent = 1 << 20;
constexpr double kMaxElements = 4e9;
constexpr int64_t kMaxPasses = 1 << 16;

absl::Status Bad(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat("config: ", what)); }

absl::Status CheckDivides(absl::string_view small_name, int64_t small, absl::string_view large_name, int64_t large) {
  if (large % small == 0) return absl::OkStatus();
  return Bad(absl::StrCat(small_name, " ", small, " does not divide ", large_name, " ", large));
}

absl::Status CheckAtLeastOne(absl::string_view name, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return Bad(absl::StrCat(name, " is ", value, ", wanted at least 1"));
}

// Coefficients of losses and routes are f32.
absl::Status CheckCoefficients(const LanguageModelConfig& model) {
  if (!(model.route_scale > 0) || !std::isfinite(static_cast<float>(model.route_scale))) {
    return Bad(absl::StrCat("route_scale ", model.route_scale, " is not a positive number that fits f32"));
  }
  const std::pair<const char*, float> coefficients[] = {{"balance_coefficient", model.balance_coefficient},
                                                        {"z_coefficient", model.z_coefficient}};
  for (const auto& [name, value] : coefficients) {
    if (!(value >= 0) || !std::isfinite(value)) {
      return Bad(absl::StrCat(name, " ", value, " is not a number from 0 on that fits f32"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGroups(const LanguageModelConfig& model) {
  EK_RETURN_IF_ERROR(CheckAtLeastOne("groups", model.groups));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("groups_kept", model.groups_kept));
  EK_RETURN_IF_ERROR(CheckDivides("groups", model.groups, "experts", model.experts));
  const int64_t open = model.experts / model.groups * model.groups_kept;
  if (model.groups_kept > model.groups || open < model.top_k) {
    return Bad(absl::StrCat("groups_kept ", model.groups_kept, " of ", model.groups, " groups of ",
                            model.experts / model.groups, " experts does not fit top_k ", model.top_k));
  }
  return absl::OkStatus();
}

absl::Status CheckBranch(const LanguageModelConfig& model) {
  if (model.shared_experts < 0)
    return Bad(absl::StrCat("shared_experts is ", model.shared_experts, ", wanted 0 or more"));
  if (model.shared_gate && model.shared_experts == 0) return Bad("shared_gate needs shared_experts");
  if (model.residual_moe && model.shared_experts > 0) {
    return Bad(absl::StrCat("residual_moe beside ", model.shared_experts, " shared_experts: choose one"));
  }
  return absl::OkStatus();
}

// A model that is small by design: one too many digits in a flag is told before anything is allocated.
absl::Status CheckSize(const LanguageModelConfig& model) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"vocabulary", model.vocabulary}, {"sequence", model.sequence},
      {"sequences", model.sequences},   {"hidden", model.hidden},
      {"layers", model.layers},         {"ffn", model.ffn},
      {"experts", model.experts},       {"shared_experts", model.shared_experts}};
  for (const auto& [name, value] : sizes) {
    if (value > kMaxExtent) return Bad(absl::StrCat(name, " is ", value, ", wanted at most ", kMaxExtent));
  }
  const double matrices =
      2.0 * static_cast<double>(model.experts + model.shared_experts) * model.ffn + 4.0 * model.hidden;
  const double elements = (matrices * model.layers + 2.0 * model.vocabulary) * model.hidden;
  if (elements <= kMaxElements) return absl::OkStatus();
  return Bad(absl::StrCat("hidden ", model.hidden, ", ffn ", model.ffn, ", layers ", model.layers, ", experts ",
                          model.experts, " and shared_experts ", model.shared_experts, " are a model of ", elements,
                          " parameters, wanted at most ", kMaxElements));
}

absl::Status CheckModel(const LanguageModelConfig& model) {
  EK_RETURN_IF_ERROR(CheckAtLeastOne("vocabulary", model.vocabulary));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("sequence", model.sequence));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("sequences", model.sequences));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("hidden", model.hidden));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("heads", model.heads));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("layers", model.layers));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("ffn", model.ffn));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("experts", model.experts));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("top_k", model.top_k));
  if (model.top_k > model.experts) return Bad(absl::StrCat("top_k ", model.top_k, " exceeds experts ", model.experts));
  EK_RETURN_IF_ERROR(CheckDivides("heads", model.heads, "hidden", model.hidden));
  EK_RETURN_IF_ERROR(CheckBranch(model));
  EK_RETURN_IF_ERROR(CheckCoefficients(model));
  EK_RETURN_IF_ERROR(CheckGroups(model));
  EK_RETURN_IF_ERROR(CheckSize(model));
  if (model.vocabulary < 256) return Bad(absl::StrCat("vocabulary ", model.vocabulary, " is below the 256 bytes"));
  if (!IsFloating(model.dtype)) {
    return Bad(absl::StrCat("dtype ", DTypeName(model.dtype), " is none of f32, bf16, f16, f64"));
  }
  return absl::OkStatus();
}

bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

absl::Status CheckBatches(const TrainingConfig& config) {
  const int64_t batches = config.num_batches();
  if (config.batches < 0 || batches % config.mesh.dp != 0 || !IsPowerOfTwo(config.passes())) {
    return Bad(absl::StrCat("batches ", config.batches, " is not dp ", config.mesh.dp, " times a power of two"));
  }
  if (config.passes() <= kMaxPasses) return absl::OkStatus();
  return Bad(absl::StrCat("batches ", config.batches, " are ", config.passes(), " passes of each of ", config.mesh.dp,
                          " replicas, wanted at most ", kMaxPasses));
}

// What cuts every sum into the same blocks whatever the layout.
absl::Status CheckCanonical(const TrainingConfig& config, const comm::MeshShape& layout) {
  const LanguageModelConfig& model = config.model;
  if (!model.canonical()) return absl::OkStatus();
  const std::pair<const char*, int64_t> powers[] = {{"batches", config.num_batches()},
                                                    {"dp", layout.dp},
                                                    {"ep", layout.ep},
                                                    {"heads", model.heads},
                                                    {"experts", model.experts}};
  for (const auto& [name, value] : powers) {
    if (!IsPowerOfTwo(value)) {
      return Bad(absl::StrCat("canonical numerics want powers of two, ", name, " is ", value));
    }
  }
  if (moe::kCanonicalBlocks % layout.tp != 0 || model.ffn % moe::kCanonicalBlocks != 0) {
    return Bad(absl::StrCat("canonical numerics cut ffn into ", moe::kCanonicalBlocks, " blocks; ffn ", model.ffn,
                            " with tp ", layout.tp, " does not fit"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptimizer(const zero3::OptimizerOptions& optimizer) {
  if (std::isfinite(optimizer.learning_rate) && optimizer.learning_rate > 0) return absl::OkStatus();
  return Bad(absl::StrCat("learning rate ", optimizer.learning_rate, " is not a positive number"));
}

}  // namespace

moe::DenseBranchConfig LanguageModelConfig::branch() const {
  moe::DenseBranchConfig config;
  config.hidden = hidden;
  config.ffn = residual_moe ? ffn : shared_experts * ffn;
  config.activation = activation;
  config.bias = expert_bias;
  config.mix = residual_moe ? moe::BranchMix::kSoftmax : shared_gate ? moe::BranchMix::kSigmoid : moe::BranchMix::kAdd;
  config.dtype = dtype;
  config.numerics = numerics;
  return config;
}

double DefaultLearningRate(zero3::OptimizerOptions::Kind optimizer) {
  return optimizer == zero3::OptimizerOptions::Kind::kAdamW ? 0.003 : 0.3;
}

absl::Status ValidateTrainingConfig(const TrainingConfig& config) {
  const LanguageModelConfig& model = config.model;
  const comm::MeshShape& mesh = config.mesh;
  EK_RETURN_IF_ERROR(CheckModel(model));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("tp", mesh.tp));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("ep", mesh.ep));
  EK_RETURN_IF_ERROR(CheckAtLeastOne("dp", mesh.dp));
  EK_RETURN_IF_ERROR(CheckDivides("tp", mesh.tp, "heads", model.heads));
  EK_RETURN_IF_ERROR(CheckDivides("ep", mesh.ep, "experts", model.experts));
  if (model.has_branch())
    EK_RETURN_IF_ERROR(CheckDivides("tp", mesh.tp, "ffn of the dense branch", model.branch().ffn));
  const comm::MeshShape layout = MeshForOrder(mesh, config.order);
  EK_RETURN_IF_ERROR(CheckDivides("etp", layout.etp, "ffn", model.ffn));
  EK_RETURN_IF_ERROR(comm::Mesh::Create(layout).status());
  EK_RETURN_IF_ERROR(CheckBatches(config));
  EK_RETURN_IF_ERROR(CheckCanonical(config, layout));
  EK_RETURN_IF_ERROR(CheckOptimizer(config.zero3.optimizer));
  EK_RETURN_IF_ERROR(zero3::ValidateLossScaleOptions(config.zero3.loss_scale));
  const auto invariant = [](const moe::AxisType& type) { return type.placement == moe::Placement::kInvariant; };
  if (!invariant(config.order.input) || !invariant(config.order.output)) {
    return Bad(absl::StrCat("order ", config.order.name, " takes sliced tokens, this model's lanes hold all of them"));
  }
  return moe::CheckOrder(config.order).status();
}

comm::MeshShape MeshForOrder(const comm::MeshShape& mesh, const moe::Order& order) {
  comm::MeshShape shape = mesh;
  if (order.expert_layout == moe::ExpertLayout::kWhole) shape.etp = 1;
  if (order.expert_layout == moe::ExpertLayout::kTensorParallel) shape.etp = shape.tp;
  return shape;
}

std::string MeshText(const comm::MeshShape& mesh) {
  return absl::StrCat("tp ", mesh.tp, " ep ", mesh.ep, " dp ", mesh.dp, " etp ", mesh.etp);
}

absl::StatusOr<moe::Order> LoadOrder(absl::string_view name_or_path) {
  absl::StatusOr<moe::Order> known = moe::FindOrder(name_or_path);
  if (known.ok()) return known;
  const absl::StatusOr<std::string> text = ReadUserFile(std::string(name_or_path), kMaxOrderBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat("order ", name_or_path, " is no file, and ", known.status().message()));
  }
  EK_RETURN_IF_ERROR(text.status());
  return moe::ParseOrder(*text, name_or_path);
}

ReferenceConfig ReferenceConfigOf(const LanguageModelConfig& model, const comm::MeshShape& mesh) {
  ReferenceConfig config;
  config.vocabulary = model.vocabulary;
  config.sequence = model.sequence;
  config.hidden = model.hidden;
  config.heads = model.heads;
  config.layers = model.layers;
  config.ffn = model.ffn;
  config.swiglu = model.activation == moe::ExpertActivation::kSwiGlu;
  config.expert_bias = model.expert_bias;
  config.norm_epsilon = model.norm_epsilon;
  if (model.has_branch()) {
    const moe::DenseBranchConfig branch = model.branch();
    config.branch_ffn = branch.ffn;
    config.branch = branch.mix == moe::BranchMix::kAdd       ? ReferenceMix::kAdd
                    : branch.mix == moe::BranchMix::kSigmoid ? ReferenceMix::kSigmoid
                                                             : ReferenceMix::kSoftmax;
  }
  config.router.experts = model.experts;
  config.router.top_k = model.top_k;
  config.router.sigmoid = model.score == moe::ScoreFunction::kSigmoid;
  config.router.route_scale = model.route_scale;
  config.router.groups = model.groups;
  config.router.groups_kept = model.groups_kept;
  config.router.group_top_two = model.group_score == moe::GroupScore::kTopTwoSum;
  config.router.capacity_numerator = model.capacity_factor.numerator();
  config.router.capacity_denominator = model.capacity_factor.denominator();
  config.router.min_capacity = model.min_capacity;
  config.router.capacity_multiple = model.canonical() ? moe::kCanonicalBlocks : mesh.tp;
  config.router.balance_coefficient = model.balance_coefficient;
  config.router.z_coefficient = model.z_coefficient;
  switch (model.drop) {
    case moe::DropPolicy::kProbs:
      config.router.drop = ReferenceDrop::kProbabilities;
      break;
    case moe::DropPolicy::kPosition:
      config.router.drop = ReferenceDrop::kPosition;
      break;
    case moe::DropPolicy::kChoiceThenPosition:
      config.router.drop = ReferenceDrop::kChoicesFirst;
      break;
    default:
      config.router.drop = ReferenceDrop::kByTopK;
  }
  // EP groups of whole experts span lanes: ep consecutive ranks hold ep / tp replicas.
  config.capacity_replicas = mesh.etp == mesh.tp ? mesh.ep : std::max(1, mesh.ep / mesh.tp);
  return config;
}

}  // namespace evenkeel::testutil

#include "evenkeel/zero3/sharded_optimizer.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/optimizer.h"

namespace evenkeel::zero3 {
namespace {

// Bits of the vote.
constexpr int64_t kNonFinite = 1;
constexpr int64_t kShardChanged = 2;
constexpr int64_t kReplicasDiffer = 4;
constexpr int64_t kOrderDiffers = 8;
constexpr int64_t kScaleDiffers = 16;

ErrorContext Where(const ModelGroups& groups) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "step";
  if (groups.dp != nullptr) {
    where.group = groups.dp->group().name;
    where.rank = groups.dp->rank();
    where.size = groups.dp->size();
  }
  return where;
}

absl::Status BadOption(absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "optimizer options";
  return MakeError(absl::StatusCode::kInvalidArgument, where, what);
}

bool InUnitInterval(double x) { return x >= 0 && x < 1; }

bool HasTrainableF16(absl::Span<Unit* const> units) {
  for (const Unit* unit : units) {
    for (const ParameterSpec& spec : unit->specs()) {
      if (spec.trainable && spec.dtype == DType::kF16) return true;
    }
  }
  return false;
}

int RankIn(const comm::Communicator* group) { return group == nullptr ? 0 : group->rank(); }

}  // namespace

std::vector<std::string> OptimizerStateNames(const OptimizerOptions& options) {
  if (options.kind == OptimizerOptions::Kind::kAdamW) return {"first_moment", "second_moment"};
  if (options.momentum != 0) return {"momentum"};
  return {};
}

absl::Status ValidateOptimizerOptions(const OptimizerOptions& options) {
  if (!std::isfinite(options.learning_rate) || options.learning_rate < 0) {
    return BadOption(absl::StrCat("learning_rate ", options.learning_rate, " must be finite and not negative"));
  }
  if (!std::isfinite(options.weight_decay) || options.weight_decay < 0) {
    return BadOption(absl::StrCat("weight_decay ", options.weight_decay, " must be finite and not negative"));
  }
  if (!InUnitInterval(options.momentum))
    return BadOption(absl::StrCat("momentum ", options.momentum, " is not in [0, 1)"));
  if (options.kind != OptimizerOptions::Kind::kAdamW) return absl::OkStatus();
  if (!InUnitInterval(options.beta1) || !InUnitInterval(options.beta2)) {
    return BadOption(absl::StrCat("beta1 ", options.beta1, " and beta2 ", options.beta2, " must be in [0, 1)"));
  }
  // Zero would turn the zero padding of shards into NaN.
  if (!(options.epsilon > 0)) return BadOption(absl::StrCat("epsilon ", options.epsilon, " must be positive"));
  return absl::OkStatus();
}

ShardedOptimizer::ShardedOptimizer(std::vector<Unit*> units, const PartitionedModelOptions& options,
                                   const ModelGroups& groups, Stream* compute, Stream* comm)
    : units_(std::move(units)),
      options_(options.optimizer),
      max_gradient_norm_(options.max_gradient_norm),
      max_skipped_in_a_row_(options.max_skipped_in_a_row),
      groups_(groups),
      compute_(compute),
      comm_(comm),
      loss_scale_(options.loss_scale, HasTrainableF16(units_)) {
  for (const Unit* unit : units_) has_experts_ = has_experts_ || unit->members().family == Family::kExpert;
}

absl::StatusOr<std::unique_ptr<ShardedOptimizer>> ShardedOptimizer::Create(std::vector<Unit*> units,
                                                                           const PartitionedModelOptions& options,
                                                                           const ModelGroups& groups, Device* device,
                                                                           Stream* compute, Stream* comm) {
  EK_RETURN_IF_ERROR(ValidateOptimizerOptions(options.optimizer));
  if (options.max_skipped_in_a_row < 1) {
    return BadOption(absl::StrCat("max_skipped_in_a_row ", options.max_skipped_in_a_row, " < 1"));
  }
  if (!(options.max_gradient_norm >= 0)) {
    return BadOption(absl::StrCat("max_gradient_norm ", options.max_gradient_norm, " must not be negative"));
  }
  EK_RETURN_IF_ERROR(ValidateLossScaleOptions(options.loss_scale));
  std::unique_ptr<ShardedOptimizer> optimizer(new ShardedOptimizer(std::move(units), options, groups, compute, comm));
  EK_ASSIGN_OR_RETURN(optimizer->collectives_, WordCollectives::Create(device, ExactSumOfSquares::kWords));
  return optimizer;
}

// Padding enters no sum: fragments hold none. Elements that several ranks of a group hold count on its first rank,
// TP-replicated parameters on lane 0. Returns the number of non-finite elements, counted wherever they are.
int64_t ShardedOptimizer::AddLocalSquares(Sums& sums) const {
  int64_t non_finite = 0;
  ExactSumOfSquares elsewhere;
  for (const Unit* unit : units_) {
    const bool counts_here = !unit->layout().replicated || unit->rank() == 0;
    ExactSumOfSquares& family = unit->members().family == Family::kExpert ? sums.expert : sums.dense;
    for (const ShardFragment& f : unit->fragments()) {
      if (f.gradient_offset < 0) continue;
      const bool lane_counts =
          !unit->specs()[static_cast<size_t>(f.parameter)].tp_replicated || RankIn(groups_.tp) == 0;
      ExactSumOfSquares& sum = counts_here && lane_counts ? family : elsewhere;
      const TensorView gradient = unit->Gradients(f.gradient_offset, f.count);
      non_finite += gradient.dtype() == DType::kF64 ? sum.Add(gradient.data<double>(), f.count)
                                                    : sum.Add(gradient.data<float>(), f.count);
    }
  }
  return non_finite;
}

absl::Status ShardedOptimizer::OrOverRanks(absl::Span<int64_t> words) {
  EK_RETURN_IF_ERROR(collectives_.AllReduce(groups_.dp, words, comm::ReduceOp::kBitOr, *comm_));
  return collectives_.AllReduce(groups_.tp, words, comm::ReduceOp::kBitOr, *compute_);
}

// A word is equal on all ranks exactly when no bit is set both in the or of them and in the or of their complements.
absl::StatusOr<int64_t> ShardedOptimizer::Vote(int64_t flags, uint64_t order_digest) {
  const auto digest = static_cast<int64_t>(order_digest);
  const auto scale = std::bit_cast<int64_t>(loss_scale_.scale());
  std::array<int64_t, 5> words = {flags, digest, ~digest, scale, ~scale};
  EK_RETURN_IF_ERROR(OrOverRanks(absl::MakeSpan(words)));
  return words[0] | ((words[1] & words[2]) != 0 ? kOrderDiffers : 0) | ((words[3] & words[4]) != 0 ? kScaleDiffers : 0);
}

// Integers, so the order of the groups does not matter.
absl::StatusOr<double> ShardedOptimizer::GlobalNorm(Sums& sums) {
  const auto sum = comm::ReduceOp::kSum;
  EK_RETURN_IF_ERROR(collectives_.AllReduce(groups_.dp, sums.dense.words(), sum, *comm_));
  sums.dense.Normalize();
  if (has_experts_) {
    EK_RETURN_IF_ERROR(collectives_.AllReduce(groups_.edp, sums.expert.words(), sum, *comm_));
    sums.expert.Normalize();
    EK_RETURN_IF_ERROR(collectives_.AllReduce(groups_.ep, sums.expert.words(), sum, *compute_));
    sums.expert.Normalize();
  }
  ExactSumOfSquares total = sums.dense;
  const auto add_experts = [&] {
    for (int i = 0; i < ExactSumOfSquares::kWords; ++i) {
      total.words()[static_cast<size_t>(i)] += sums.expert.words()[static_cast<size_t>(i)];
    }
    total.Normalize();
  };
  if (groups_.experts_over_tp) add_experts();
  EK_RETURN_IF_ERROR(collectives_.AllReduce(groups_.tp, total.words(), sum, *compute_));
  total.Normalize();
  if (!groups_.experts_over_tp) add_experts();
  return total.Norm();
}

absl::StatusOr<StepResult> ShardedOptimizer::Step(const OrderLog& log, const absl::Status& replicas,
                                                  const std::vector<std::string>& changed) {
  Sums sums;
  const int64_t non_finite = AddLocalSquares(sums);
  const int64_t flags =
      (non_finite > 0 ? kNonFinite : 0) | (changed.empty() ? 0 : kShardChanged) | (replicas.ok() ? 0 : kReplicasDiffer);
  EK_ASSIGN_OR_RETURN(const int64_t votes, Vote(flags, log.digest()));
  if ((votes & kOrderDiffers) != 0) return ReportOrder(log);
  if ((votes & kScaleDiffers) != 0) return ReportScale();
  if ((votes & kReplicasDiffer) != 0) {
    return replicas.ok() ? MakeError(absl::StatusCode::kDataLoss, Where(groups_), "replicas of other ranks differ")
                         : replicas;
  }
  if ((votes & kShardChanged) != 0) return ReportChangedShards(changed);
  if ((votes & kNonFinite) != 0) return Skip();
  StepResult result;
  result.loss_scale = loss_scale_.scale();
  EK_ASSIGN_OR_RETURN(result.gradient_norm, GlobalNorm(sums));
  result.gradient_norm /= result.loss_scale;
  if (max_gradient_norm_ > 0 && result.gradient_norm > max_gradient_norm_) {
    result.clip_scale = max_gradient_norm_ / result.gradient_norm;
  }
  ++step_;
  EK_RETURN_IF_ERROR(Update(result.clip_scale / result.loss_scale));
  EK_RETURN_IF_ERROR(ZeroGradients());
  EK_RETURN_IF_ERROR(comm_->Synchronize());
  skipped_in_a_row_ = 0;
  loss_scale_.Stepped();
  result.stepped = true;
  result.step = step_;
  result.skipped_total = skipped_total_;
  return result;
}

absl::StatusOr<StepResult> ShardedOptimizer::Skip() {
  ++skipped_total_;
  ++skipped_in_a_row_;
  StepResult result;
  result.loss_scale = loss_scale_.scale();
  const bool scale_fits = loss_scale_.Skipped();
  EK_RETURN_IF_ERROR(ZeroGradients());
  EK_RETURN_IF_ERROR(comm_->Synchronize());
  if (!scale_fits || skipped_in_a_row_ >= max_skipped_in_a_row_) {
    ErrorContext where = Where(groups_);
    where.sequence = step_;
    where.next_step = "look for the cause of the non-finite gradients, or lower the learning rate";
    return MakeError(absl::StatusCode::kAborted, where,
                     scale_fits ? absl::StrCat(skipped_in_a_row_, " steps in a row had non-finite gradients")
                                : absl::StrCat("gradients are not finite although the loss scale is at its minimum, ",
                                               loss_scale_.scale()));
  }
  result.gradient_norm = std::numeric_limits<double>::quiet_NaN();
  result.step = step_;
  result.skipped_total = skipped_total_;
  result.skipped_in_a_row = skipped_in_a_row_;
  return result;
}

absl::Status ShardedOptimizer::Update(double gradient_scale) {
  for (const Unit* unit : units_) {
    for (const OptimizerRun& run : unit->runs()) EK_RETURN_IF_ERROR(UpdateRun(*unit, run, gradient_scale));
  }
  for (Unit* unit : units_) EK_RETURN_IF_ERROR(unit->WeightsFromMasters(*comm_));
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::UpdateRun(const Unit& unit, const OptimizerRun& run, double gradient_scale) {
  const ConstTensorView gradient = unit.Gradients(run.gradient_offset, run.count);
  const TensorView master = HasMaster(run.dtype) ? unit.Masters(run.gradient_offset, run.count)
                                                 : unit.Weights(run.weight_offset, run.dtype, run.count);
  const double decay = run.weight_decay ? options_.weight_decay : 0;
  const auto state = [&](int i) { return unit.State(i, run.gradient_offset, run.count); };
  if (options_.kind == OptimizerOptions::Kind::kSgd) {
    const SgdOptions sgd{.learning_rate = options_.learning_rate,
                         .momentum = options_.momentum,
                         .weight_decay = decay,
                         .gradient_scale = gradient_scale};
    return SgdStep(sgd, gradient, options_.momentum != 0 ? state(0) : TensorView(), master, *comm_);
  }
  const AdamWOptions adamw{.learning_rate = options_.learning_rate,
                           .beta1 = options_.beta1,
                           .beta2 = options_.beta2,
                           .epsilon = options_.epsilon,
                           .weight_decay = decay,
                           .gradient_scale = gradient_scale,
                           .step = step_};
  return AdamWStep(adamw, gradient, state(0), state(1), master, *comm_);
}

absl::Status ShardedOptimizer::ZeroGradients() {
  for (const Unit* unit : units_) {
    const TensorView gradients = unit->Gradients(0, unit->gradient_count());
    if (gradients.num_bytes() > 0) EK_RETURN_IF_ERROR(comm_->Fill(gradients.raw(), 0, gradients.num_bytes()));
  }
  return absl::OkStatus();
}

// All ranks come here together. Data-parallel ranks are compared first, then lanes.
absl::Status ShardedOptimizer::ReportOrder(const OrderLog& log) {
  ErrorContext where = Where(groups_);
  where.sequence = step_;
  where.next_step = "make every rank fetch and flush the same leaves in the same order; a leaf may hold unused experts";
  std::vector<std::string> names;
  for (const Unit* unit : units_) names.push_back(unit->name());
  EK_ASSIGN_OR_RETURN(const auto replicas, collectives_.GatherLists(groups_.dp, log.calls(), *comm_));
  EK_ASSIGN_OR_RETURN(const auto lanes, collectives_.GatherLists(groups_.tp, log.calls(), *compute_));
  where.findings = CompareOrders(replicas, names);
  if (where.findings.empty() && groups_.tp != nullptr) {
    where.findings = CompareOrders(lanes, names);
    where.group = groups_.tp->group().name;
    where.rank = groups_.tp->rank();
    where.size = groups_.tp->size();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, where,
                   "the ranks gathered or reduced leaves in different orders; the step was not taken");
}

absl::Status ShardedOptimizer::ReportScale() {
  ErrorContext where = Where(groups_);
  where.sequence = step_;
  where.next_step = "give every rank the same loss scale options, and load the same checkpoint";
  const std::array<int64_t, 1> own = {std::bit_cast<int64_t>(loss_scale_.scale())};
  EK_ASSIGN_OR_RETURN(const auto scales, collectives_.GatherLists(groups_.dp, own, *comm_));
  for (size_t r = 0; r < scales.size(); ++r) {
    where.findings.push_back({static_cast<int>(r), absl::StrCat("scales by ", std::bit_cast<double>(scales[r][0]))});
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, where,
                   "the ranks scale their losses differently; the step was not taken");
}

StepProgress ShardedOptimizer::progress() const {
  return {step_, skipped_total_, skipped_in_a_row_, loss_scale_.scale(), loss_scale_.good_steps()};
}

void ShardedOptimizer::set_progress(const StepProgress& progress) {
  step_ = progress.step;
  skipped_total_ = progress.skipped_total;
  skipped_in_a_row_ = progress.skipped_in_a_row;
  loss_scale_.Restore(progress.loss_scale, progress.good_steps);
}

absl::Status ShardedOptimizer::ReportChangedShards(const std::vector<std::string>& names) {
  ErrorContext where = Where(groups_);
  where.sequence = step_;
  where.next_step = "the step was not taken; restart from the last checkpoint";
  const std::array<int64_t, 1> own = {names.empty() ? 0 : 1};
  EK_ASSIGN_OR_RETURN(const auto flags, collectives_.GatherLists(groups_.dp, own, *comm_));
  for (size_t r = 0; r < flags.size(); ++r) {
    if (flags[r][0] != 0) where.findings.push_back({static_cast<int>(r), "has a changed shard"});
  }
  const std::string what =
      names.empty() ? "a weight shard of another rank changed since the last step"
                    : absl::StrCat("the weight shard of ", absl::StrJoin(names, ", "), " changed since the last step");
  return MakeError(absl::StatusCode::kDataLoss, where, what);
}

}  // namespace evenkeel::zero3

#include "evenkeel/testing/participant.h"

#include <algorithm>
#include <cstring>

#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::testutil {
namespace {

// The configuration that `entry` stands for, without its last changes.
TrainingConfig DeclaredConfig(const ParityConfig& config, const ParityEntry& entry) {
  TrainingConfig own = config.base;
  own.order = entry.order;
  own.zero3.policy = entry.zero3 == "off" ? "replicated" : entry.zero3;
  return own;
}

// Orders that add up several experts' outputs on the way have another order of additions.
bool AddsOnTheWay(const moe::Order& order) {
  return std::any_of(order.steps.begin(), order.steps.end(), [](const moe::Step& step) {
    return step.kind == moe::StepKind::kFold || step.kind == moe::StepKind::kExpand;
  });
}

bool JudgedByDense(const ParityConfig& config, size_t index) {
  const ParityEntry& reference = config.entries[0];
  const ParityEntry& entry = config.entries[index];
  if (entry.dense) return false;
  if (index == 0) {
    const bool shown = std::any_of(config.entries.begin(), config.entries.end(), [](const auto& e) { return e.dense; });
    return config.judge_reference || shown;
  }
  if (reference.dense || entry.judged_by == JudgedBy::kDense) return true;
  if (entry.judged_by == JudgedBy::kBits) return false;
  return MeshForOrder(config.base.mesh, entry.order) != MeshForOrder(config.base.mesh, reference.order) ||
         AddsOnTheWay(entry.order) != AddsOnTheWay(reference.order);
}

void Add(const AxisBytes& bytes, AxisBytes* sum) {
  sum->counted += bytes.counted;
  sum->predicted += bytes.predicted;
  sum->bound += bytes.bound;
}

}  // namespace

TrainingConfig ConfigOf(const ParityConfig& config, const ParityEntry& entry) {
  TrainingConfig own = DeclaredConfig(config, entry);
  if (entry.change) entry.change(own);
  return own;
}

void Add(const OrderBytes& bytes, OrderBytes* sum) {
  Add(bytes.ep, &sum->ep);
  Add(bytes.ep_inter_node, &sum->ep_inter_node);
  Add(bytes.tp, &sum->tp);
  sum->tp_bound_at_least_ep += bytes.tp_bound_at_least_ep;
}

Participant::Participant(const ParityConfig& config, size_t index)
    : entry_(config.entries[index]),
      declared_(DeclaredConfig(config, entry_)),
      own_(ConfigOf(config, entry_)),
      observe_(config.observe),
      end_step_(config.end_step),
      by_dense_(JudgedByDense(config, index)) {}

absl::Status Participant::Start(const Corpus& corpus, comm::Backend& backend, comm::Communicator& world) {
  if (entry_.dense) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(run_, TrainingRun::Create(own_, &corpus, &backend));
  if (by_dense_) {
    EK_ASSIGN_OR_RETURN(dense_, DenseJudge::Create(declared_, &corpus, &world));
  }
  bits_ = std::make_unique<BitwiseJudge>(backend.rank());
  return absl::OkStatus();
}

absl::Status Participant::Step(int64_t step, bool is_reference, StepRecord* record) {
  if (entry_.dense) return absl::OkStatus();
  StartLooking(step, is_reference, record);
  EK_ASSIGN_OR_RETURN(const StepReport report, run_->Step(step, [this](const Tap& tap) { See(tap); }));
  const ConstTensorView norm(&report.update.gradient_norm, DType::kF64, {1});
  See({TapKind::kLoss, "mean over replicas", ConstTensorView(&report.loss, DType::kF64, {1})});
  See({TapKind::kGradient, "norm over all parameters", norm});
  StopLooking();
  if (dense_ != nullptr) EK_RETURN_IF_ERROR(dense_->Judge(step, report));
  if (!report.update.stepped) NoteSkip(step, report);
  summary_.loss_scale = run_->parameters().loss_scale();
  Count(report);
  return absl::OkStatus();
}

absl::Status Participant::Finish(int64_t steps, bool is_reference, StepRecord* record) {
  if (entry_.dense) return absl::OkStatus();
  StartLooking(steps, is_reference, record);
  EK_RETURN_IF_ERROR(run_->ReadParameters([this](const Tap& tap) {
    summary_.parameter_digest =
        CombineDigests(summary_.parameter_digest, Digest64(tap.value.raw(), tap.value.num_bytes()));
    See(tap);
  }));
  StopLooking();
  if (dense_ != nullptr) EK_RETURN_IF_ERROR(dense_->Finish());
  return absl::OkStatus();
}

Summary Participant::Summarize() {
  Finding finding = bits_ != nullptr ? bits_->finding() : Finding();
  if (dense_ != nullptr) Merge(dense_->finding(), &finding);
  if (skipped_.has_value()) finding.Add(0, *skipped_);
  if (finding.first.has_value()) PutFirst(finding);
  summary_.max_abs_diff = finding.max_abs_diff;
  summary_.bound_used = finding.bound_used;
  PutText(finding.worst, summary_.worst, sizeof(summary_.worst));
  summary_.values_compared = finding.values_compared;
  summary_.routing_differences = finding.routing_differences;
  if (run_ == nullptr) return summary_;
  const zero3::ModelCounts counts = run_->parameters().counts();
  summary_.peak = counts.peak_gathered_bytes;
  summary_.peak_predicted = counts.predicted_peak_gathered_bytes;
  summary_.host_operations = run_->leaf_fetch_host_operations();
  return summary_;
}

std::optional<FirstDifference> Participant::first_difference() const {
  if (bits_ != nullptr && bits_->finding().first.has_value()) return bits_->finding().first;
  return dense_ != nullptr ? dense_->finding().first : std::nullopt;
}

void Participant::StartLooking(int64_t step, bool is_reference, StepRecord* record) {
  step_ = step;
  write_ = is_reference ? record : nullptr;
  if (write_ != nullptr) write_->Clear();
  compare_ = !is_reference && !by_dense_ && record != nullptr;
  if (compare_) bits_->StartStep(step, record);
}

void Participant::StopLooking() {
  if (compare_) bits_->EndStep();
  if (end_step_) end_step_(step_);
  write_ = nullptr;
  compare_ = false;
}

void Participant::See(const Tap& tap) {
  if (observe_) observe_(run_->rank(), step_, tap);
  if (write_ != nullptr) write_->Add(tap);
  if (compare_) bits_->See(tap);
  if (dense_ != nullptr) dense_->See(tap);
}

void Participant::NoteSkip(int64_t step, const StepReport& report) {
  if (own_.model.dtype == DType::kF16) {  // the loss scale looks for its place; judges say whether rightly
    ++summary_.skipped_steps;
    return;
  }
  if (skipped_.has_value()) return;
  skipped_ = FirstDifference();
  skipped_->step = step;
  skipped_->tensor = "update (skipped on all ranks: a gradient is not finite)";
  skipped_->candidate = report.update.gradient_norm;
}

void Participant::Count(const StepReport& report) {
  losses_.push_back(report.loss);
  OrderBytes step;
  step.ep = {report.ep_bytes, 0, report.bounds.ep};
  step.ep_inter_node = {report.ep_inter_node_bytes, 0, report.bounds.ep_inter_node};
  step.tp = {report.tp_bytes, 0, report.bounds.tp};
  step.tp_bound_at_least_ep = report.bounds.tp_at_least_ep;
  summary_.collectives = report.collectives;
  summary_.seconds += absl::ToDoubleSeconds(report.time);
  for (const ModelPass& pass : report.passes) {
    step.ep.predicted += pass.predicted_ep_bytes;
    step.ep_inter_node.predicted += pass.predicted_ep_inter_node_bytes;
    step.tp.predicted += pass.predicted_tp_bytes;
    for (const moe::RoutingDecision& decision : pass.routing) {
      summary_.dropped += decision.num_routes() - decision.num_kept();
    }
  }
  Add(step, &summary_.bytes);
}

void Participant::Merge(const Finding& other, Finding* finding) {
  finding->max_abs_diff = std::max(finding->max_abs_diff, other.max_abs_diff);
  if (other.bound_used > finding->bound_used) {
    finding->bound_used = other.bound_used;
    finding->worst = other.worst;
  }
  finding->values_compared += other.values_compared;
  finding->routing_differences += other.routing_differences;
  if (other.first.has_value()) finding->Add(other.place, *other.first);
}

void Participant::PutFirst(const Finding& finding) {
  const FirstDifference& first = *finding.first;
  summary_.has_first = 1;
  summary_.step = first.step;
  summary_.place = finding.place;
  summary_.rank = first.rank;
  summary_.index = first.index;
  summary_.reference = first.reference;
  summary_.candidate = first.candidate;
  summary_.ulps = first.ulps;
  summary_.bound = first.bound;
  PutText(first.tensor, summary_.tensor, sizeof(summary_.tensor));
}

void Participant::PutText(const std::string& text, char* to, size_t size) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

}  // namespace evenkeel::testutil

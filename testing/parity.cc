#include "evenkeel/testing/parity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/testing/bitwise_judge.h"
#include "evenkeel/testing/dense_judge.h"
#include "evenkeel/testing/finding.h"
#include "evenkeel/testing/reference_optimizer.h"
#include "evenkeel/testing/training_run.h"

namespace evenkeel::testutil {
namespace {

// The configuration that `entry` stands for ..
TrainingConfig DeclaredConfig(const ParityConfig& config, const ParityEntry& entry) {
  TrainingConfig own = config.base;
  own.order = entry.order;
  own.zero3.policy = entry.zero3 == "off" ? "replicated" : entry.zero3;
  return own;
}

// .. and the one it runs with.
TrainingConfig ConfigOf(const ParityConfig& config, const ParityEntry& entry) {
  TrainingConfig own = DeclaredConfig(config, entry);
  if (entry.change) entry.change(own);
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

void Add(const OrderBytes& bytes, OrderBytes* sum) {
  Add(bytes.ep, &sum->ep);
  Add(bytes.ep_inter_node, &sum->ep_inter_node);
  Add(bytes.tp, &sum->tp);
  sum->tp_bound_at_least_ep += bytes.tp_bound_at_least_ep;
}

// Of a run that sends nothing and has no bound.
OrderBytes NoBytes() {
  const AxisBytes none = {.bound = -1};
  return {.ep = none, .ep_inter_node = none, .tp = none, .tp_bound_at_least_ep = -1};
}

// What ranks tell one another at the end: plain bytes, equal layout on all ranks of a job.
struct Summary {
  int64_t has_first = 0, step = 0, place = 0, rank = 0, index = 0;
  double reference = 0, candidate = 0, ulps = 0, bound = 0;
  char tensor[160] = {};
  double max_abs_diff = 0, bound_used = 0;
  int64_t values_compared = 0, routing_differences = 0;
  OrderBytes bytes;
  int64_t collectives = 0, dropped = 0, peak = 0, peak_predicted = 0;
  char worst[96] = {};  // the tensor that uses most of its bound
  double host_operations = 0, seconds = 0;
  uint64_t parameter_digest = 0;
};

// One entry on one rank.
class Participant {
 public:
  Participant(const ParityConfig& config, size_t index)
      : entry_(config.entries[index]),
        declared_(DeclaredConfig(config, entry_)),
        own_(ConfigOf(config, entry_)),
        observe_(config.observe),
        end_step_(config.end_step),
        by_dense_(JudgedByDense(config, index)) {}

  absl::Status Start(const Corpus& corpus, comm::Backend& backend, comm::Communicator& world) {
    if (entry_.dense) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(run_, TrainingRun::Create(own_, &corpus, &backend));
    if (by_dense_) {
      EK_ASSIGN_OR_RETURN(dense_, DenseJudge::Create(declared_, &corpus, &world));
    }
    bits_ = std::make_unique<BitwiseJudge>(backend.rank());
    return absl::OkStatus();
  }

  // Steps; `record` takes what is shown when this is the reference, else it is what to compare with. Null: neither.
  absl::Status Step(int64_t step, bool is_reference, StepRecord* record) {
    if (entry_.dense) return absl::OkStatus();
    StartLooking(step, is_reference, record);
    EK_ASSIGN_OR_RETURN(const StepReport report, run_->Step(step, [this](const Tap& tap) { See(tap); }));
    const ConstTensorView norm(&report.update.gradient_norm, DType::kF64, {1});
    See({TapKind::kLoss, "mean over replicas", ConstTensorView(&report.loss, DType::kF64, {1})});
    See({TapKind::kGradient, "norm over all parameters", norm});
    StopLooking();
    if (dense_ != nullptr) EK_RETURN_IF_ERROR(dense_->Judge(step, report));
    if (!report.update.stepped) NoteSkip(step, report);
    Count(report);
    return absl::OkStatus();
  }

  // The parameters behind the last step.
  absl::Status Finish(int64_t steps, bool is_reference, StepRecord* record) {
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

  // This rank's side of the result.
  Summary Summarize() {
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

  // What this rank has found so far.
  std::optional<FirstDifference> first_difference() const {
    if (bits_ != nullptr && bits_->finding().first.has_value()) return bits_->finding().first;
    return dense_ != nullptr ? dense_->finding().first : std::nullopt;
  }

  const ParityEntry& entry() const { return entry_; }
  const TrainingConfig& config() const { return declared_; }
  bool by_dense() const { return by_dense_; }
  const DenseJudge* dense() const { return dense_.get(); }
  std::vector<double>& losses() { return losses_; }

 private:
  void StartLooking(int64_t step, bool is_reference, StepRecord* record) {
    step_ = step;
    write_ = is_reference ? record : nullptr;
    if (write_ != nullptr) write_->Clear();
    compare_ = !is_reference && !by_dense_ && record != nullptr;
    if (compare_) bits_->StartStep(step, record);
  }

  void StopLooking() {
    if (compare_) bits_->EndStep();
    if (end_step_) end_step_(step_);
    write_ = nullptr;
    compare_ = false;
  }

  void See(const Tap& tap) {
    if (observe_) observe_(run_->rank(), step_, tap);
    if (write_ != nullptr) write_->Add(tap);
    if (compare_) bits_->See(tap);
    if (dense_ != nullptr) dense_->See(tap);
  }

  void NoteSkip(int64_t step, const StepReport& report) {
    if (skipped_.has_value()) return;
    skipped_ = FirstDifference();
    skipped_->step = step;
    skipped_->tensor = "update (skipped on all ranks: a gradient is not finite)";
    skipped_->candidate = report.update.gradient_norm;
  }

  void Count(const StepReport& report) {
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

  static void Merge(const Finding& other, Finding* finding) {
    finding->max_abs_diff = std::max(finding->max_abs_diff, other.max_abs_diff);
    if (other.bound_used > finding->bound_used) {
      finding->bound_used = other.bound_used;
      finding->worst = other.worst;
    }
    finding->values_compared += other.values_compared;
    finding->routing_differences += other.routing_differences;
    if (other.first.has_value()) finding->Add(other.place, *other.first);
  }

  void PutFirst(const Finding& finding) {
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

  // Cut to fit, with a zero behind it.
  static void PutText(const std::string& text, char* to, size_t size) {
    const size_t length = std::min(text.size(), size - 1);
    std::memcpy(to, text.data(), length);
    to[length] = 0;
  }

  const ParityEntry entry_;
  const TrainingConfig declared_;  // what judges go by
  const TrainingConfig own_;
  const std::function<void(int rank, int64_t step, const Tap& tap)> observe_;
  const std::function<void(int64_t step)> end_step_;
  const bool by_dense_;
  int64_t step_ = 0;
  std::unique_ptr<TrainingRun> run_;
  std::unique_ptr<DenseJudge> dense_;
  std::unique_ptr<BitwiseJudge> bits_;
  StepRecord* write_ = nullptr;
  bool compare_ = false;
  std::optional<FirstDifference> skipped_;
  std::vector<double> losses_;
  Summary summary_;
};

// The naive run in double on rank 0, from the same first parameters.
class DenseRun {
 public:
  // `first` is the first step's parameters; null on other ranks.
  absl::Status Step(const TrainingConfig& config, const Corpus& corpus, int64_t step, const ReferenceTensors& first) {
    EK_ASSIGN_OR_RETURN(const ReferenceModel model, ReferenceModel::Create(ReferenceConfigOf(
                                                        config.model, MeshForOrder(config.mesh, config.order))));
    if (step == 0) parameters_ = first;
    std::vector<ReferenceBatch> batches;
    for (int64_t r = 0; r < config.num_batches(); ++r) {
      CorpusBatch batch = corpus.Batch({.seed = config.seed, .step = step, .replica = r}, config.model.sequences,
                                       config.model.sequence);
      batches.push_back({std::move(batch.inputs), std::move(batch.targets)});
    }
    EK_ASSIGN_OR_RETURN(ReferenceStep pass, model.Run(parameters_, batches, {}));
    losses_.push_back(pass.loss);
    Clip(config.zero3.max_gradient_norm, &pass.gradients);
    const zero3::OptimizerOptions& optimizer = config.zero3.optimizer;
    if (optimizer.kind == zero3::OptimizerOptions::Kind::kAdamW) {
      ReferenceAdamW(
          {optimizer.learning_rate, optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.weight_decay},
          pass.gradients, &state_, &parameters_);
    } else {
      ReferenceSgd(optimizer.learning_rate, optimizer.weight_decay, pass.gradients, &parameters_);
    }
    return absl::OkStatus();
  }

  const std::vector<double>& losses() const { return losses_; }

 private:
  static void Clip(double limit, ReferenceTensors* gradients) {
    const double norm = ReferenceGlobalNorm(*gradients);
    if (limit <= 0 || norm <= limit) return;
    for (auto& [name, gradient] : *gradients) reference::ScaleInPlace(limit / norm, &gradient);
  }

  ReferenceTensors parameters_;
  ReferenceAdamWState state_;
  std::vector<double> losses_;
};

// The whole job on one rank.
class Job {
 public:
  Job(const ParityConfig& config, const Corpus& corpus, comm::Backend& backend)
      : config_(config), corpus_(corpus), backend_(backend), device_(HostDevice::Create()) {}

  absl::StatusOr<ParityResult> Run() {
    absl::StatusOr<ParityResult> result = RunToTheEnd();
    if (result.ok()) return result;
    // A run that went wrong may fail later, such as when lanes then route differently: say where it began.
    for (const auto& participant : participants_) {
      const std::optional<FirstDifference> first = participant->first_difference();
      if (!first.has_value()) continue;
      return Annotate(result.status(), absl::StrFormat("%s differs since step %d, %s, rank %d, index %d (%.9g, %.9g)",
                                                       participant->entry().name, first->step, first->tensor,
                                                       first->rank, first->index, first->reference, first->candidate));
    }
    return result;
  }

 private:
  absl::StatusOr<ParityResult> RunToTheEnd() {
    EK_RETURN_IF_ERROR(Start());
    for (int64_t step = 0; step < config_.steps; ++step) {
      for (size_t i = 0; i < participants_.size(); ++i) {
        EK_RETURN_IF_ERROR(participants_[i]->Step(step, i == 0, &record_));
      }
      EK_RETURN_IF_ERROR(StepDense(step));
      if (backend_.rank() == 0 && config_.progress) config_.progress(step + 1, config_.steps);
    }
    for (size_t i = 0; i < participants_.size(); ++i) {
      EK_RETURN_IF_ERROR(participants_[i]->Finish(config_.steps, i == 0, &record_));
    }
    ParityResult result;
    result.config = config_.description;
    for (size_t i = 0; i < participants_.size(); ++i) {
      EK_ASSIGN_OR_RETURN(ParityRun run, Report(i));
      result.runs.push_back(std::move(run));
    }
    FillDenseRows(&result);
    return result;
  }

  absl::Status Start() {
    EK_RETURN_IF_ERROR(ValidateParityConfig(config_));
    EK_ASSIGN_OR_RETURN(stream_, device_->CreateStream("parity"));
    comm::Group world;
    world.axis = comm::Axis::kOther;
    world.name = "world";
    for (int rank = 0; rank < backend_.size(); ++rank) world.ranks.push_back(rank);
    EK_ASSIGN_OR_RETURN(world_, backend_.CreateGroup(world));
    for (size_t i = 0; i < config_.entries.size(); ++i) {
      comm::Backend* backend = config_.decorate ? config_.decorate(i, backend_) : &backend_;
      participants_.push_back(std::make_unique<Participant>(config_, i));
      EK_RETURN_IF_ERROR(participants_.back()->Start(corpus_, *backend, *world_));
    }
    return absl::OkStatus();
  }

  bool HasDense() const {
    return std::any_of(config_.entries.begin(), config_.entries.end(), [](const auto& e) { return e.dense; });
  }

  // The first run that is judged by the double reference: it gives the first parameters.
  const Participant* FirstJudged() const {
    for (const auto& participant : participants_) {
      if (participant->dense() != nullptr) return participant.get();
    }
    return nullptr;
  }

  absl::Status StepDense(int64_t step) {
    if (backend_.rank() != 0 || !HasDense()) return absl::OkStatus();
    const Participant* judged = FirstJudged();
    EK_CHECK(judged != nullptr);
    return dense_run_.Step(judged->config(), corpus_, step, judged->dense()->parameters());
  }

  absl::StatusOr<std::vector<Summary>> Exchange(const Summary& mine) {
    std::vector<Summary> all(world_->size());
    const int64_t size = sizeof(Summary);
    EK_RETURN_IF_ERROR(world_->AllGather(ConstTensorView(&mine, DType::kU8, {size}),
                                         TensorView(all.data(), DType::kU8, {size * world_->size()}), *stream_));
    EK_RETURN_IF_ERROR(stream_->Synchronize());
    return all;
  }

  // The same on every rank.
  absl::StatusOr<ParityRun> Report(size_t index) {
    Participant& participant = *participants_[index];
    EK_ASSIGN_OR_RETURN(const std::vector<Summary> all, Exchange(participant.Summarize()));
    ParityRun run;
    run.order = participant.entry().name;
    run.zero3 = participant.entry().dense ? "off" : participant.entry().zero3;
    run.loss = participant.losses();
    uint64_t parameters = 0;
    const Summary* first = nullptr;
    for (const Summary& one : all) {
      run.max_abs_diff = std::max(run.max_abs_diff, one.max_abs_diff);
      if (one.bound_used > run.bound_used) {
        run.bound_used = one.bound_used;
        worst_[index] = one.worst;
      }
      run.values_compared += one.values_compared;
      run.routing_differences += one.routing_differences;
      Add(one.bytes, &run.bytes);
      run.dropped_routes += one.dropped;
      run.peak_gathered_bytes.counted = std::max(run.peak_gathered_bytes.counted, one.peak);
      run.peak_gathered_bytes.predicted = std::max(run.peak_gathered_bytes.predicted, one.peak_predicted);
      parameters = CombineDigests(parameters, one.parameter_digest);
      if (one.has_first != 0 && (first == nullptr || Earlier(one, *first))) first = &one;
    }
    run.dropped_routes /= participant.config().mesh.tp;  // every lane has counted its group's tokens
    if (participant.entry().dense) run.bytes = NoBytes();
    run.collectives = all[0].collectives;
    run.leaf_fetch_host_ops = all[0].host_operations;
    run.ms_per_step = 1000 * all[0].seconds / static_cast<double>(config_.steps);
    run.parameter_digest = absl::StrFormat("%016x", parameters);
    run.loss_digest = absl::StrFormat("%016x", Digest64(run.loss.data(), run.loss.size() * sizeof(double)));
    if (first != nullptr) {
      run.first_difference = {first->step,  first->tensor,    static_cast<int>(first->rank),
                              first->index, first->reference, first->candidate,
                              first->ulps,  first->bound};
    }
    SetVerdict(index, &run);
    return run;
  }

  static bool Earlier(const Summary& a, const Summary& b) {
    return std::tie(a.step, a.place, a.rank) < std::tie(b.step, b.place, b.rank);
  }

  void SetVerdict(size_t index, ParityRun* run) {
    const Participant& participant = *participants_[index];
    const bool finite = std::all_of(run->loss.begin(), run->loss.end(), [](double x) { return std::isfinite(x); });
    const std::string layout = MeshText(MeshForOrder(config_.base.mesh, participant.entry().order));
    const std::string& worst = worst_[index];
    const std::string by_dense = absl::StrFormat(
        "uses at most %.3g of its derived bound around the run in double%s (%s, %d near-tie routes)", run->bound_used,
        worst.empty() ? "" : absl::StrCat(", in ", worst), layout, run->routing_differences);
    if (participant.entry().dense) {
      run->verdict = Verdict::kReference;
      run->note = "naive run in double on one process";
    } else if (run->first_difference.has_value() || !finite || (index > 0 && run->values_compared == 0)) {
      run->verdict = Verdict::kMismatch;
      run->note = run->first_difference.has_value() ? "differs"
                  : finite                          ? "nothing was compared"
                                                    : "the loss is not finite";
    } else if (index == 0) {
      run->verdict = Verdict::kReference;
      run->note = participant.by_dense() ? by_dense : layout;
    } else {
      run->verdict = participant.by_dense() ? Verdict::kBounded : Verdict::kBitwise;
      run->note = participant.by_dense() ? by_dense : absl::StrCat("same bits as ", config_.entries[0].name);
    }
  }

  // The dense run's losses live on rank 0 only; other ranks leave them empty.
  void FillDenseRows(ParityResult* result) const {
    for (size_t i = 0; i < result->runs.size(); ++i) {
      if (!config_.entries[i].dense) continue;
      ParityRun& run = result->runs[i];
      run.loss = dense_run_.losses();
      run.loss_digest = absl::StrFormat("%016x", Digest64(run.loss.data(), run.loss.size() * sizeof(double)));
      if (i == 0) continue;
      // As a candidate it stands for how the reference compares with it.
      const ParityRun& reference = result->runs[0];
      run.verdict = reference.verdict == Verdict::kMismatch ? Verdict::kMismatch : Verdict::kBounded;
      run.max_abs_diff = reference.max_abs_diff;
      run.bound_used = reference.bound_used;
      run.first_difference = reference.first_difference;
      run.note = absl::StrCat("naive run in double; ", reference.order, " is ", reference.note);
    }
  }

  const ParityConfig& config_;
  const Corpus& corpus_;
  comm::Backend& backend_;
  const std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<comm::Communicator> world_;
  std::vector<std::unique_ptr<Participant>> participants_;
  StepRecord record_;
  std::map<size_t, std::string> worst_;  // by entry: the tensor that uses most of its bound
  DenseRun dense_run_;
};

}  // namespace

absl::StatusOr<ParityEntry> NamedEntry(absl::string_view name_or_path, absl::string_view zero3) {
  ParityEntry entry;
  entry.name = std::string(name_or_path);
  entry.zero3 = std::string(zero3);
  entry.dense = name_or_path == kDense;
  if (!entry.dense) {
    EK_ASSIGN_OR_RETURN(entry.order, LoadOrder(name_or_path));
  }
  return entry;
}

absl::Status ValidateParityConfig(const ParityConfig& config) {
  if (config.steps < 1) {
    return absl::InvalidArgumentError(absl::StrCat("config: steps is ", config.steps, ", wanted at least 1"));
  }
  int dense = 0;
  for (const ParityEntry& entry : config.entries) {
    dense += entry.dense ? 1 : 0;
    if (!entry.dense) EK_RETURN_IF_ERROR(ValidateTrainingConfig(ConfigOf(config, entry)));
  }
  if (static_cast<size_t>(dense) < config.entries.size() && dense <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("config: ", config.entries.size(), " runs of which ", dense,
                                                 " are the naive run in double; wanted at most one, and one other"));
}

absl::StatusOr<ParityResult> RunParity(const ParityConfig& config, const Corpus& corpus, comm::Backend& backend) {
  return Job(config, corpus, backend).Run();
}

absl::StatusOr<ParityResult> RunParityOnThreads(const ParityConfig& config, const Corpus& corpus,
                                                absl::Duration deadline) {
  EK_RETURN_IF_ERROR(ValidateParityConfig(config));
  comm::InProcessOptions options;
  options.world_size = config.base.mesh.tp * config.base.mesh.dp;
  options.deadline = deadline;
  if (config.ranks_per_node > 0) {
    EK_ASSIGN_OR_RETURN(options.topology, comm::Topology::Blocks(options.world_size, config.ranks_per_node));
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<comm::InProcessWorld> world, comm::InProcessWorld::Create(options));
  std::vector<absl::StatusOr<ParityResult>> results(world->size(), absl::UnknownError("not run"));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world->size(); ++rank) {
    ranks.emplace_back([&, rank] {
      world->EnterRank(rank);
      results[rank] = RunParity(config, corpus, world->backend(rank));
      world->LeaveRank(rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  // A cause before its echoes on other ranks.
  for (const auto& result : results) {
    if (!result.ok() && !absl::IsAborted(result.status()) && !absl::IsUnavailable(result.status())) return result;
  }
  for (const auto& result : results) {
    if (!result.ok()) return result;
  }
  return std::move(results[0]);
}

}  // namespace evenkeel::testutil

#include "evenkeel/testing/parity.h"

#include <algorithm>
#include <cmath>
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
#include "evenkeel/testing/participant.h"
#include "evenkeel/testing/reference_optimizer.h"

namespace evenkeel::testutil {
namespace {

// Of a run that sends nothing and has no bound.
OrderBytes NoBytes() {
  const AxisBytes none = {.bound = -1};
  return {.ep = none, .ep_inter_node = none, .tp = none, .tp_bound_at_least_ep = -1};
}

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
    run.skipped_steps = all[0].skipped_steps;
    run.loss_scale = all[0].loss_scale;
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
    } else if (run->skipped_steps == config_.steps) {
      run->verdict = Verdict::kMismatch;
      run->note =
          absl::StrFormat("every step overflowed, the loss scale is now %g: nothing was trained", run->loss_scale);
    } else if (index == 0) {
      run->verdict = Verdict::kReference;
      run->note = participant.by_dense() ? by_dense : layout;
    } else {
      run->verdict = participant.by_dense() ? Verdict::kBounded : Verdict::kBitwise;
      run->note = participant.by_dense() ? by_dense : absl::StrCat("same bits as ", config_.entries[0].name);
    }
    if (run->loss_scale != 1 && run->verdict != Verdict::kMismatch) {
      absl::StrAppendFormat(&run->note, "; loss scale %g, %d steps overflowed and were skipped", run->loss_scale,
                            run->skipped_steps);
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

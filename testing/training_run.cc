#include "evenkeel/testing/training_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/exchange_bound.h"
#include "evenkeel/moe/exchange_levels.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/zero3/leaf_selection.h"

namespace evenkeel::testutil {

using comm::Axis;

absl::StatusOr<std::unique_ptr<TrainingRun>> TrainingRun::Create(const TrainingConfig& config, const Corpus* corpus,
                                                                 comm::Backend* backend) {
  EK_RETURN_IF_ERROR(ValidateTrainingConfig(config));
  EK_RETURN_IF_ERROR(corpus->CheckLength(config.model.sequence));
  EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(MeshForOrder(config.mesh, config.order)));
  if (mesh.world_size() != backend->size()) {
    return absl::InvalidArgumentError(absl::StrCat("config: tp ", mesh.shape().tp, " times dp ", mesh.shape().dp,
                                                   " is ", mesh.world_size(), " ranks, the world has ",
                                                   backend->size()));
  }
  std::unique_ptr<TrainingRun> run(new TrainingRun(config, mesh, corpus, backend));
  EK_RETURN_IF_ERROR(run->CreateGroups());
  EK_RETURN_IF_ERROR(run->CreateModel());
  return run;
}

TrainingRun::TrainingRun(const TrainingConfig& config, const comm::Mesh& mesh, const Corpus* corpus,
                         comm::Backend* backend)
    : config_(config), mesh_(mesh), corpus_(*corpus), backend_(*backend) {
  HostDevice::Options options;
  if (config.worker_streams) {
    options.stream_mode = HostDevice::StreamMode::kWorker;
    options.poison = true;
    options.delay = config.delay;
  }
  device_ = HostDevice::Create(options);
}

TrainingRun::~TrainingRun() = default;

int TrainingRun::replica() const { return mesh_.Coordinate(Axis::kDp, backend_.rank()); }
int TrainingRun::lane() const { return mesh_.Coordinate(Axis::kTp, backend_.rank()); }

absl::StatusOr<comm::Communicator*> TrainingRun::NewGroup(Axis of, Axis booked_as, absl::string_view name) {
  comm::Group group = mesh_.GroupOf(of, backend_.rank());
  group.axis = booked_as;
  group.name = std::string(name);
  EK_ASSIGN_OR_RETURN(std::unique_ptr<comm::Communicator> communicator, backend_.CreateGroup(group));
  groups_.push_back(std::move(communicator));
  return groups_.back().get();
}

absl::Status TrainingRun::CreateGroups() {
  // The tp and ep axes of the ledger belong to the order's payload alone; all else is booked elsewhere.
  EK_ASSIGN_OR_RETURN(language_groups_.moe.tp, NewGroup(Axis::kTp, Axis::kTp, "tp"));
  EK_ASSIGN_OR_RETURN(language_groups_.moe.ep, NewGroup(Axis::kEp, Axis::kEp, "ep"));
  EK_ASSIGN_OR_RETURN(language_groups_.moe.control_tp, NewGroup(Axis::kTp, Axis::kOther, "tp.control"));
  EK_ASSIGN_OR_RETURN(language_groups_.moe.control_ep, NewGroup(Axis::kEp, Axis::kOther, "ep.control"));
  language_groups_.moe.expert_tp = mesh_.shape().etp;
  EK_RETURN_IF_ERROR(CreateLevelGroups());
  EK_ASSIGN_OR_RETURN(language_groups_.attention_tp, NewGroup(Axis::kTp, Axis::kOther, "tp.attention"));
  EK_ASSIGN_OR_RETURN(model_groups_.dp, NewGroup(Axis::kDp, Axis::kDp, "dp"));
  EK_ASSIGN_OR_RETURN(model_groups_.edp, NewGroup(Axis::kEdp, Axis::kEdp, "edp"));
  EK_ASSIGN_OR_RETURN(model_groups_.ep, NewGroup(Axis::kEp, Axis::kOther, "ep.norm"));
  EK_ASSIGN_OR_RETURN(model_groups_.tp, NewGroup(Axis::kTp, Axis::kOther, "tp.norm"));
  model_groups_.experts_over_tp = mesh_.shape().etp == mesh_.shape().tp;
  EK_ASSIGN_OR_RETURN(loss_dp_, NewGroup(Axis::kDp, Axis::kOther, "dp.loss"));
  return absl::OkStatus();
}

// What orders by levels exchange over; and where nodes are, for predictions by link class.
absl::Status TrainingRun::CreateLevelGroups() {
  moe::MoeGroups& groups = language_groups_.moe;
  const comm::Group ep = mesh_.GroupOf(Axis::kEp, backend_.rank());
  const absl::StatusOr<moe::ExchangeLevels> levels = moe::LevelsOf(ep, backend_.topology(), backend_.rank());
  if (levels.ok()) groups.ep_per_node = levels->node.size();
  const bool by_level = std::any_of(config_.order.steps.begin(), config_.order.steps.end(),
                                    [](const moe::Step& step) { return step.level != moe::Level::kAll; });
  if (!by_level) return absl::OkStatus();
  EK_RETURN_IF_ERROR(levels.status());
  for (const comm::Group* group : {&levels->node, &levels->peers}) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<comm::Communicator> communicator, backend_.CreateGroup(*group));
    groups_.push_back(std::move(communicator));
    (group == &levels->node ? groups.ep_node : groups.ep_peers) = groups_.back().get();
  }
  return absl::OkStatus();
}

absl::Status TrainingRun::CreateModel() {
  EK_ASSIGN_OR_RETURN(stream_, device_->CreateStream("compute"));
  if (config_.worker_streams) {
    EK_ASSIGN_OR_RETURN(comm_stream_, device_->CreateStream("comm"));
  }
  Stream* const comm_stream = comm_stream_ != nullptr ? comm_stream_.get() : stream_.get();
  const zero3::ModelDescription description = DescribeLanguageModel(config_.model, mesh_, backend_.rank());
  EK_ASSIGN_OR_RETURN(const zero3::LeafSelection leaves, zero3::SelectLeaves(description, LanguageModelLeaves()));
  zero3::PartitionedModelOptions options = config_.zero3;
  options.seed = config_.seed;
  options.micro_batches = static_cast<int>(config_.passes());
  EK_ASSIGN_OR_RETURN(parameters_,
                      zero3::PartitionedModel::Create(description.parameters, leaves, options, model_groups_,
                                                      device_.get(), stream_.get(), comm_stream));
  EK_ASSIGN_OR_RETURN(model_, LanguageModel::Create(config_.model, config_.order, language_groups_, parameters_.get(),
                                                    device_.get(), stream_.get()));
  return absl::OkStatus();
}

absl::Status TrainingRun::AddBounds(const ModelPass& pass, StepReport::Bounds* bounds) const {
  if (lane() != 0) return absl::OkStatus();
  const comm::Group ep = mesh_.GroupOf(Axis::kEp, backend_.rank());
  const comm::Group tp = mesh_.GroupOf(Axis::kTp, backend_.rank());
  moe::ExchangePlaces places;
  places.ep_rank = ep.IndexOf(backend_.rank());
  for (int rank : ep.ranks) places.node_of_rank.push_back(backend_.topology().node(rank));
  for (int rank : tp.ranks) {
    if (ep.IndexOf(rank) >= 0) places.home_ranks.push_back(ep.IndexOf(rank));
  }
  const moe::LanePlaces lanes = {.tp = mesh_.size(Axis::kTp), .whole_experts = mesh_.shape().etp != mesh_.shape().tp};
  const bool widened = config_.model.canonical() && IsHalf(config_.model.dtype);  // rows travel as f32
  const int64_t row_bytes = config_.model.hidden * SizeOf(widened ? DType::kF32 : config_.model.dtype);
  for (const moe::RoutingDecision& decision : pass.routing) {
    EK_ASSIGN_OR_RETURN(const moe::ExchangeBound exchange, moe::BoundExchange(decision, places));
    EK_ASSIGN_OR_RETURN(const moe::LaneBound over_lanes, moe::BoundLanes(decision, places, lanes));
    // Rows over EP are counted one way, those over lanes out and back; the backward moves as many again.
    bounds->ep += 4 * exchange.total() * row_bytes;
    bounds->ep_inter_node += 4 * exchange.inter_node_rows * row_bytes;
    bounds->tp += 2 * over_lanes.rows * row_bytes;
    bounds->tp_at_least_ep += 2 * over_lanes.rows_at_least_exchange * row_bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> TrainingRun::MeanLoss(const std::vector<ModelPass>& passes) {
  std::vector<double> sums;
  for (const ModelPass& pass : passes) sums.push_back(pass.loss);
  const TensorView view(sums.data(), DType::kF64, Shape({static_cast<int64_t>(sums.size())}));
  EK_RETURN_IF_ERROR(loss_dp_->AllReduce(view, view, comm::ReduceOp::kSum, *stream_));
  EK_RETURN_IF_ERROR(stream_->Synchronize());
  for (size_t stride = 1; stride < sums.size(); stride *= 2) {  // a power of two of them
    for (size_t i = 0; i < sums.size(); i += 2 * stride) sums[i] += sums[i + stride];
  }
  return sums[0] / static_cast<double>(config_.num_batches());
}

absl::Status TrainingRun::RunPass(int64_t step, int64_t pass, const TapFunction& tap, StepReport* report) {
  const int64_t batch_number = pass * config_.mesh.dp + replica();
  const CorpusBatch batch = corpus_.Batch({.seed = config_.seed, .step = step, .replica = batch_number},
                                          config_.model.sequences, config_.model.sequence);
  const moe::RouterStep router_step{.training = true,
                                    .seed = config_.seed,
                                    .step = static_cast<uint64_t>(step),
                                    .source = static_cast<uint64_t>(batch_number)};
  EK_ASSIGN_OR_RETURN(ModelPass done, model_->ForwardBackward(batch, router_step, tap));
  report->passes.push_back(std::move(done));
  return absl::OkStatus();
}

absl::StatusOr<StepReport> TrainingRun::Step(int64_t step, const TapFunction& tap) {
  StepReport report;
  absl::Duration in_taps;
  TapFunction timed;
  if (tap) {
    timed = [&](const Tap& shown) {
      const absl::Duration start = Clock::Real()->Now();
      tap(shown);
      in_taps += Clock::Real()->Now() - start;
    };
  }
  const comm::LedgerCounts before = backend_.ledger().Snapshot();
  const absl::Duration start = Clock::Real()->Now();
  for (int64_t pass = 0; pass < config_.passes(); ++pass) {
    EK_RETURN_IF_ERROR(RunPass(step, pass, timed, &report));
  }
  EK_ASSIGN_OR_RETURN(report.loss, MeanLoss(report.passes));
  const absl::Duration passed = Clock::Real()->Now();
  const comm::LedgerCounts after_pass = backend_.ledger().Snapshot();
  for (const ModelPass& pass : report.passes) EK_RETURN_IF_ERROR(AddBounds(pass, &report.bounds));
  if (tap) EK_RETURN_IF_ERROR(ReadAll(zero3::TensorKind::kGradient, TapKind::kGradient, tap));

  const comm::LedgerCounts before_update = backend_.ledger().Snapshot();
  const absl::Duration update = Clock::Real()->Now();
  EK_ASSIGN_OR_RETURN(report.update, parameters_->Step());
  EK_RETURN_IF_ERROR(stream_->Synchronize());
  report.time = (passed - start) + (Clock::Real()->Now() - update) - in_taps;
  const comm::LedgerCounts pass = after_pass - before;
  const comm::LedgerCounts rest = backend_.ledger().Snapshot() - before_update;
  report.ep_bytes = pass.bytes(Axis::kEp) + rest.bytes(Axis::kEp);
  for (const comm::LedgerCounts* counts : {&pass, &rest}) {
    report.ep_inter_node_bytes +=
        counts->sent[static_cast<int>(Axis::kEp)][static_cast<int>(comm::LinkClass::kInterNode)].bytes_sent;
  }
  report.tp_bytes = pass.bytes(Axis::kTp) + rest.bytes(Axis::kTp);
  report.collectives = pass.total_collectives() + rest.total_collectives();
  return report;
}

absl::Status TrainingRun::ReadAll(zero3::TensorKind kind, TapKind shown_as, const TapFunction& tap) {
  for (int p = 0; p < static_cast<int>(parameters_->parameters().size()); ++p) {
    const zero3::ParameterSpec& spec = parameters_->parameters()[p];
    const bool gradient = kind == zero3::TensorKind::kGradient;
    const DType dtype = gradient ? WideDType(spec.dtype) : spec.dtype;
    EK_ASSIGN_OR_RETURN(const Tensor value, Tensor::Create(device_.get(), dtype, spec.shape));
    EK_RETURN_IF_ERROR(parameters_->ReadTensor(p, kind, "", value.view()));
    if (gradient && parameters_->loss_scale() != 1) {
      EK_RETURN_IF_ERROR(Scale(1 / parameters_->loss_scale(), value.const_view(), value.view(), *stream_));
      EK_RETURN_IF_ERROR(stream_->Synchronize());
    }
    tap({shown_as, spec.name, value.const_view()});
  }
  return absl::OkStatus();
}

absl::Status TrainingRun::ReadParameters(const TapFunction& tap) {
  return ReadAll(zero3::TensorKind::kWeight, TapKind::kParameter, tap);
}

double TrainingRun::leaf_fetch_host_operations() const {
  const zero3::ModelCounts counts = parameters_->counts();
  return counts.fetch_cycles == 0
             ? 0
             : static_cast<double>(counts.fetch_host_operations) / static_cast<double>(counts.fetch_cycles);
}

}  // namespace evenkeel::testutil

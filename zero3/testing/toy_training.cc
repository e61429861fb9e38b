#include "evenkeel/zero3/testing/toy_training.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/mapped_file_device.h"

namespace evenkeel::zero3 {
namespace {

// Builds the description of one rank, parameter by parameter.
class Describer {
 public:
  Describer(const ToyConfig& config, const comm::Mesh& mesh, int rank)
      : config_(config),
        tp_(config.mesh.tp),
        lane_(mesh.Coordinate(comm::Axis::kTp, rank)),
        etp_(config.mesh.etp),
        elane_(config.mesh.etp == 1 ? 0 : lane_),
        ep_(config.mesh.ep),
        ep_rank_(mesh.Coordinate(comm::Axis::kEp, rank)) {}

  ModelDescription Run() {
    model_.root.type = "Model";
    const int embedding = Add("embed.weight", {13, config_.hidden}, config_.dtype, true);
    model_.root.children.push_back({"embed", "Embedding", {embedding, AddFrozen("embed.scale", 5)}, {}, false});
    ModuleNode layers{"layers", "ModuleList", {}, {}, true};
    for (int l = 0; l < config_.layers; ++l) layers.children.push_back(Layer(l));
    model_.root.children.push_back(std::move(layers));
    std::vector<int> head = {Add("head.norm", {config_.hidden}, DType::kF32, true)};
    if (config_.tied_head) head.push_back(embedding);
    model_.root.children.push_back({"head", "Head", head, {}, false});
    return std::move(model_);
  }

 private:
  ModuleNode Layer(int l) {
    const std::string prefix = absl::StrCat("layers.", l, ".");
    ModuleNode layer{absl::StrCat(l), "Layer", {}, {}, false};
    layer.parameters.push_back(Add(prefix + "norm", {config_.hidden}, DType::kF32, true));
    layer.parameters.push_back(AddColumns(prefix + "w", config_.hidden, config_.ffn));
    ModuleNode moe{"moe", "MoeBlock", {}, {}, false};
    moe.parameters.push_back(Add(prefix + "moe.router", {config_.experts, config_.hidden}, DType::kF32, true));
    moe.parameters.push_back(Add(prefix + "moe.empty", {0, 3}, DType::kF32, true));
    ModuleNode experts{"experts", "ModuleList", {}, {}, true};
    const int local = config_.experts / ep_;
    if (config_.separate_experts) {
      for (int e = 0; e < local; ++e) {
        const int global = ep_rank_ * local + e;
        ModuleNode expert{absl::StrCat(e), "Expert", {}, {}, false};
        expert.parameters.push_back(
            AddExperts(absl::StrCat(prefix, "moe.experts.", global, ".w_in"), 1, config_.experts, global));
        experts.children.push_back(std::move(expert));
      }
    } else {
      experts.parameters.push_back(AddExperts(prefix + "moe.experts.w_in", local, config_.experts, ep_rank_ * local));
    }
    moe.children.push_back(std::move(experts));
    layer.children.push_back(std::move(moe));
    return layer;
  }

  int Push(ParameterSpec spec) {
    model_.parameters.push_back(std::move(spec));
    return static_cast<int>(model_.parameters.size()) - 1;
  }

  ParameterSpec Base(std::string name, std::vector<int64_t> dims, DType dtype) {
    ParameterSpec spec;
    spec.name = std::move(name);
    spec.dtype = dtype;
    spec.shape = *Shape::Create(dims);
    spec.initializer = Initializer::Normal(0.5);
    return spec;
  }

  int Add(std::string name, std::vector<int64_t> dims, DType dtype, bool tp_replicated) {
    ParameterSpec spec = Base(std::move(name), std::move(dims), dtype);
    spec.tp_replicated = tp_replicated;
    return Push(std::move(spec));
  }

  int AddFrozen(std::string name, int64_t elements) {
    ParameterSpec spec = Base(std::move(name), {elements}, DType::kF32);
    spec.trainable = false;
    spec.tp_replicated = true;
    return Push(std::move(spec));
  }

  int AddColumns(std::string name, int64_t rows, int64_t columns) {
    ParameterSpec spec = Base(std::move(name), {rows, columns / tp_}, config_.dtype);
    spec.global_shape = {rows, columns};
    spec.global_offset = {0, lane_ * (columns / tp_)};
    return Push(std::move(spec));
  }

  int AddExperts(std::string name, int64_t local, int64_t global, int64_t first) {
    const int64_t columns = config_.ffn / etp_;
    ParameterSpec spec = Base(std::move(name), {local, config_.hidden, columns}, config_.dtype);
    spec.global_shape = {global, config_.hidden, config_.ffn};
    spec.global_offset = {first, 0, elane_ * columns};
    spec.family = Family::kExpert;
    spec.expert_dim = 0;
    return Push(std::move(spec));
  }

  const ToyConfig& config_;
  const int tp_, lane_, etp_, elane_, ep_, ep_rank_;
  ModelDescription model_;
};

// One rank's run.
class ToyRunner {
 public:
  ToyRunner(const ToyConfig& config, comm::Backend& backend, ToyRank& out)
      : config_(config), backend_(backend), out_(out) {}

  absl::Status Run() {
    EK_RETURN_IF_ERROR(Setup());
    for (int step = 0; step < config_.steps; ++step) EK_RETURN_IF_ERROR(OneStep(step));
    out_.weights = last_;
    out_.counts = model_->counts();
    out_.trace_state = model_->trace_state();
    out_.table = model_->ToTable();
    out_.plan = model_->PlanText();
    out_.work = device_->counters().Snapshot();
    out_.traffic = backend_.ledger().Snapshot();
    return absl::OkStatus();
  }

 private:
  absl::Status Setup() {
    const int rank = backend_.rank();
    EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(config_.mesh));
    EK_RETURN_IF_ERROR(MakeGroups(mesh));
    device_ = HostDevice::Create(config_.device);
    EK_ASSIGN_OR_RETURN(compute_, device_->CreateStream("compute"));
    EK_ASSIGN_OR_RETURN(comm_, device_->CreateStream("comm"));
    description_ = ToyDescription(config_, mesh, rank);
    LeafOptions leaves = config_.leaves;
    if (leaves.rules.empty() && leaves.granularity_threshold == 0) leaves.rules.push_back(LeafRule::Type("MoeBlock"));
    EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(description_, leaves));
    PartitionedModelOptions options = config_.options;
    if (!config_.offload_folder.empty()) {
      EK_ASSIGN_OR_RETURN(file_, MappedFileDevice::Create(device_.get(), {.folder = config_.offload_folder}));
      options.offload_device = file_.get();
    }
    ModelGroups groups{dp_.get(), edp_.get(), ep_.get(), tp_.get(), config_.mesh.etp == config_.mesh.tp};
    EK_ASSIGN_OR_RETURN(model_, PartitionedModel::Create(description_.parameters, selection, options, groups,
                                                         device_.get(), compute_.get(), comm_.get()));
    out_.specs = description_.parameters;
    out_.state_bytes = device_->counters().Snapshot().live_bytes;
    // The sources whose tokens reach this rank's experts, as (data replica, lane share).
    for (int source : ep_->group().ranks) {
      const int replica = mesh.Coordinate(comm::Axis::kDp, source);
      const int lane = mesh.Coordinate(comm::Axis::kTp, source);
      if (config_.mesh.etp == config_.mesh.tp) {
        for (int t = 0; t < config_.mesh.tp; ++t) expert_sources_.push_back({replica, t});
      } else {
        expert_sources_.push_back({replica, lane});
      }
    }
    replica_ = mesh.Coordinate(comm::Axis::kDp, rank);
    return absl::OkStatus();
  }

  absl::Status MakeGroups(const comm::Mesh& mesh) {
    const auto make = [&](comm::Axis axis) { return backend_.CreateGroup(mesh.GroupOf(axis, backend_.rank())); };
    EK_ASSIGN_OR_RETURN(dp_, make(comm::Axis::kDp));
    EK_ASSIGN_OR_RETURN(edp_, make(comm::Axis::kEdp));
    EK_ASSIGN_OR_RETURN(ep_, make(comm::Axis::kEp));
    EK_ASSIGN_OR_RETURN(tp_, make(comm::Axis::kTp));
    return absl::OkStatus();
  }

  std::vector<int> Order(int step) const {
    if (config_.order) return config_.order(step, model_->num_leaves());
    std::vector<int> order;
    for (int l = 0; l < model_->num_leaves(); ++l) order.push_back(l);
    return order;
  }

  absl::Status OneStep(int step) {
    read_.clear();
    if (config_.trace) EK_RETURN_IF_ERROR(model_->UseTrace(config_.trace(step)));
    ToyStep record;
    record.trace_state = model_->trace_state();
    const std::vector<int> order = Order(step);
    for (int micro = 0; micro < config_.micro_batches; ++micro) {
      for (int leaf : order) EK_RETURN_IF_ERROR(Forward(leaf));
      for (auto leaf = order.rbegin(); leaf != order.rend(); ++leaf) {
        if (config_.recompute) EK_RETURN_IF_ERROR(Forward(*leaf));
        EK_RETURN_IF_ERROR(Backward(step, micro, *leaf));
      }
    }
    EK_RETURN_IF_ERROR(compute_->Synchronize());
    record.activation = Digest64(read_.data(), read_.size() * sizeof(double));
    EK_ASSIGN_OR_RETURN(out_.gradients, ReadAll(TensorKind::kGradient));
    record.gradients_digest = DigestOf(out_.gradients);
    if (config_.before_step) EK_RETURN_IF_ERROR(config_.before_step(step, backend_.rank(), *model_));
    EK_ASSIGN_OR_RETURN(record.result, model_->Step());
    EK_ASSIGN_OR_RETURN(last_, ReadAll(TensorKind::kWeight));
    record.weights_digest = DigestOf(last_);
    out_.steps.push_back(record);
    if (!config_.eval_between) return absl::OkStatus();
    EK_RETURN_IF_ERROR(model_->UseTrace("eval"));
    for (int leaf : order) EK_RETURN_IF_ERROR(Forward(leaf));
    return model_->UseTrace("train");
  }

  static uint64_t DigestOf(const std::vector<std::vector<double>>& values) {
    uint64_t digest = 0;
    for (const auto& v : values) digest = CombineDigests(digest, Digest64(v.data(), v.size() * sizeof(double)));
    return digest;
  }

  absl::StatusOr<std::vector<std::vector<double>>> ReadAll(TensorKind kind) {
    std::vector<std::vector<double>> all;
    for (size_t p = 0; p < description_.parameters.size(); ++p) {
      const ParameterSpec& spec = description_.parameters[p];
      all.emplace_back(static_cast<size_t>(spec.num_elements()));
      if (kind != TensorKind::kWeight && !spec.trainable) continue;
      EK_RETURN_IF_ERROR(
          model_->ReadTensor(static_cast<int>(p), kind, "", TensorView(all.back().data(), DType::kF64, spec.shape)));
      if (kind != TensorKind::kGradient) continue;
      for (double& value : all.back()) value /= model_->loss_scale();
    }
    return all;
  }

  // Reads every element, on the compute stream.
  absl::Status Forward(int leaf) {
    EK_ASSIGN_OR_RETURN(const LeafWeights weights, model_->Fetch({leaf}));
    for (const ConstTensorView& view : weights.views()) {
      EK_RETURN_IF_ERROR(compute_->Launch([this, view] {
        double sum = 0;
        for (int64_t i = 0; i < view.num_elements(); ++i) sum += ElementOf(view, i) * static_cast<double>(i % 5 + 1);
        read_.push_back(sum);
        return absl::OkStatus();
      }));
    }
    return model_->Release({leaf});
  }

  absl::Status Backward(int step, int micro, int leaf) {
    EK_ASSIGN_OR_RETURN(const LeafWeights weights, model_->Fetch({leaf}));
    EK_ASSIGN_OR_RETURN(const absl::Span<const TensorView> gradients, model_->Gradients({leaf}));
    const std::vector<int>& parameters = model_->leaf({leaf}).parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const ParameterSpec& spec = description_.parameters[static_cast<size_t>(parameters[i])];
      if (!spec.trainable) continue;
      EK_RETURN_IF_ERROR(compute_->Launch([this, step, micro, &spec, weight = weights.views()[i],
                                           gradient = gradients[i], scale = model_->loss_scale()]() -> absl::Status {
        AddGradient(step, micro, spec, weight, scale, gradient);
        return absl::OkStatus();
      }));
    }
    EK_RETURN_IF_ERROR(model_->FlushGradients({leaf}));
    return model_->Release({leaf});
  }

  void AddGradient(int step, int micro, const ParameterSpec& spec, ConstTensorView weight, double scale,
                   TensorView gradient) {
    const int64_t per_expert = spec.expert_dim == 0 ? spec.num_elements() / std::max<int64_t>(spec.shape.dim(0), 1) : 1;
    for (int64_t i = 0; i < spec.num_elements(); ++i) {
      const int64_t global = GlobalIndex(spec, i);
      double value = 0;
      if (spec.family == Family::kDense) {
        for (int t = 0; t < config_.mesh.tp; ++t) {
          value += ToyGradientShare(config_, spec.name, step, micro, replica_, t, global);
        }
      } else {
        const int expert = static_cast<int>(spec.global_offset[0] + i / std::max<int64_t>(per_expert, 1));
        for (const auto& source : expert_sources_) {
          if (config_.expert_used && !config_.expert_used(step, source.first, expert)) continue;
          value += ToyGradientShare(config_, spec.name, step, micro, source.first, source.second, global);
        }
      }
      if (!config_.integer_gradients) value += 0.125 * ElementOf(weight, i);
      value *= scale;
      if (gradient.dtype() == DType::kF64) {
        gradient.data<double>()[i] += value;
      } else {
        gradient.data<float>()[i] += static_cast<float>(value);
      }
    }
  }

  static double ElementOf(const ConstTensorView& view, int64_t i) {
    switch (view.dtype()) {
      case DType::kF64:
        return view.data<double>()[i];
      case DType::kBF16:
        return static_cast<float>(view.data<BF16>()[i]);
      case DType::kF16:
        return static_cast<float>(view.data<F16>()[i]);
      default:
        return view.data<float>()[i];
    }
  }

  const ToyConfig& config_;
  comm::Backend& backend_;
  ToyRank& out_;
  std::unique_ptr<comm::Communicator> dp_, edp_, ep_, tp_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<MappedFileDevice> file_;
  std::unique_ptr<Stream> compute_, comm_;
  ModelDescription description_;
  std::vector<double> read_;
  std::unique_ptr<PartitionedModel> model_;
  std::vector<std::pair<int, int>> expert_sources_;
  std::vector<std::vector<double>> last_;
  int replica_ = 0;
};

}  // namespace

ModelDescription ToyDescription(const ToyConfig& config, const comm::Mesh& mesh, int rank) {
  return Describer(config, mesh, rank).Run();
}

double ToyGradientShare(const ToyConfig& config, const std::string& name, int step, int micro_batch, int replica,
                        int lane, int64_t global_index) {
  if (config.number_batches_globally) {
    replica += micro_batch * config.mesh.dp;
    micro_batch = 0;
  }
  const PhiloxStream stream(PhiloxKey(99)
                                .Add(static_cast<uint64_t>(step))
                                .Add(static_cast<uint64_t>(micro_batch))
                                .Add(static_cast<uint64_t>(replica))
                                .Add(static_cast<uint64_t>(lane))
                                .Add(name));
  const auto index = static_cast<uint64_t>(global_index);
  if (config.integer_gradients) return static_cast<double>(stream.Below(index, 17)) - 8;
  return stream.Uniform(index) - 0.5;
}

std::vector<absl::Status> RunToyStatuses(const ToyConfig& config, ToyRun* run, absl::Duration deadline) {
  comm::InProcessOptions options;
  options.world_size = config.mesh.tp * config.mesh.dp;
  options.deadline = deadline;
  absl::StatusOr<std::unique_ptr<comm::InProcessWorld>> world = comm::InProcessWorld::Create(options);
  if (!world.ok()) return {world.status()};
  run->ranks.resize(static_cast<size_t>(options.world_size));
  return comm::RunRanks(**world, [&](comm::Backend& backend) {
    return ToyRunner(config, backend, run->ranks[static_cast<size_t>(backend.rank())]).Run();
  });
}

absl::StatusOr<ToyRun> RunToy(const ToyConfig& config) {
  ToyRun run;
  const std::vector<absl::Status> statuses = RunToyStatuses(config, &run);
  EK_RETURN_IF_ERROR(comm::FirstFailure(statuses));
  return run;
}

absl::StatusOr<std::map<std::string, std::vector<double>>> ToyRun::Global(bool gradients) const {
  std::map<std::string, std::vector<double>> global;
  std::map<std::string, std::vector<bool>> seen;
  for (const ToyRank& rank : ranks) {
    for (size_t p = 0; p < rank.specs.size(); ++p) {
      const ParameterSpec& spec = rank.specs[p];
      int64_t size = spec.global_shape.empty() ? spec.num_elements() : 1;
      for (int64_t extent : spec.global_shape) size *= extent;
      std::vector<double>& values = global[spec.name];
      values.resize(static_cast<size_t>(size));
      std::vector<bool>& have = seen[spec.name];
      have.resize(static_cast<size_t>(size), false);
      const std::vector<double>& local = gradients ? rank.gradients[p] : rank.weights[p];
      for (size_t i = 0; i < local.size(); ++i) {
        const size_t at = static_cast<size_t>(GlobalIndex(spec, static_cast<int64_t>(i)));
        if (have[at] && values[at] != local[i]) {
          return absl::InternalError(absl::StrCat(spec.name, "[", at, "]: ", values[at], " and ", local[i]));
        }
        values[at] = local[i];
        have[at] = true;
      }
    }
  }
  return global;
}

}  // namespace evenkeel::zero3

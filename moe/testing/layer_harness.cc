#include "evenkeel/moe/testing/layer_harness.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/exchange_levels.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {
namespace {

// ---- Data ----

int64_t FirstToken(const LayerCase& c, int replica) {
  int64_t first = 0;
  for (int r = 0; r < replica; ++r) first += c.tokens_in(r);
  return first;
}

void Store(TensorView view, int64_t i, double value) {
  switch (view.dtype()) {
    case DType::kF64:
      view.data<double>()[i] = value;
      return;
    case DType::kF32:
      view.data<float>()[i] = static_cast<float>(value);
      return;
    case DType::kF16:
      view.data<F16>()[i] = F16(static_cast<float>(value));
      return;
    default:
      view.data<BF16>()[i] = BF16(static_cast<float>(value));
      return;
  }
}

std::vector<double> Load(const ConstTensorView& view) {
  std::vector<double> values(view.num_elements());
  for (size_t i = 0; i < values.size(); ++i) {
    switch (view.dtype()) {
      case DType::kF64:
        values[i] = view.data<double>()[i];
        break;
      case DType::kF32:
        values[i] = view.data<float>()[i];
        break;
      case DType::kF16:
        values[i] = static_cast<float>(view.data<F16>()[i]);
        break;
      default:
        values[i] = static_cast<float>(view.data<BF16>()[i]);
        break;
    }
  }
  return values;
}

// Columns of the middle that a rank holds.
struct Shard {
  int64_t first_expert, experts, first_column, columns;
};

Shard ShardOf(const LayerCase& c, int lane, int ep_rank) {
  const int64_t le = c.experts / c.ep;
  const int64_t columns = c.whole ? c.ffn : c.ffn / c.tp;
  return {ep_rank * le, le, c.whole ? 0 : lane * columns, columns};
}

// Calls fn(local index, global index) for every element of a rank's part of an expert tensor.
template <typename Fn>
void ForShard(const LayerCase& c, const Shard& s, const std::string& name, Fn fn) {
  const int64_t h = c.hidden, F = c.ffn;
  int64_t local = 0;
  for (int64_t g = s.first_expert; g < s.first_expert + s.experts; ++g) {
    if (name == "w_in" || name == "w_gate") {
      for (int64_t i = 0; i < h; ++i) {
        for (int64_t f = 0; f < s.columns; ++f) fn(local++, (g * h + i) * F + s.first_column + f);
      }
    } else if (name == "w_out") {
      for (int64_t f = 0; f < s.columns; ++f) {
        for (int64_t i = 0; i < h; ++i) fn(local++, (g * F + s.first_column + f) * h + i);
      }
    } else if (name == "b_out") {
      for (int64_t i = 0; i < h; ++i) fn(local++, g * h + i);
    } else {
      for (int64_t f = 0; f < s.columns; ++f) fn(local++, g * F + s.first_column + f);
    }
  }
}

// ---- One rank ----

struct RankTensors {
  Tensor x, y, dy, dx, router, drouter;
  Tensor w_in, w_gate, w_out, b_in, b_gate, b_out;
  Tensor g_in, g_gate, g_out, gb_in, gb_gate, gb_out;
};

class RankRunner {
 public:
  RankRunner(const LayerCase& c, const Order& order, const comm::Mesh& mesh, comm::Backend& backend, RankRun* out)
      : c_(c), order_(order), mesh_(mesh), backend_(backend), out_(*out) {}

  absl::Status Run() {
    const int rank = backend_.rank();
    out_.lane = mesh_.Coordinate(comm::Axis::kTp, rank);
    out_.replica = mesh_.Coordinate(comm::Axis::kDp, rank);
    out_.ep_rank = mesh_.Coordinate(comm::Axis::kEp, rank);
    out_.edp_rank = mesh_.Coordinate(comm::Axis::kEdp, rank);
    HostDevice::Options options;
    if (c_.worker_stream) options.stream_mode = HostDevice::StreamMode::kWorker;
    options.poison = c_.poison;
    device_ = HostDevice::Create(options);
    EK_ASSIGN_OR_RETURN(stream_, device_->CreateStream("compute"));
    EK_RETURN_IF_ERROR(CreateGroups());
    EK_RETURN_IF_ERROR(CreateLayer());
    EK_RETURN_IF_ERROR(CreateTensors());
    const int passes = c_.passes_of ? c_.passes_of(out_.replica) : 1;
    for (int pass = 0; pass < passes; ++pass) EK_RETURN_IF_ERROR(ForwardBackward());
    StoreResults();
    t_ = RankTensors();
    stream_.reset();
    return absl::OkStatus();
  }

 private:
  absl::Status CreateGroups() {
    const int rank = backend_.rank();
    const auto create = [&](comm::Axis axis, bool control) -> absl::StatusOr<std::unique_ptr<comm::Communicator>> {
      comm::Group group = mesh_.GroupOf(axis, rank);
      if (control) {
        group.name = "control_" + group.name;
        group.axis = comm::Axis::kOther;
      }
      return backend_.CreateGroup(group);
    };
    EK_ASSIGN_OR_RETURN(tp_, create(comm::Axis::kTp, false));
    EK_ASSIGN_OR_RETURN(ep_, create(comm::Axis::kEp, false));
    EK_ASSIGN_OR_RETURN(control_tp_, create(comm::Axis::kTp, true));
    EK_ASSIGN_OR_RETURN(control_ep_, create(comm::Axis::kEp, true));
    return CreateLevels(mesh_.GroupOf(comm::Axis::kEp, rank));
  }

  // The groups of an order by levels; and L, for predictions, wherever there are equal nodes.
  absl::Status CreateLevels(const comm::Group& ep) {
    const absl::StatusOr<ExchangeLevels> levels = LevelsOf(ep, backend_.topology(), backend_.rank());
    if (levels.ok()) out_.ep_per_node = levels->node.size();
    const bool needed = std::any_of(order_.steps.begin(), order_.steps.end(),
                                    [](const Step& step) { return step.level != Level::kAll; });
    if (!needed || c_.level_groups == LayerCase::LevelGroups::kNone) return absl::OkStatus();
    EK_RETURN_IF_ERROR(levels.status());
    EK_ASSIGN_OR_RETURN(ep_node_, backend_.CreateGroup(levels->node));
    const bool wrong = c_.level_groups == LayerCase::LevelGroups::kNodeTwice;
    EK_ASSIGN_OR_RETURN(ep_peers_, backend_.CreateGroup(wrong ? levels->node : levels->peers));
    return absl::OkStatus();
  }

  absl::Status CreateLayer() {
    MoeConfig config;
    config.router.layer = "test.moe";
    config.router.hidden = c_.hidden;
    config.router.experts = c_.experts;
    config.router.top_k = c_.top_k;
    config.router.capacity.mode = c_.mode;
    EK_ASSIGN_OR_RETURN(config.router.capacity.factor, Rational::FromDouble(c_.capacity_factor));
    config.router.capacity.min_capacity = c_.min_capacity;
    if (c_.router) c_.router(&config.router);
    config.ffn = c_.ffn;
    config.activation = c_.activation;
    config.bias = c_.bias;
    config.recompute_experts = c_.recompute;
    if (c_.canonical) config.numerics = ExpertNumerics::kCanonical;
    config.dtype = c_.dtype;
    MoeGroups groups = {.tp = tp_.get(),
                        .ep = ep_.get(),
                        .expert_tp = c_.whole ? 1 : c_.tp,
                        .ep_node = ep_node_.get(),
                        .ep_peers = ep_peers_.get(),
                        .ep_per_node = out_.ep_per_node};
    if (c_.control_groups) {
      groups.control_tp = control_tp_.get();
      groups.control_ep = control_ep_.get();
    }
    EK_ASSIGN_OR_RETURN(layer_, MoeLayer::Create(config, order_, groups, device_.get()));
    layer_->SetObserver([this](const MoeTap& tap) {
      out_.taps.push_back(std::string(tap.name));
      out_.tap_shapes.push_back(tap.value.shape());
    });
    return absl::OkStatus();
  }

  absl::StatusOr<Tensor> Filled(DType dtype, const Shape& shape, const std::vector<double>& values) {
    EK_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Create(device_.get(), dtype, shape));
    for (size_t i = 0; i < values.size(); ++i) Store(tensor.view(), static_cast<int64_t>(i), values[i]);
    return tensor;
  }

  absl::Status CreateExpert(const std::string& name, const Shape& shape, Tensor* weight, Tensor* gradient) {
    std::vector<double> values(shape.num_elements());
    ForShard(c_, ShardOf(c_, out_.lane, out_.ep_rank), name,
             [&](int64_t local, int64_t global) { values[local] = DataAt(c_, name, global); });
    EK_ASSIGN_OR_RETURN(*weight, Filled(c_.dtype, shape, values));
    EK_ASSIGN_OR_RETURN(*gradient, Tensor::Zeros(device_.get(), layer_->expert_shape().gradient_dtype(), shape));
    return absl::OkStatus();
  }

  absl::Status CreateTensors() {
    const int64_t s = c_.tokens_in(out_.replica), h = c_.hidden;
    std::vector<double> x = InputsOf(c_, "x", out_.replica), dy = InputsOf(c_, "dy", out_.replica);
    int64_t first = 0, own = s;
    if (order_.input.placement == Placement::kVarying) {
      const int64_t base = s / c_.tp, longer = s % c_.tp;
      first = out_.lane * base + std::min<int64_t>(out_.lane, longer);
      own = base + (out_.lane < longer ? 1 : 0);
    }
    const auto slice = [&](std::vector<double> v) {
      return std::vector<double>(v.begin() + first * h, v.begin() + (first + own) * h);
    };
    EK_ASSIGN_OR_RETURN(t_.x, Filled(c_.dtype, Shape({own, h}), slice(x)));
    EK_ASSIGN_OR_RETURN(t_.dy, Filled(c_.dtype, Shape({own, h}), slice(dy)));
    EK_ASSIGN_OR_RETURN(t_.y, Tensor::Create(device_.get(), c_.dtype, Shape({own, h})));
    EK_ASSIGN_OR_RETURN(t_.dx, Tensor::Create(device_.get(), c_.dtype, Shape({own, h})));
    std::vector<double> router(c_.experts * h);
    for (size_t i = 0; i < router.size(); ++i) router[i] = DataAt(c_, "router", static_cast<int64_t>(i));
    const DType router_dtype = c_.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    EK_ASSIGN_OR_RETURN(t_.router, Filled(router_dtype, Shape({c_.experts, h}), router));
    EK_ASSIGN_OR_RETURN(t_.drouter, Tensor::Zeros(device_.get(), router_dtype, Shape({c_.experts, h})));
    const ExpertShape& shape = layer_->expert_shape();
    const Shape in({shape.local_experts, h, shape.ffn}), out({shape.local_experts, shape.ffn, h});
    EK_RETURN_IF_ERROR(CreateExpert("w_in", in, &t_.w_in, &t_.g_in));
    EK_RETURN_IF_ERROR(CreateExpert("w_out", out, &t_.w_out, &t_.g_out));
    if (shape.gated()) EK_RETURN_IF_ERROR(CreateExpert("w_gate", in, &t_.w_gate, &t_.g_gate));
    if (!shape.bias) return absl::OkStatus();
    const Shape middle({shape.local_experts, shape.ffn});
    EK_RETURN_IF_ERROR(CreateExpert("b_in", middle, &t_.b_in, &t_.gb_in));
    if (shape.gated()) EK_RETURN_IF_ERROR(CreateExpert("b_gate", middle, &t_.b_gate, &t_.gb_gate));
    return CreateExpert("b_out", Shape({shape.local_experts, h}), &t_.b_out, &t_.gb_out);
  }

  absl::Status ForwardBackward() {
    const MoeWeights weights = {.router = t_.router.view(),
                                .experts = {.w_in = t_.w_in.view(),
                                            .w_gate = t_.w_gate.view(),
                                            .w_out = t_.w_out.view(),
                                            .b_in = t_.b_in.view(),
                                            .b_gate = t_.b_gate.view(),
                                            .b_out = t_.b_out.view()}};
    const MoeGradients gradients = {.router = t_.drouter.view(),
                                    .experts = {.w_in = t_.g_in.view(),
                                                .w_gate = t_.g_gate.view(),
                                                .w_out = t_.g_out.view(),
                                                .b_in = t_.gb_in.view(),
                                                .b_gate = t_.gb_gate.view(),
                                                .b_out = t_.gb_out.view()}};
    WorkCounters& counters = device_->counters();
    const WorkCounts start = counters.Snapshot();
    const int64_t base = start.live_bytes;
    comm::LedgerCounts before = backend_.ledger().Snapshot();
    counters.ResetPeak();
    if (c_.mask) mask_ = c_.mask(out_.replica);
    MoeCall call;
    call.step = {.training = true, .seed = c_.seed, .step = 3, .source = static_cast<uint64_t>(out_.replica)};
    call.token_mask = c_.mask ? mask_.data() : nullptr;
    call.replay = c_.replay ? c_.replay(out_.replica) : nullptr;
    EK_RETURN_IF_ERROR(layer_->Forward(weights, t_.x.view(), t_.y.view(), call, &tape_, *stream_));
    EK_RETURN_IF_ERROR(stream_->Synchronize());
    const WorkCounts between = counters.Snapshot();
    out_.forward_work = between - start;
    out_.counted_memory.forward_peak = between.peak_live_bytes - base;
    out_.counted_memory.tape = between.live_bytes - base;
    out_.forward = backend_.ledger().Snapshot() - before;
    before = backend_.ledger().Snapshot();
    counters.ResetPeak();
    EK_RETURN_IF_ERROR(layer_->Backward(weights, tape_, t_.dy.view(), t_.dx.view(), gradients, *stream_));
    EK_RETURN_IF_ERROR(stream_->Synchronize());
    out_.backward_work = counters.Snapshot() - between;
    out_.counted_memory.backward_peak = counters.Snapshot().peak_live_bytes - base;
    out_.backward = backend_.ledger().Snapshot() - before;
    return absl::OkStatus();
  }

  void StoreResults() {
    out_.decision = tape_.decision();
    out_.predicted_forward = tape_.forward_traffic();
    out_.predicted_backward = tape_.backward_traffic();
    out_.predicted_memory = tape_.memory();
    Values& v = out_.values;
    v.x = Load(t_.x.view());
    v.dy = Load(t_.dy.view());
    v.y = Load(t_.y.view());
    v.dx = Load(t_.dx.view());
    v.router = Load(t_.drouter.view());
    v.w_in = Load(t_.g_in.view());
    v.w_gate = Load(t_.g_gate.view());
    v.w_out = Load(t_.g_out.view());
    v.b_in = Load(t_.gb_in.view());
    v.b_gate = Load(t_.gb_gate.view());
    v.b_out = Load(t_.gb_out.view());
  }

  const LayerCase& c_;
  const Order& order_;
  const comm::Mesh& mesh_;
  comm::Backend& backend_;
  RankRun& out_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<comm::Communicator> tp_, ep_, control_tp_, control_ep_, ep_node_, ep_peers_;
  std::vector<uint8_t> mask_;
  std::unique_ptr<MoeLayer> layer_;
  MoeTape tape_;
  RankTensors t_;
};

}  // namespace

double DataAt(const LayerCase& c, const std::string& name, int64_t index) {
  const PhiloxStream stream(PhiloxKey(c.seed).Add(name));
  double scale = 1.0;
  if (name == "w_in" || name == "w_gate") scale = 1.0 / std::sqrt(static_cast<double>(c.hidden));
  if (name == "w_out") scale = 1.0 / std::sqrt(static_cast<double>(c.ffn));
  // Rounded to bf16, so that all dtypes start from the same numbers.
  const int64_t from = c.taken_from ? c.taken_from(name, index) : index;
  double value = static_cast<float>(BF16(static_cast<float>(stream.Normal(from) * scale)));
  if (c.favourite_expert >= 0 && name == "x" && index % c.hidden == 0) value = 4;
  if (c.favourite_expert >= 0 && name == "router" && index % c.hidden == 0) {
    value = index / c.hidden == c.favourite_expert ? 8 : -8;
  }
  if (name == c.perturb && index == c.perturb_index) value += c.perturb_by;
  return value;
}

std::vector<double> InputsOf(const LayerCase& c, const std::string& name, int replica) {
  std::vector<double> values;
  const int64_t first = FirstToken(c, replica) * c.hidden;
  for (int64_t i = 0; i < c.tokens_in(replica) * c.hidden; ++i) values.push_back(DataAt(c, name, first + i));
  return values;
}

absl::StatusOr<LayerRun> RunLayer(const LayerCase& c, const Order& order) {
  EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(c.mesh()));
  std::optional<comm::Topology> topology;
  if (!c.node_of_rank.empty()) topology = comm::Topology(c.node_of_rank);
  if (c.ranks_per_node > 0) {
    EK_ASSIGN_OR_RETURN(topology, comm::Topology::Blocks(mesh.world_size(), c.ranks_per_node));
  }
  LayerRun run;
  run.ranks.resize(mesh.world_size());
  const auto body = [&](comm::Backend& backend) {
    return RankRunner(c, order, mesh, backend, &run.ranks[backend.rank()]).Run();
  };
  std::vector<absl::Status> statuses;
  if (c.simulated) {
    comm::SimOptions options;
    options.world_size = mesh.world_size();
    options.topology = topology;
    options.seed = c.seed;
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::SimWorld> world, comm::SimWorld::Create(options));
    statuses = world->Run(body);
  } else {
    comm::InProcessOptions options;
    options.world_size = mesh.world_size();
    options.topology = topology;
    options.deadline = absl::Milliseconds(c.deadline_ms);
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::InProcessWorld> world, comm::InProcessWorld::Create(options));
    statuses = comm::RunRanks(*world, body);
  }
  EK_RETURN_IF_ERROR(comm::FirstFailure(statuses));
  return run;
}

std::vector<double> ExpertShard(const LayerCase& c, const RankRun& rank, const std::string& name,
                                const std::vector<double>& whole) {
  std::vector<double> part;
  if (whole.empty()) return part;
  ForShard(c, ShardOf(c, rank.lane, rank.ep_rank), name,
           [&](int64_t, int64_t global) { part.push_back(whole[global]); });
  return part;
}

std::vector<double> SumOverEdp(const LayerCase& c, const LayerRun& run, const RankRun& rank,
                               std::vector<double> Values::*member) {
  std::vector<double> sum((rank.values.*member).size(), 0.0);
  for (const RankRun& other : run.ranks) {
    // An EDP group shares a shard: the same EP rank, and with expert TP the same lane.
    if (other.ep_rank != rank.ep_rank || (!c.whole && other.lane != rank.lane)) continue;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += (other.values.*member)[i];
  }
  return sum;
}

double MaxDifference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= worst)) worst = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
  }
  return worst;
}

double MaxAbs(const std::vector<double>& a) {
  double largest = 0;
  for (double v : a) largest = std::max(largest, std::abs(v));
  return largest;
}

}  // namespace evenkeel::moe

#include "evenkeel/moe/testing/layer_harness.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/capacity.h"
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

std::vector<double> Inputs(const LayerCase& c, const std::string& name, int replica) {
  std::vector<double> values;
  const int64_t first = FirstToken(c, replica) * c.hidden;
  for (int64_t i = 0; i < c.tokens_in(replica) * c.hidden; ++i) values.push_back(DataAt(c, name, first + i));
  return values;
}

void Store(TensorView view, int64_t i, double value) {
  switch (view.dtype()) {
    case DType::kF64:
      view.data<double>()[i] = value;
      return;
    case DType::kF32:
      view.data<float>()[i] = static_cast<float>(value);
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
    EK_RETURN_IF_ERROR(ForwardBackward());
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
    MoeGroups groups = {.tp = tp_.get(), .ep = ep_.get(), .expert_tp = c_.whole ? 1 : c_.tp};
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
    std::vector<double> x = Inputs(c_, "x", out_.replica), dy = Inputs(c_, "dy", out_.replica);
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
    const int64_t base = counters.Snapshot().live_bytes;
    comm::LedgerCounts before = backend_.ledger().Snapshot();
    counters.ResetPeak();
    if (c_.mask) mask_ = c_.mask(out_.replica);
    MoeCall call;
    call.step = {.training = true, .seed = c_.seed, .step = 3, .source = static_cast<uint64_t>(out_.replica)};
    call.token_mask = c_.mask ? mask_.data() : nullptr;
    call.replay = c_.replay ? c_.replay(out_.replica) : nullptr;
    EK_RETURN_IF_ERROR(layer_->Forward(weights, t_.x.view(), t_.y.view(), call, &tape_, *stream_));
    EK_RETURN_IF_ERROR(stream_->Synchronize());
    out_.counted_memory.forward_peak = counters.Snapshot().peak_live_bytes - base;
    out_.counted_memory.tape = counters.Snapshot().live_bytes - base;
    out_.forward = backend_.ledger().Snapshot() - before;
    before = backend_.ledger().Snapshot();
    counters.ResetPeak();
    EK_RETURN_IF_ERROR(layer_->Backward(weights, tape_, t_.dy.view(), t_.dx.view(), gradients, *stream_));
    EK_RETURN_IF_ERROR(stream_->Synchronize());
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
  std::unique_ptr<comm::Communicator> tp_, ep_, control_tp_, control_ep_;
  std::vector<uint8_t> mask_;
  std::unique_ptr<MoeLayer> layer_;
  MoeTape tape_;
  RankTensors t_;
};

// ---- The naive layer ----

double Sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2 / pi)
double GeluInner(double z) { return kGeluScale * (z + 0.044715 * z * z * z); }
double Gelu(double z) { return 0.5 * z * (1 + std::tanh(GeluInner(z))); }
double GeluSlope(double z) {
  const double t = std::tanh(GeluInner(z));
  return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * kGeluScale * (1 + 3 * 0.044715 * z * z);
}

class Dense {
 public:
  Dense(const LayerCase& c, const LayerRun& run) : c_(c), run_(run) {
    const int64_t e = c.experts, h = c.hidden, F = c.ffn;
    const bool gated = c.activation == ExpertActivation::kSwiGlu;
    const auto load = [&](const char* name, int64_t n) {
      std::vector<double> v(n);
      for (int64_t i = 0; i < n; ++i) v[i] = DataAt(c, name, i);
      return v;
    };
    router_ = load("router", e * h);
    w_in_ = load("w_in", e * h * F);
    w_out_ = load("w_out", e * F * h);
    w_gate_ = load("w_gate", gated ? e * h * F : 0);
    b_in_ = load("b_in", c.bias ? e * F : 0);
    b_gate_ = load("b_gate", c.bias && gated ? e * F : 0);
    b_out_ = load("b_out", c.bias ? e * h : 0);
    Values& sums = result_.sums;
    sums.w_in.resize(w_in_.size());
    sums.w_out.resize(w_out_.size());
    sums.w_gate.resize(w_gate_.size());
    sums.b_in.resize(b_in_.size());
    sums.b_gate.resize(b_gate_.size());
    sums.b_out.resize(b_out_.size());
  }

  DenseResult Run() {
    for (int replica = 0; replica < c_.replicas(); ++replica) RunReplica(replica);
    return std::move(result_);
  }

 private:
  const RoutingDecision& DecisionOf(int replica) const {
    for (const RankRun& rank : run_.ranks) {
      if (rank.replica == replica) return rank.decision;
    }
    return run_.ranks.front().decision;
  }

  // One token through one expert: the output, and what backward needs.
  struct Middle {
    std::vector<double> pre, gate, hidden, out;
  };

  Middle Expert(int64_t g, const double* x) const {
    const int64_t h = c_.hidden, F = c_.ffn;
    Middle m;
    for (int64_t f = 0; f < F; ++f) {
      double z = b_in_.empty() ? 0 : b_in_[g * F + f], q = b_gate_.empty() ? 0 : b_gate_[g * F + f];
      for (int64_t i = 0; i < h; ++i) {
        z += x[i] * w_in_[(g * h + i) * F + f];
        if (!w_gate_.empty()) q += x[i] * w_gate_[(g * h + i) * F + f];
      }
      m.pre.push_back(z);
      m.gate.push_back(q);
      m.hidden.push_back(w_gate_.empty() ? Gelu(z) : q * Sigmoid(q) * z);
    }
    for (int64_t i = 0; i < h; ++i) {
      double y = b_out_.empty() ? 0 : b_out_[g * h + i];
      for (int64_t f = 0; f < F; ++f) y += m.hidden[f] * w_out_[(g * F + f) * h + i];
      m.out.push_back(y);
    }
    return m;
  }

  void ExpertBackward(int64_t g, const double* x, const Middle& m, const std::vector<double>& dout, double* dx) {
    const int64_t h = c_.hidden, F = c_.ffn;
    Values& sums = result_.sums;
    for (int64_t i = 0; i < h && !b_out_.empty(); ++i) sums.b_out[g * h + i] += dout[i];
    for (int64_t f = 0; f < F; ++f) {
      double dhidden = 0;
      for (int64_t i = 0; i < h; ++i) {
        sums.w_out[(g * F + f) * h + i] += m.hidden[f] * dout[i];
        dhidden += w_out_[(g * F + f) * h + i] * dout[i];
      }
      double dpre = dhidden * GeluSlope(m.pre[f]), dgate = 0;
      if (!w_gate_.empty()) {
        const double q = m.gate[f], sig = Sigmoid(q);
        dpre = dhidden * q * sig;
        dgate = dhidden * m.pre[f] * (sig + q * sig * (1 - sig));
      }
      if (!b_in_.empty()) sums.b_in[g * F + f] += dpre;
      if (!b_gate_.empty()) sums.b_gate[g * F + f] += dgate;
      for (int64_t i = 0; i < h; ++i) {
        sums.w_in[(g * h + i) * F + f] += x[i] * dpre;
        dx[i] += w_in_[(g * h + i) * F + f] * dpre;
        if (w_gate_.empty()) continue;
        sums.w_gate[(g * h + i) * F + f] += x[i] * dgate;
        dx[i] += w_gate_[(g * h + i) * F + f] * dgate;
      }
    }
  }

  // d(loss)/d(weights) of one token -> logits -> router matrix and x. Softmax; k > 1 normalises over kept routes.
  void RouterBackward(const RoutingDecision& d, int64_t token, const double* x, const std::vector<double>& dweight,
                      double* dx, std::vector<double>* drouter) const {
    const int64_t e = c_.experts, h = c_.hidden, k = d.top_k;
    std::vector<double> score(e);
    double largest = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t g = 0; g < e; ++g) {
      for (int64_t i = 0; i < h; ++i) score[g] += x[i] * router_[g * h + i];
      largest = std::max(largest, score[g]);
    }
    for (double& s : score) total += s = std::exp(s - largest);
    for (double& s : score) s /= total;
    double kept = 0, weighted = 0;
    for (int64_t j = 0; j < k; ++j) {
      if (d.slot[token * k + j] < 0) continue;
      kept += score[d.expert[token * k + j]];
      weighted += score[d.expert[token * k + j]] * dweight[j];
    }
    std::vector<double> dscore(e, 0.0);
    for (int64_t j = 0; j < k; ++j) {
      if (d.slot[token * k + j] < 0) continue;
      dscore[d.expert[token * k + j]] = k == 1 ? dweight[j] : dweight[j] / kept - weighted / (kept * kept);
    }
    double dot = 0;
    for (int64_t g = 0; g < e; ++g) dot += dscore[g] * score[g];
    for (int64_t g = 0; g < e; ++g) {
      const double dlogit = score[g] * (dscore[g] - dot);
      for (int64_t i = 0; i < h; ++i) {
        (*drouter)[g * h + i] += dlogit * x[i];
        dx[i] += dlogit * router_[g * h + i];
      }
    }
  }

  void RunReplica(int replica) {
    const RoutingDecision& d = DecisionOf(replica);
    const int64_t s = c_.tokens_in(replica), h = c_.hidden, k = d.top_k;
    const std::vector<double> x = Inputs(c_, "x", replica), dy = Inputs(c_, "dy", replica);
    std::vector<double> y(s * h), dx(s * h), drouter(c_.experts * h);
    for (int64_t t = 0; t < s; ++t) {
      std::vector<double> dweight(k, 0.0);
      for (int64_t j = 0; j < k; ++j) {
        if (d.slot[t * k + j] < 0) continue;
        const int64_t g = d.expert[t * k + j];
        const double w = d.weight[t * k + j];
        const Middle m = Expert(g, &x[t * h]);
        std::vector<double> dout(h);
        for (int64_t i = 0; i < h; ++i) {
          y[t * h + i] += w * m.out[i];
          dweight[j] += m.out[i] * dy[t * h + i];
          dout[i] = w * dy[t * h + i];
        }
        ExpertBackward(g, &x[t * h], m, dout, &dx[t * h]);
      }
      RouterBackward(d, t, &x[t * h], dweight, &dx[t * h], &drouter);
    }
    for (size_t i = 0; i < y.size(); ++i) result_.loss += y[i] * dy[i];
    result_.y.push_back(std::move(y));
    result_.dx.push_back(std::move(dx));
    result_.router.push_back(std::move(drouter));
  }

  const LayerCase& c_;
  const LayerRun& run_;
  std::vector<double> router_, w_in_, w_gate_, w_out_, b_in_, b_gate_, b_out_;
  DenseResult result_;
};

}  // namespace

double DataAt(const LayerCase& c, const std::string& name, int64_t index) {
  const PhiloxStream stream(PhiloxKey(c.seed).Add(name));
  double scale = 1.0;
  if (name == "w_in" || name == "w_gate") scale = 1.0 / std::sqrt(static_cast<double>(c.hidden));
  if (name == "w_out") scale = 1.0 / std::sqrt(static_cast<double>(c.ffn));
  // Rounded to bf16, so that all dtypes start from the same numbers.
  double value = static_cast<float>(BF16(static_cast<float>(stream.Normal(index) * scale)));
  if (c.favourite_expert >= 0 && name == "x" && index % c.hidden == 0) value = 4;
  if (c.favourite_expert >= 0 && name == "router" && index % c.hidden == 0) {
    value = index / c.hidden == c.favourite_expert ? 8 : -8;
  }
  if (name == c.perturb && index == c.perturb_index) value += c.perturb_by;
  return value;
}

absl::StatusOr<LayerRun> RunLayer(const LayerCase& c, const Order& order) {
  EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(c.mesh()));
  comm::InProcessOptions options;
  options.world_size = mesh.world_size();
  options.deadline = absl::Seconds(20);
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::InProcessWorld> world, comm::InProcessWorld::Create(options));
  LayerRun run;
  run.ranks.resize(mesh.world_size());
  const std::vector<absl::Status> statuses = comm::RunRanks(*world, [&](comm::Backend& backend) {
    return RankRunner(c, order, mesh, backend, &run.ranks[backend.rank()]).Run();
  });
  EK_RETURN_IF_ERROR(comm::FirstFailure(statuses));
  return run;
}

DenseResult RunDense(const LayerCase& c, const LayerRun& run) { return Dense(c, run).Run(); }

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

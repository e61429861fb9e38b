#include "evenkeel/testing/reference_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::testutil {
namespace {

using reference::Matrix;
using reference::Rounding;

std::string LayerName(int64_t layer, const char* rest) { return absl::StrCat("layer.", layer, ".", rest); }

ReferenceBranchConfig BranchOf(const ReferenceConfig& config) {
  return {config.branch, config.hidden, config.branch_ffn, config.swiglu, config.expert_bias};
}

// Weights as the products want them, made once for all replicas of a step.
struct PreparedWeights {
  PreparedWeights(const ReferenceConfig& config, const ReferenceTensors& parameters) {
    for (const auto& [name, parameter] : parameters) {
      const bool expert = absl::StrContains(name, ".moe.w_");
      if (!expert && (absl::StrContains(name, ".attention.w") || name == "output")) {
        transposed[name] = {Transpose(parameter)};
      }
      const int64_t rows = parameter.rows / config.router.experts;
      for (int64_t e = 0; expert && e < config.router.experts; ++e) {
        experts[name].push_back(Block(parameter, e * rows, rows, 0, parameter.cols));
        transposed[name].push_back(Transpose(experts[name].back()));
      }
    }
  }

  std::map<std::string, std::vector<Matrix>> experts;     // [expert]
  std::map<std::string, std::vector<Matrix>> transposed;  // [expert], or the one matrix
};

// Everything that one replica's forward leaves for its backward.
struct AttentionTape {
  Matrix input, normed, q, k, v, context;
  std::vector<Matrix> probabilities;  // by sequence, then head
};
struct ExpertTape {
  std::vector<int64_t> route;  // kept routes of this expert, token by token
  Matrix rows, inner, gate, active, out;
};
struct MoeTape {
  Matrix input, normed;
  std::vector<ExpertTape> experts;
  ReferenceBranchTape branch;
};

// One replica's forward and backward. Lives for one call.
class Replica {
 public:
  Replica(const ReferenceConfig& config, const ReferenceTensors& parameters, const PreparedWeights& weights,
          const ReferenceBatch& batch, const std::vector<int64_t>& tokens, const ReferenceRunOptions& options,
          ReferenceTensors* gradients)
      : config_(config),
        parameters_(parameters),
        weights_(weights),
        batch_(batch),
        dense_(options.dense),
        router_(options.router),
        split_(Split(options.dense, options.partials)),
        gradients_(*gradients) {
    for (int64_t count : tokens) depth_ += count;
    if (!options.replay.empty()) replay_ = &options.replay[0];
  }

  ReferenceReplica Run(int64_t capacity) {
    Matrix x = EmbeddingForward();
    result_.activations.push_back(x);
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      x = AttentionForward(layer, x);
      result_.activations.push_back(x);
      x = MoeForward(layer, capacity, x);
      result_.activations.push_back(x);
    }
    Matrix dx = HeadForwardAndBackward(x);
    result_.activation_gradients.resize(result_.activations.size());
    result_.activation_gradients.back() = dx;
    for (int64_t layer = config_.layers - 1; layer >= 0; --layer) {
      dx = MoeBackward(layer, dx);
      result_.activation_gradients[1 + 2 * layer] = dx;
      dx = AttentionBackward(layer, dx);
      result_.activation_gradients[2 * layer] = dx;
    }
    EmbeddingBackward(dx);
    return std::move(result_);
  }

 private:
  static Rounding Split(Rounding rounding, int64_t partials) {
    rounding.partials = partials;
    return rounding;
  }

  const Matrix& Parameter(const std::string& name) const { return parameters_.at(name); }
  Matrix& Gradient(const std::string& name) { return gradients_.at(name); }
  int64_t tokens() const { return static_cast<int64_t>(batch_.inputs.size()); }

  // Row of the position table for each token.
  std::vector<int64_t> Positions() const {
    std::vector<int64_t> positions(tokens());
    for (int64_t t = 0; t < tokens(); ++t) positions[t] = t % config_.sequence;
    return positions;
  }

  Matrix EmbeddingForward() const {
    const std::vector<int64_t> ids(batch_.inputs.begin(), batch_.inputs.end());
    return Sum(TakeRows(Parameter("embedding.token"), ids), TakeRows(Parameter("embedding.position"), Positions()),
               dense_);
  }

  void EmbeddingBackward(const Matrix& dx) {
    const std::vector<int64_t> ids(batch_.inputs.begin(), batch_.inputs.end());
    AddRows(dx, ids, depth_, dense_, &Gradient("embedding.token"));
    AddRows(dx, Positions(), depth_, dense_, &Gradient("embedding.position"));
  }

  Matrix AttentionForward(int64_t layer, const Matrix& x) {
    AttentionTape tape;
    tape.input = x;
    tape.normed = RmsNorm(x, Parameter(LayerName(layer, "attention.norm")), config_.norm_epsilon, dense_);
    tape.q = MatMul(tape.normed, Parameter(LayerName(layer, "attention.wq")), dense_);
    tape.k = MatMul(tape.normed, Parameter(LayerName(layer, "attention.wk")), dense_);
    tape.v = MatMul(tape.normed, Parameter(LayerName(layer, "attention.wv")), dense_);
    tape.context = Matrix(x.rows, config_.hidden);
    const int64_t s = config_.sequence, d = config_.hidden / config_.heads;
    for (int64_t row = 0; row < x.rows; row += s) {
      for (int64_t head = 0; head < config_.heads; ++head) {
        Matrix scores =
            MatMul(Block(tape.q, row, s, head * d, d), Transpose(Block(tape.k, row, s, head * d, d)), dense_);
        reference::ScaleInPlace(1 / std::sqrt(static_cast<double>(d)), &scores);
        tape.probabilities.push_back(Softmax(scores, /*causal=*/true, dense_));
        PutBlock(MatMul(tape.probabilities.back(), Block(tape.v, row, s, head * d, d), dense_), row, head * d,
                 &tape.context);
      }
    }
    Matrix y = Sum(x, MatMul(tape.context, Parameter(LayerName(layer, "attention.wo")), split_), dense_);
    attention_.push_back(std::move(tape));
    return y;
  }

  // Gradients of q, k and v from that of the context.
  void ScoresBackward(const AttentionTape& tape, const Matrix& dcontext, Matrix* dq, Matrix* dk, Matrix* dv) const {
    const int64_t s = config_.sequence, d = config_.hidden / config_.heads;
    const double scale = 1 / std::sqrt(static_cast<double>(d));
    *dq = *dk = *dv = Matrix(dcontext.rows, config_.hidden);
    size_t block = 0;
    for (int64_t row = 0; row < dcontext.rows; row += s) {
      for (int64_t head = 0; head < config_.heads; ++head) {
        const Matrix& p = tape.probabilities[block++];
        const Matrix dout = Block(dcontext, row, s, head * d, d);
        PutBlock(MatMul(Transpose(p), dout, dense_), row, head * d, dv);
        const Matrix dp = MatMul(dout, Transpose(Block(tape.v, row, s, head * d, d)), dense_);
        Matrix dscores = SoftmaxBackward(p, dp, dense_);
        reference::ScaleInPlace(scale, &dscores);
        PutBlock(MatMul(dscores, Block(tape.k, row, s, head * d, d), dense_), row, head * d, dq);
        PutBlock(MatMul(Transpose(dscores), Block(tape.q, row, s, head * d, d), dense_), row, head * d, dk);
      }
    }
  }

  // Adds the gradient of w and returns that of x for y = x w.
  Matrix LinearBackward(const std::string& name, const Matrix& x, const Matrix& dy, const Rounding& rounding) {
    AddTransposedProduct(x, dy, depth_, dense_, &Gradient(name));
    return MatMul(dy, weights_.transposed.at(name)[0], rounding);
  }

  Matrix AttentionBackward(int64_t layer, const Matrix& dy) {
    const AttentionTape& tape = attention_[layer];
    const Matrix dcontext = LinearBackward(LayerName(layer, "attention.wo"), tape.context, dy, dense_);
    Matrix dq, dk, dv;
    ScoresBackward(tape, dcontext, &dq, &dk, &dv);
    Matrix dnormed = LinearBackward(LayerName(layer, "attention.wq"), tape.normed, dq, split_);
    dnormed = Sum(dnormed, LinearBackward(LayerName(layer, "attention.wk"), tape.normed, dk, split_), dense_);
    dnormed = Sum(dnormed, LinearBackward(LayerName(layer, "attention.wv"), tape.normed, dv, split_), dense_);
    return Sum(dy, NormBackward(LayerName(layer, "attention.norm"), tape.input, dnormed), dense_);
  }

  Matrix NormBackward(const std::string& name, const Matrix& input, const Matrix& dy) {
    return RmsNormBackward(input, Parameter(name), config_.norm_epsilon, dy, depth_, dense_, &Gradient(name));
  }

  const Matrix& Expert(const std::string& name, int64_t e) const { return weights_.experts.at(name)[e]; }

  // y + bias of expert e, where there are biases.
  Matrix Biased(const Matrix& y, const std::string& name, int64_t e) const {
    if (!config_.expert_bias) return y;
    return Sum(y, TakeRows(Parameter(name), std::vector<int64_t>(y.rows, e)), dense_);
  }

  void ExpertForward(int64_t layer, int64_t e, ExpertTape* tape) const {
    tape->inner =
        Biased(MatMul(tape->rows, Expert(LayerName(layer, "moe.w_in"), e), dense_), LayerName(layer, "moe.b_in"), e);
    if (config_.swiglu) {
      tape->gate = Biased(MatMul(tape->rows, Expert(LayerName(layer, "moe.w_gate"), e), dense_),
                          LayerName(layer, "moe.b_gate"), e);
      tape->active = Product(Apply(reference::Silu, tape->gate, dense_), tape->inner, dense_);
    } else {
      tape->active = Apply(reference::Gelu, tape->inner, dense_);
    }
    tape->out = Biased(MatMul(tape->active, Expert(LayerName(layer, "moe.w_out"), e), split_),
                       LayerName(layer, "moe.b_out"), e);
  }

  Matrix MoeForward(int64_t layer, int64_t capacity, const Matrix& x) {
    MoeTape tape;
    tape.input = x;
    tape.normed = RmsNorm(x, Parameter(LayerName(layer, "moe.norm")), config_.norm_epsilon, dense_);
    const ReferenceRoutes* replay = replay_ != nullptr ? &(*replay_)[layer] : nullptr;
    ReferenceRouting routing =
        Route(config_.router, tape.normed, Parameter(LayerName(layer, "moe.router")), capacity, replay, router_);
    const int64_t k = config_.router.top_k;
    tape.experts.resize(config_.router.experts);
    for (size_t route = 0; route < routing.used.expert.size(); ++route) {
      if (routing.used.kept[route])
        tape.experts[routing.used.expert[route]].route.push_back(static_cast<int64_t>(route));
    }
    Matrix combined(x.rows, config_.hidden);
    if (dense_.track) combined.Track();
    const double own = dense_.SumVariance(k + 1);
    for (int64_t e = 0; e < config_.router.experts; ++e) {
      ExpertTape& expert = tape.experts[e];
      std::vector<int64_t> from;
      for (int64_t route : expert.route) from.push_back(route / k);
      expert.rows = TakeRows(tape.normed, from);
      ExpertForward(layer, e, &expert);
      for (size_t i = 0; i < from.size(); ++i) AddWeighted(routing.weights, expert, i, k, own, &combined);
    }
    result_.routing.push_back(std::move(routing));
    Matrix y = Stored(combined);
    if (config_.branch != ReferenceMix::kNone) {
      y = BranchForward(BranchOf(config_), parameters_, LayerName(layer, "moe.shared."), tape.normed, y,
                        BranchRounding(), &tape.branch);
    }
    moe_.push_back(std::move(tape));
    return Sum(x, y, dense_);
  }

  ReferenceBranchRounding BranchRounding() const { return {dense_, split_, depth_}; }

  // combined[token] += weight * out[i] for the i-th row of an expert.
  void AddWeighted(const Matrix& weights, const ExpertTape& expert, size_t i, int64_t k, double own,
                   Matrix* combined) const {
    const int64_t token = expert.route[i] / k, choice = expert.route[i] % k;
    const double w = weights.at(token, choice), w_variance = weights.var(token, choice);
    for (int64_t c = 0; c < config_.hidden; ++c) {
      const double o = expert.out.at(static_cast<int64_t>(i), c);
      combined->at(token, c) += w * o;
      if (!dense_.track) continue;
      combined->variance[token * config_.hidden + c] += static_cast<float>(
          w * w * expert.out.var(static_cast<int64_t>(i), c) + o * o * w_variance + own * w * w * o * o);
    }
  }

  // `a` with the rounding of being written once more.
  Matrix Stored(Matrix a) const {
    for (size_t i = 0; i < a.variance.size(); ++i) {
      a.variance[i] += static_cast<float>(dense_.StoreVariance() * a.value[i] * a.value[i]);
    }
    return a;
  }

  // dout rows of one expert (weight * dy) and the gradients of its routes' weights (out . dy).
  Matrix CombineBackward(const ReferenceRouting& routing, const ExpertTape& expert, const Matrix& dy,
                         Matrix* dweights) const {
    const int64_t k = config_.router.top_k;
    Matrix dout(expert.out.rows, config_.hidden);
    if (dense_.track) dout.Track();
    const double own = dense_.SumVariance(config_.hidden);
    for (int64_t i = 0; i < dout.rows; ++i) {
      const int64_t token = expert.route[i] / k, choice = expert.route[i] % k;
      const double w = routing.weights.at(token, choice);
      double dot = 0, variance = 0;
      for (int64_t c = 0; c < config_.hidden; ++c) {
        const double d = dy.at(token, c), o = expert.out.at(i, c);
        dout.at(i, c) = w * d;
        dot += o * d;
        if (!dense_.track) continue;
        dout.variance[i * config_.hidden + c] =
            static_cast<float>(w * w * dy.var(token, c) + d * d * routing.weights.var(token, choice) +
                               dense_.arithmetic * dense_.arithmetic * w * w * d * d);
        variance += o * o * dy.var(token, c) + d * d * expert.out.var(i, c) + own * o * o * d * d;
      }
      dweights->at(token, choice) = dot;
      if (dense_.track) {
        dweights->variance[token * k + choice] = static_cast<float>(variance + router_.StoreVariance() * dot * dot);
      }
    }
    return Stored(dout);
  }

  // Adds expert e's gradients and returns its rows'.
  Matrix ExpertBackward(int64_t layer, int64_t e, const ExpertTape& tape, const Matrix& dout) {
    AddBias(LayerName(layer, "moe.b_out"), e, dout);
    const Matrix dactive = ExpertLinearBackward(LayerName(layer, "moe.w_out"), e, tape.active, dout, dense_);
    if (!config_.swiglu) {
      const Matrix dinner = ApplyBackward(reference::Gelu, tape.inner, dactive, dense_);
      AddBias(LayerName(layer, "moe.b_in"), e, dinner);
      return ExpertLinearBackward(LayerName(layer, "moe.w_in"), e, tape.rows, dinner, split_);
    }
    const Matrix dinner = Product(dactive, Apply(reference::Silu, tape.gate, dense_), dense_);
    const Matrix dgate = ApplyBackward(reference::Silu, tape.gate, Product(dactive, tape.inner, dense_), dense_);
    AddBias(LayerName(layer, "moe.b_in"), e, dinner);
    AddBias(LayerName(layer, "moe.b_gate"), e, dgate);
    const Matrix drows = ExpertLinearBackward(LayerName(layer, "moe.w_in"), e, tape.rows, dinner, split_);
    return Sum(drows, ExpertLinearBackward(LayerName(layer, "moe.w_gate"), e, tape.rows, dgate, split_), dense_);
  }

  void AddBias(const std::string& name, int64_t e, const Matrix& dy) {
    if (config_.expert_bias) AddRows(dy, std::vector<int64_t>(dy.rows, e), depth_, dense_, &Gradient(name));
  }

  Matrix ExpertLinearBackward(const std::string& name, int64_t e, const Matrix& x, const Matrix& dy,
                              const Rounding& rounding) {
    Matrix& all = Gradient(name);
    const int64_t first_row = e * (all.rows / config_.router.experts);
    AddTransposedProduct(x, dy, depth_, dense_, &all, first_row);
    return MatMul(dy, weights_.transposed.at(name)[e], rounding);
  }

  Matrix MoeBackward(int64_t layer, const Matrix& dout) {
    const MoeTape& tape = moe_[layer];
    Matrix dy = dout, from_branch;
    if (config_.branch != ReferenceMix::kNone) {
      from_branch = BranchBackward(BranchOf(config_), parameters_, LayerName(layer, "moe.shared."), tape.branch, dout,
                                   BranchRounding(), &dy, &gradients_);
    }
    const ReferenceRouting& routing = result_.routing[layer];
    const int64_t k = config_.router.top_k;
    Matrix dweights(dy.rows, k);
    Matrix dnormed(dy.rows, config_.hidden);
    if (dense_.track) {
      dweights.Track();
      dnormed.Track();
    }
    for (int64_t e = 0; e < config_.router.experts; ++e) {
      const ExpertTape& expert = tape.experts[e];
      if (expert.route.empty()) continue;
      const Matrix drows = CombineBackward(routing, expert, dy, &dweights);
      std::vector<int64_t> to;
      for (int64_t route : expert.route) to.push_back(route / k);
      AddRows(ExpertBackward(layer, e, expert, drows), to, k, dense_, &dnormed);
    }
    const std::string router = LayerName(layer, "moe.router");
    const Matrix from_router = RouteBackward(config_.router, routing, tape.normed, Parameter(router), dweights, depth_,
                                             router_, &Gradient(router));
    dnormed = Sum(Stored(dnormed), from_router, dense_);
    if (config_.branch != ReferenceMix::kNone) dnormed = Sum(dnormed, from_branch, dense_);
    return Sum(dout, NormBackward(LayerName(layer, "moe.norm"), tape.input, dnormed), dense_);
  }

  // Final norm, logits, loss; returns the gradient of x.
  Matrix HeadForwardAndBackward(const Matrix& x) {
    const Matrix normed = RmsNorm(x, Parameter("final.norm"), config_.norm_epsilon, dense_);
    const Matrix logits = MatMul(normed, Parameter("output"), dense_);
    Matrix dlogits = Softmax(logits, /*causal=*/false, dense_);
    AddLoss(logits, dlogits);
    for (int64_t t = 0; t < tokens(); ++t) dlogits.at(t, batch_.targets[t]) -= 1;
    reference::ScaleInPlace(1.0 / static_cast<double>(tokens()), &dlogits);
    return NormBackward("final.norm", x, LinearBackward("output", normed, Stored(dlogits), dense_));
  }

  void AddLoss(const Matrix& logits, const Matrix& probabilities) {
    double variance = 0;
    for (int64_t t = 0; t < tokens(); ++t) {
      const int32_t target = batch_.targets[t];
      const double p = std::max(probabilities.at(t, target), 1e-300);
      result_.cross_entropy -= std::log(p);
      for (int64_t c = 0; c < logits.cols && dense_.track; ++c) {
        const double slope = probabilities.at(t, c) - (c == target ? 1 : 0);
        variance += slope * slope * logits.var(t, c);
      }
      const double own = static_cast<double>(logits.cols) + reference::kElementary;
      variance += (own * own + dense_.store * dense_.store) * dense_.arithmetic * dense_.arithmetic;
    }
    const double n = static_cast<double>(tokens());
    result_.cross_entropy /= n;
    result_.loss = result_.cross_entropy;
    result_.loss_variance = variance / (n * n);
    for (const ReferenceRouting& routing : result_.routing) {
      result_.loss +=
          config_.router.balance_coefficient * routing.balance_loss + config_.router.z_coefficient * routing.z_loss;
      const double own = static_cast<double>(tokens()) * router_.arithmetic;
      const double size =
          config_.router.balance_coefficient * routing.balance_loss + config_.router.z_coefficient * routing.z_loss;
      result_.loss_variance += own * own * size * size;
    }
  }

  const ReferenceConfig& config_;
  const ReferenceTensors& parameters_;
  const PreparedWeights& weights_;
  const ReferenceBatch& batch_;
  const Rounding dense_;
  const Rounding router_;
  const Rounding split_;  // of products whose sum is split over lanes
  ReferenceTensors& gradients_;
  const std::vector<ReferenceRoutes>* replay_ = nullptr;
  int64_t depth_ = 0;
  std::vector<AttentionTape> attention_;
  std::vector<MoeTape> moe_;
  ReferenceReplica result_;
};

absl::Status CheckBatch(const ReferenceConfig& config, const ReferenceBatch& batch) {
  const auto known = [&](int32_t id) { return id >= 0 && id < config.vocabulary; };
  if (batch.inputs.size() != batch.targets.size() || batch.inputs.empty() ||
      static_cast<int64_t>(batch.inputs.size()) % config.sequence != 0 ||
      !std::all_of(batch.inputs.begin(), batch.inputs.end(), known) ||
      !std::all_of(batch.targets.begin(), batch.targets.end(), known)) {
    return absl::InvalidArgumentError(absl::StrCat("reference model: a batch of ", batch.inputs.size(), " inputs and ",
                                                   batch.targets.size(), " targets is not whole sequences of ",
                                                   config.sequence, " ids below ", config.vocabulary));
  }
  return absl::OkStatus();
}

absl::Status CheckSame(const ReferenceTensors& wanted, const ReferenceTensors& found) {
  for (const auto& [name, tensor] : wanted) {
    const auto it = found.find(name);
    if (it == found.end()) return absl::InvalidArgumentError(absl::StrCat("reference model: no parameter ", name));
    if (it->second.rows != tensor.rows || it->second.cols != tensor.cols) {
      return absl::InvalidArgumentError(absl::StrCat("reference model: ", name, " is [", it->second.rows, ", ",
                                                     it->second.cols, "], wanted [", tensor.rows, ", ", tensor.cols,
                                                     "]"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReferenceModel> ReferenceModel::Create(const ReferenceConfig& config) {
  const ReferenceRouterConfig& router = config.router;
  if (config.vocabulary < 1 || config.sequence < 1 || config.hidden < 1 || config.heads < 1 || config.layers < 0 ||
      config.ffn < 1 || config.hidden % config.heads != 0 || router.top_k < 1 || router.top_k > router.experts ||
      router.capacity_numerator < 0 || router.capacity_denominator < 1 || router.capacity_multiple < 1 ||
      config.capacity_replicas < 1 || (config.branch != ReferenceMix::kNone && config.branch_ffn < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("reference model: bad sizes: vocabulary ", config.vocabulary, ", sequence ", config.sequence,
                     ", hidden ", config.hidden, ", heads ", config.heads, ", layers ", config.layers, ", ffn ",
                     config.ffn, ", experts ", router.experts, ", top_k ", router.top_k, ", capacity ",
                     router.capacity_numerator, "/", router.capacity_denominator, " in multiples of ",
                     router.capacity_multiple, ", branch ffn ", config.branch_ffn));
  }
  return ReferenceModel(config);
}

ReferenceTensors ReferenceModel::ZeroTensors() const {
  const int64_t h = config_.hidden, e = config_.router.experts, f = config_.ffn;
  ReferenceTensors tensors;
  tensors["embedding.token"] = Matrix(config_.vocabulary, h);
  tensors["embedding.position"] = Matrix(config_.sequence, h);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    tensors[LayerName(layer, "attention.norm")] = Matrix(1, h);
    for (const char* w : {"attention.wq", "attention.wk", "attention.wv", "attention.wo"}) {
      tensors[LayerName(layer, w)] = Matrix(h, h);
    }
    tensors[LayerName(layer, "moe.norm")] = Matrix(1, h);
    tensors[LayerName(layer, "moe.router")] = Matrix(e, h);
    tensors[LayerName(layer, "moe.w_in")] = Matrix(e * h, f);
    if (config_.swiglu) tensors[LayerName(layer, "moe.w_gate")] = Matrix(e * h, f);
    tensors[LayerName(layer, "moe.w_out")] = Matrix(e * f, h);
    if (config_.expert_bias) {
      tensors[LayerName(layer, "moe.b_in")] = Matrix(e, f);
      if (config_.swiglu) tensors[LayerName(layer, "moe.b_gate")] = Matrix(e, f);
      tensors[LayerName(layer, "moe.b_out")] = Matrix(e, h);
    }
    AddBranchTensors(BranchOf(config_), LayerName(layer, "moe.shared."), &tensors);
  }
  tensors["final.norm"] = Matrix(1, h);
  tensors["output"] = Matrix(h, config_.vocabulary);
  return tensors;
}

std::vector<std::string> ReferenceModel::BoundaryNames() const {
  std::vector<std::string> names = {"embedding"};
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    names.push_back(LayerName(layer, "attention"));
    names.push_back(LayerName(layer, "moe"));
  }
  return names;
}

absl::StatusOr<ReferenceStep> ReferenceModel::Run(const ReferenceTensors& parameters,
                                                  const std::vector<ReferenceBatch>& batches,
                                                  const ReferenceRunOptions& options) const {
  ReferenceStep step;
  step.gradients = ZeroTensors();
  EK_RETURN_IF_ERROR(CheckSame(step.gradients, parameters));
  if (!options.replay.empty() && options.replay.size() != batches.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("reference model: routes of ", options.replay.size(), " replicas for ", batches.size()));
  }
  std::vector<int64_t> tokens;
  for (const ReferenceBatch& batch : batches) {
    EK_RETURN_IF_ERROR(CheckBatch(config_, batch));
    tokens.push_back(static_cast<int64_t>(batch.inputs.size()));
  }
  const PreparedWeights weights(config_, parameters);
  const double n = static_cast<double>(batches.size());
  for (size_t r = 0; r < batches.size(); ++r) {
    ReferenceRunOptions own = options;
    if (!options.replay.empty()) own.replay = {options.replay[r]};
    const size_t first = r / config_.capacity_replicas * config_.capacity_replicas;
    const size_t last = std::min(first + config_.capacity_replicas, tokens.size());
    const int64_t capacity =
        ReferenceCapacity(config_.router, std::vector<int64_t>(tokens.begin() + first, tokens.begin() + last));
    ReferenceReplica replica =
        Replica(config_, parameters, weights, batches[r], tokens, own, &step.gradients).Run(capacity);
    step.loss += replica.loss / n;
    step.loss_variance += replica.loss_variance / (n * n);
    step.replicas.push_back(std::move(replica));
  }
  for (auto& [name, gradient] : step.gradients) reference::ScaleInPlace(1 / n, &gradient);
  return step;
}

double Bound(const Matrix& a, int64_t i, double unit) {
  return a.variance.empty() ? 0 : reference::kBoundDeviations * unit * std::sqrt(static_cast<double>(a.variance[i]));
}

}  // namespace evenkeel::testutil

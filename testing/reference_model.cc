#include "evenkeel/testing/reference_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/testing/reference_attention.h"
#include "evenkeel/testing/reference_experts.h"
#include "evenkeel/testing/reference_pass.h"

namespace evenkeel::testutil {
namespace {

using reference::Matrix;
using reference::Rounding;

// One replica's forward and backward. Lives for one call.
class Replica {
 public:
  Replica(const ReferencePass& forward, const ReferencePass& backward, const ReferenceBatch& batch,
          const std::vector<ReferenceRoutes>* replay)
      : pass_(forward),
        backward_(backward),
        batch_(batch),
        replay_(replay),
        attention_(forward.config.layers),
        moe_(forward.config.layers) {}

  ReferenceReplica Run(int64_t capacity) {
    Matrix x = EmbeddingForward();
    result_.activations.push_back(x);
    for (int64_t layer = 0; layer < pass_.config.layers; ++layer) {
      x = ReferenceAttentionForward(pass_, layer, x, &attention_[layer]);
      result_.activations.push_back(x);
      x = ReferenceMoeForward(pass_, layer, capacity, replay_ != nullptr ? &(*replay_)[layer] : nullptr, x,
                              &moe_[layer]);
      result_.routing.push_back(moe_[layer].routing);
      result_.activations.push_back(x);
    }
    Matrix dx = HeadForwardAndBackward(x);
    result_.activation_gradients.resize(result_.activations.size());
    result_.activation_gradients.back() = dx;
    for (int64_t layer = pass_.config.layers - 1; layer >= 0; --layer) {
      dx = ReferenceMoeBackward(backward_, layer, moe_[layer], dx);
      result_.activation_gradients[1 + 2 * layer] = dx;
      dx = ReferenceAttentionBackward(backward_, layer, attention_[layer], dx);
      result_.activation_gradients[2 * layer] = dx;
    }
    EmbeddingBackward(dx);
    return std::move(result_);
  }

 private:
  int64_t tokens() const { return static_cast<int64_t>(batch_.inputs.size()); }

  // Row of the position table for each token.
  std::vector<int64_t> Positions() const {
    std::vector<int64_t> positions(tokens());
    for (int64_t t = 0; t < tokens(); ++t) positions[t] = t % pass_.config.sequence;
    return positions;
  }

  Matrix EmbeddingForward() const {
    const std::vector<int64_t> ids(batch_.inputs.begin(), batch_.inputs.end());
    return Sum(TakeRows(pass_.Parameter("embedding.token"), ids),
               TakeRows(pass_.Parameter("embedding.position"), Positions()), pass_.dense);
  }

  void EmbeddingBackward(const Matrix& dx) {
    const std::vector<int64_t> ids(batch_.inputs.begin(), batch_.inputs.end());
    AddRows(dx, ids, backward_.depth, backward_.dense, &backward_.Gradient("embedding.token"));
    AddRows(dx, Positions(), backward_.depth, backward_.dense, &backward_.Gradient("embedding.position"));
  }

  // Final norm, logits, loss; returns the gradient of x.
  Matrix HeadForwardAndBackward(const Matrix& x) {
    const Matrix normed = RmsNorm(x, pass_.Parameter("final.norm"), pass_.config.norm_epsilon, pass_.dense);
    const Matrix logits = MatMul(normed, pass_.Parameter("output"), pass_.dense);
    Matrix dlogits = Softmax(logits, /*causal=*/false, pass_.dense);
    AddLoss(logits, dlogits);
    for (int64_t t = 0; t < tokens(); ++t) dlogits.at(t, batch_.targets[t]) -= 1;
    reference::ScaleInPlace(1.0 / static_cast<double>(tokens()), &dlogits);
    return backward_.NormBackward(
        "final.norm", x, backward_.LinearBackward("output", normed, backward_.Stored(dlogits), backward_.dense));
  }

  void AddLoss(const Matrix& logits, const Matrix& probabilities) {
    double variance = 0;
    for (int64_t t = 0; t < tokens(); ++t) {
      const int32_t target = batch_.targets[t];
      const double p = std::max(probabilities.at(t, target), 1e-300);
      result_.cross_entropy -= std::log(p);
      for (int64_t c = 0; c < logits.cols && pass_.dense.track; ++c) {
        const double slope = probabilities.at(t, c) - (c == target ? 1 : 0);
        variance += slope * slope * logits.var(t, c);
      }
      const double own = static_cast<double>(logits.cols) + reference::kElementary;
      variance += (own * own + pass_.dense.store * pass_.dense.store) * pass_.dense.arithmetic * pass_.dense.arithmetic;
    }
    const double n = static_cast<double>(tokens());
    result_.cross_entropy /= n;
    result_.loss = result_.cross_entropy;
    result_.loss_variance = variance / (n * n);
    for (const ReferenceRouting& routing : result_.routing) {
      const ReferenceRouterConfig& router = pass_.config.router;
      const double size = router.balance_coefficient * routing.balance_loss + router.z_coefficient * routing.z_loss;
      const double own = static_cast<double>(tokens()) * pass_.router.arithmetic;
      result_.loss += size;
      result_.loss_variance += own * own * size * size;
    }
  }

  const ReferencePass& pass_;      // of the forward
  const ReferencePass& backward_;  // the same with the roundings of gradients
  const ReferenceBatch& batch_;
  const std::vector<ReferenceRoutes>* const replay_;  // by layer; null: the router's own
  std::vector<ReferenceAttentionTape> attention_;
  std::vector<ReferenceMoeTape> moe_;
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

// Of values that are written times `scale`; their largest goes to `reach`.
Rounding ScaledBy(double scale, Rounding rounding, double* reach) {
  rounding.floor /= scale;
  rounding.reach = reach;
  return rounding;
}

Rounding SplitOver(int64_t partials, Rounding rounding) {
  rounding.partials = partials;
  return rounding;
}

}  // namespace

absl::StatusOr<ReferenceModel> ReferenceModel::Create(const ReferenceConfig& config) {
  EK_RETURN_IF_ERROR(CheckReferenceConfig(config));
  return ReferenceModel(config);
}

absl::StatusOr<ReferenceStep> ReferenceModel::Run(const ReferenceTensors& parameters,
                                                  const std::vector<ReferenceBatch>& batches,
                                                  const ReferenceRunOptions& options) const {
  ReferenceStep step;
  step.gradients = ZeroReferenceTensors(config_);
  EK_RETURN_IF_ERROR(CheckReferenceTensors(step.gradients, parameters));
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
  const auto pass_with = [&](const Rounding& dense) -> ReferencePass {
    return {.config = config_,
            .parameters = parameters,
            .weights = weights,
            .dense = dense,
            .split = SplitOver(options.partials, dense),
            .router = options.router,
            .depth = std::accumulate(tokens.begin(), tokens.end(), int64_t{0}),
            .gradients = step.gradients};
  };
  const ReferencePass forward = pass_with(options.dense);
  const ReferencePass backward = pass_with(ScaledBy(options.loss_scale, options.dense, &step.backward_reach));
  const double n = static_cast<double>(batches.size());
  for (size_t r = 0; r < batches.size(); ++r) {
    const size_t first = r / config_.capacity_replicas * config_.capacity_replicas;
    const size_t last = std::min(first + config_.capacity_replicas, tokens.size());
    const int64_t capacity =
        ReferenceCapacity(config_.router, std::vector<int64_t>(tokens.begin() + first, tokens.begin() + last));
    const std::vector<ReferenceRoutes>* const replay = options.replay.empty() ? nullptr : &options.replay[r];
    ReferenceReplica replica = Replica(forward, backward, batches[r], replay).Run(capacity);
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

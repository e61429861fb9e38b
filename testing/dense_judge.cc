#include "evenkeel/testing/dense_judge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/testing/bitwise_judge.h"
#include "evenkeel/testing/tensor_difference.h"

namespace evenkeel::testutil {
namespace {

using reference::Matrix;

// Places inside a step, in the order in which a step computes.
enum Place : int64_t {
  kReplicaPlace = 0,
  kForwardPlace = 1000,
  kLossPlace = 100000,
  kBackwardPlace = 200000,
  kGradientPlace = 300000,
  kNormPlace = 400000,
  kParameterPlace = 500000,
};

// Bytes written one after the other, and read back in the same order.
class Packer {
 public:
  void Put(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), from, from + bytes);
  }
  template <typename T>
  void Put(T value) {
    Put(&value, sizeof(value));
  }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

class Unpacker {
 public:
  explicit Unpacker(const uint8_t* bytes) : next_(bytes) {}
  const uint8_t* Take(size_t bytes) {
    const uint8_t* taken = next_;
    next_ += bytes;
    return taken;
  }
  template <typename T>
  T Take() {
    T value;
    std::memcpy(&value, Take(sizeof(T)), sizeof(T));
    return value;
  }
  // `count` elements of `dtype` as doubles.
  std::vector<double> TakeElements(DType dtype, int64_t count) {
    std::vector<double> values(count);
    const uint8_t* from = Take(count * SizeOf(dtype));
    std::vector<uint64_t> aligned((count * SizeOf(dtype) + 7) / 8);
    std::memcpy(aligned.data(), from, count * SizeOf(dtype));
    const ConstTensorView view(aligned.data(), dtype, *Shape::Create({count}));
    for (int64_t i = 0; i < count; ++i) values[i] = ElementOf(view, i);
    return values;
  }

 private:
  const uint8_t* next_;
};

// A tensor that was shown, kept until the step is judged.
struct Shown {
  DType dtype = DType::kF32;
  std::vector<uint8_t> bytes;
  uint64_t digest() const { return Digest64(bytes.data(), bytes.size()); }
};

// What rank 0 has unpacked of one step.
struct Collected {
  ReferenceTensors parameters;
  ReferenceTensors gradients;
  std::vector<std::vector<std::vector<double>>> activations;           // [replica][boundary]
  std::vector<std::vector<std::vector<double>>> activation_gradients;  // [replica][boundary]
  std::vector<double> losses;                                          // [replica]
  std::vector<std::vector<ReferenceRoutes>> routes;                    // [replica][layer]
  double mean_loss = 0;
  double gradient_norm = 0;
  double clip_scale = 1;
  bool stepped = true;
};

DType WideDType(DType dtype) { return dtype == DType::kBF16 ? DType::kF32 : dtype; }

class Judging final : public DenseJudge {
 public:
  Judging(const TrainingConfig& config, const comm::Mesh& mesh, ReferenceModel model, const Corpus* corpus,
          comm::Communicator* world)
      : config_(config),
        mesh_(mesh),
        model_(std::move(model)),
        corpus_(*corpus),
        world_(*world),
        roundings_(RoundingsOf(config.model.dtype, mesh.shape().tp)),
        unit_(UnitRoundoff(config.model.dtype)),
        store_unit_(unit_ * roundings_.dense.store),
        device_(HostDevice::Create()) {}

  absl::Status Prepare() {
    EK_ASSIGN_OR_RETURN(stream_, device_->CreateStream("judge"));
    for (int rank = 0; rank < world_.size(); ++rank) {
      specs_.push_back(DescribeLanguageModel(config_.model, mesh_, rank).parameters);
    }
    owners_.resize(specs_[0].size());
    for (size_t p = 0; p < owners_.size(); ++p) {
      for (int rank = 0; rank < world_.size(); ++rank) {
        int owner = rank;
        for (int other = rank - 1; other >= 0; --other) {
          if (specs_[other][p].global_offset == specs_[rank][p].global_offset) owner = other;
        }
        owners_[p].push_back(owner);
      }
    }
    return absl::OkStatus();
  }

  void See(const Tap& tap) override {
    const auto* bytes = static_cast<const uint8_t*>(tap.value.raw());
    Shown& shown = shown_[{tap.kind, std::string(tap.name)}];
    shown.dtype = tap.value.dtype();
    shown.bytes.assign(bytes, bytes + tap.value.num_bytes());
  }

  absl::Status Judge(int64_t step, const StepReport& report) override {
    EK_ASSIGN_OR_RETURN(std::vector<uint8_t> mine, Pack(report, /*whole_step=*/true));
    std::vector<uint8_t> all;
    std::vector<int64_t> sizes;
    EK_RETURN_IF_ERROR(GatherOnRankZero(mine, &all, &sizes));
    shown_.clear();
    if (world_.rank() != 0) return absl::OkStatus();
    Collected collected = Unpack(all, sizes, /*whole_step=*/true, step);
    if (step > 0) JudgeParameters(step - 1, collected.parameters);
    return JudgeStep(step, std::move(collected));
  }

  absl::Status Finish() override {
    EK_ASSIGN_OR_RETURN(std::vector<uint8_t> mine, Pack({}, /*whole_step=*/false));
    std::vector<uint8_t> all;
    std::vector<int64_t> sizes;
    EK_RETURN_IF_ERROR(GatherOnRankZero(mine, &all, &sizes));
    shown_.clear();
    if (world_.rank() != 0 || losses_.empty()) return absl::OkStatus();
    const int64_t last = static_cast<int64_t>(losses_.size()) - 1;
    const Collected collected = Unpack(all, sizes, /*whole_step=*/false, last);
    JudgeParameters(last, collected.parameters);
    return absl::OkStatus();
  }

  const Finding& finding() const override { return finding_; }
  const std::vector<double>& losses() const override { return losses_; }
  const ReferenceTensors& parameters() const override { return before_.parameters; }

 private:
  using Key = std::pair<TapKind, std::string>;

  int lane(int rank) const { return mesh_.Coordinate(comm::Axis::kTp, rank); }
  int replica(int rank) const { return mesh_.Coordinate(comm::Axis::kDp, rank); }
  int64_t boundaries() const { return 1 + 2 * config_.model.layers; }

  absl::StatusOr<const Shown*> Find(TapKind kind, const std::string& name) const {
    const auto it = shown_.find(Key(kind, name));
    if (it != shown_.end()) return &it->second;
    return absl::FailedPreconditionError(absl::StrCat("dense judge: the run did not show ", TapText(kind, name)));
  }

  absl::Status PackTensor(TapKind kind, const std::string& name, bool in_full, Packer* packer) const {
    EK_ASSIGN_OR_RETURN(const Shown* shown, Find(kind, name));
    packer->Put(shown->digest());
    if (in_full) packer->Put(shown->bytes.data(), shown->bytes.size());
    return absl::OkStatus();
  }

  // This rank's message: digests of everything, and in full what no lower rank sends.
  absl::StatusOr<std::vector<uint8_t>> Pack(const StepReport& report, bool whole_step) const {
    Packer packer;
    const int rank = world_.rank();
    for (size_t p = 0; p < owners_.size(); ++p) {
      const std::string& name = specs_[rank][p].name;
      const bool owner = owners_[p][rank] == rank;
      EK_RETURN_IF_ERROR(PackTensor(TapKind::kParameter, name, owner, &packer));
      if (whole_step) EK_RETURN_IF_ERROR(PackTensor(TapKind::kGradient, name, owner, &packer));
    }
    if (!whole_step) return std::move(packer.bytes());
    for (const std::string& name : model_.BoundaryNames()) {
      EK_RETURN_IF_ERROR(PackTensor(TapKind::kActivation, name, lane(rank) == 0, &packer));
      EK_RETURN_IF_ERROR(PackTensor(TapKind::kActivationGradient, name, lane(rank) == 0, &packer));
    }
    packer.Put(report.pass.loss);
    packer.Put(report.loss);
    packer.Put(report.update.gradient_norm);
    packer.Put(report.update.clip_scale);
    packer.Put<uint8_t>(report.update.stepped ? 1 : 0);
    for (const moe::RoutingDecision& decision : report.pass.routing) {
      packer.Put(decision.expert.data(), decision.expert.size() * sizeof(int32_t));
      packer.Put(decision.slot.data(), decision.slot.size() * sizeof(int32_t));
    }
    return std::move(packer.bytes());
  }

  absl::Status GatherOnRankZero(const std::vector<uint8_t>& mine, std::vector<uint8_t>* all,
                                std::vector<int64_t>* sizes) {
    const int n = world_.size();
    const bool root = world_.rank() == 0;
    const int64_t size = static_cast<int64_t>(mine.size());
    sizes->assign(n, 0);
    EK_RETURN_IF_ERROR(world_.AllGather(ConstTensorView(&size, DType::kI64, {1}),
                                        TensorView(sizes->data(), DType::kI64, {n}), *stream_));
    EK_RETURN_IF_ERROR(stream_->Synchronize());
    std::vector<int64_t> send(n, 0), receive(n, 0);
    send[0] = size;
    int64_t total = 0;
    for (int r = 0; root && r < n; ++r) total += receive[r] = (*sizes)[r];
    all->resize(total);
    EK_RETURN_IF_ERROR(world_.AllToAllV(ConstTensorView(mine.data(), DType::kU8, {size}), send,
                                        TensorView(all->data(), DType::kU8, {total}), receive, *stream_));
    return stream_->Synchronize();
  }

  // Rank 0 from here on.

  void Differ(int64_t place, FirstDifference difference) {
    finding_.max_abs_diff = std::max(finding_.max_abs_diff, std::abs(difference.candidate - difference.reference));
    finding_.Add(place, std::move(difference));
  }

  // A replica's digest differs from its owner's.
  void JudgeReplica(int64_t place, TapKind kind, const std::string& name, int64_t step, int rank, int owner) {
    FirstDifference difference;
    difference.step = step;
    difference.tensor = absl::StrCat(TapText(kind, name), " (another value than on rank ", owner, ")");
    difference.rank = rank;
    difference.index = -1;
    Differ(place, std::move(difference));
  }

  // Copies rank's slice into its place of the whole.
  static void Place(const zero3::ParameterSpec& spec, const std::vector<double>& slice, Matrix* whole) {
    const int64_t columns = spec.shape.rank() == 0 ? 1 : spec.shape.dim(spec.shape.rank() - 1);
    for (int64_t i = 0; i < static_cast<int64_t>(slice.size()); i += columns) {
      std::copy_n(slice.begin() + i, columns, whole->value.begin() + zero3::GlobalIndex(spec, i));
    }
  }

  // One parameter or gradient of one rank.
  void UnpackSlice(int64_t place, TapKind kind, size_t p, int rank, int64_t step, std::vector<uint64_t>* digests,
                   Unpacker* from, ReferenceTensors* whole) {
    const zero3::ParameterSpec& spec = specs_[rank][p];
    const int owner = owners_[p][rank];
    (*digests)[rank] = from->Take<uint64_t>();
    if (owner != rank) {
      if ((*digests)[rank] != (*digests)[owner]) JudgeReplica(place, kind, spec.name, step, rank, owner);
      return;
    }
    const DType dtype = kind == TapKind::kGradient ? WideDType(spec.dtype) : spec.dtype;
    Place(spec, from->TakeElements(dtype, spec.num_elements()), &whole->at(spec.name));
  }

  // Fills `values` on lane 0; other lanes must have sent the same digest.
  void UnpackActivation(int64_t place, TapKind kind, const std::string& name, int rank, int64_t step, uint64_t* lane0,
                        Unpacker* from, std::vector<double>* values) {
    const uint64_t digest = from->Take<uint64_t>();
    if (lane(rank) != 0) {
      if (digest != *lane0) JudgeReplica(place, kind, name, step, rank, rank - lane(rank));
      return;
    }
    *lane0 = digest;
    *values = from->TakeElements(config_.model.dtype, config_.model.tokens() * config_.model.hidden);
  }

  int64_t ForwardPlace(size_t boundary) const { return kForwardPlace + 10 * static_cast<int64_t>(boundary); }
  int64_t BackwardPlace(size_t boundary) const {
    return kBackwardPlace + 10 * (boundaries() - static_cast<int64_t>(boundary));
  }

  // A number that every rank must have alike; rank 0's is kept.
  void UnpackShared(int64_t place, const char* what, int rank, int64_t step, Unpacker* from, double* kept) {
    const double value = from->Take<double>();
    if (rank == 0) *kept = value;
    if (std::memcmp(kept, &value, sizeof(value)) == 0) return;
    FirstDifference difference;
    difference.step = step;
    difference.tensor = absl::StrCat(what, " (another value than on rank 0)");
    difference.rank = rank;
    difference.reference = *kept;
    difference.candidate = value;
    difference.ulps = UlpsBetween(DType::kF64, *kept, value);
    Differ(place, std::move(difference));
  }

  void UnpackReport(int rank, int64_t step, Unpacker* from, Collected* collected) {
    const double loss = from->Take<double>();
    UnpackShared(kLossPlace + 2, "mean loss", rank, step, from, &collected->mean_loss);
    UnpackShared(kNormPlace, "gradient norm", rank, step, from, &collected->gradient_norm);
    UnpackShared(kNormPlace + 1, "clip scale", rank, step, from, &collected->clip_scale);
    collected->stepped = from->Take<uint8_t>() != 0;
    const int64_t routes = config_.model.tokens() * config_.model.top_k;
    for (int64_t layer = 0; layer < config_.model.layers; ++layer) {
      std::vector<int32_t> expert(routes), slot(routes);
      std::memcpy(expert.data(), from->Take(routes * sizeof(int32_t)), routes * sizeof(int32_t));
      std::memcpy(slot.data(), from->Take(routes * sizeof(int32_t)), routes * sizeof(int32_t));
      if (lane(rank) != 0) continue;
      ReferenceRoutes used;
      used.expert.assign(expert.begin(), expert.end());
      for (int32_t place : slot) used.kept.push_back(place >= 0 ? 1 : 0);
      collected->routes[replica(rank)].push_back(std::move(used));
    }
    if (lane(rank) == 0) collected->losses[replica(rank)] = loss;
  }

  Collected Unpack(const std::vector<uint8_t>& all, const std::vector<int64_t>& sizes, bool whole_step, int64_t step) {
    Collected collected;
    collected.parameters = model_.ZeroTensors();
    if (whole_step) collected.gradients = model_.ZeroTensors();
    const int replicas = mesh_.shape().dp;
    collected.losses.resize(replicas);
    collected.routes.resize(replicas);
    collected.activations.assign(replicas, std::vector<std::vector<double>>(boundaries()));
    collected.activation_gradients = collected.activations;
    const std::vector<std::string> names = model_.BoundaryNames();
    std::vector<std::vector<uint64_t>> parameter_digests(owners_.size(), std::vector<uint64_t>(world_.size()));
    std::vector<std::vector<uint64_t>> gradient_digests = parameter_digests;
    std::vector<uint64_t> lane0(2 * names.size());
    const uint8_t* start = all.data();
    for (int rank = 0; rank < world_.size(); ++rank) {
      Unpacker from(start);
      start += sizes[rank];
      for (size_t p = 0; p < owners_.size(); ++p) {
        UnpackSlice(whole_step ? kReplicaPlace : kParameterPlace, TapKind::kParameter, p, rank, step,
                    &parameter_digests[p], &from, &collected.parameters);
        if (!whole_step) continue;
        UnpackSlice(kGradientPlace, TapKind::kGradient, p, rank, step, &gradient_digests[p], &from,
                    &collected.gradients);
      }
      if (!whole_step) continue;
      for (size_t b = 0; b < names.size(); ++b) {
        UnpackActivation(ForwardPlace(b) + 1, TapKind::kActivation, names[b], rank, step, &lane0[2 * b], &from,
                         &collected.activations[replica(rank)][b]);
        UnpackActivation(BackwardPlace(b) + 1, TapKind::kActivationGradient, names[b], rank, step, &lane0[2 * b + 1],
                         &from, &collected.activation_gradients[replica(rank)][b]);
      }
      UnpackReport(rank, step, &from, &collected);
    }
    return collected;
  }

  // One value against its bound; a NaN is beyond every bound.
  void JudgeValue(int64_t place, int64_t step, const std::string& tensor, int rank, int64_t index, double wanted,
                  double got, double bound) {
    ++finding_.values_compared;
    const double difference = std::abs(got - wanted);
    if (difference <= bound) {
      if (difference == 0) return;
      finding_.max_abs_diff = std::max(finding_.max_abs_diff, difference);
      if (difference > finding_.bound_used * bound) {
        finding_.bound_used = difference / bound;
        finding_.worst = tensor;
      }
      return;
    }
    finding_.bound_used = std::max(finding_.bound_used, bound > 0 ? difference / bound : kBeyond);
    finding_.worst = tensor;
    FirstDifference first;
    first.step = step;
    first.tensor = tensor;
    first.rank = rank;
    first.index = index;
    first.reference = wanted;
    first.candidate = got;
    first.ulps = UlpsBetween(config_.model.dtype, wanted, got);
    first.bound = bound;
    Differ(place, std::move(first));
  }

  void JudgeMatrix(int64_t place, int64_t step, const std::string& tensor, int rank, const Matrix& wanted,
                   const std::vector<double>& got) {
    for (size_t i = 0; i < got.size(); ++i) {
      JudgeValue(place, step, tensor, rank, static_cast<int64_t>(i), wanted.value[i], got[i],
                 Bound(wanted, static_cast<int64_t>(i), unit_) + kSmallest);
    }
  }

  std::vector<ReferenceBatch> Batches(int64_t step) const {
    std::vector<ReferenceBatch> batches;
    for (int r = 0; r < mesh_.shape().dp; ++r) {
      CorpusBatch batch = corpus_.Batch({.seed = config_.seed, .step = step, .replica = r}, config_.model.sequences,
                                        config_.model.sequence);
      batches.push_back({std::move(batch.inputs), std::move(batch.targets)});
    }
    return batches;
  }

  absl::Status JudgeStep(int64_t step, Collected collected) {
    ReferenceRunOptions options = roundings_;
    options.replay = collected.routes;
    EK_ASSIGN_OR_RETURN(ReferenceStep wanted, model_.Run(collected.parameters, Batches(step), options));
    losses_.push_back(wanted.loss);
    const std::vector<std::string> names = model_.BoundaryNames();
    for (int r = 0; r < mesh_.shape().dp; ++r) {
      const int rank = r * mesh_.shape().tp;
      const ReferenceReplica& replica = wanted.replicas[r];
      for (int64_t layer = 0; layer < config_.model.layers; ++layer) {
        JudgeRouting(step, layer, rank, replica.routing[layer]);
      }
      for (size_t b = 0; b < names.size(); ++b) {
        JudgeMatrix(ForwardPlace(b), step, TapText(TapKind::kActivation, names[b]), rank, replica.activations[b],
                    collected.activations[r][b]);
        JudgeMatrix(BackwardPlace(b), step, TapText(TapKind::kActivationGradient, names[b]), rank,
                    replica.activation_gradients[b], collected.activation_gradients[r][b]);
      }
      const double slack = LossBound(replica.loss_variance, replica.loss);
      JudgeValue(kLossPlace, step, "loss", rank, 0, replica.loss, collected.losses[r], slack);
    }
    JudgeValue(kLossPlace + 1, step, "mean loss", 0, 0, wanted.loss, collected.mean_loss,
               LossBound(wanted.loss_variance, wanted.loss));
    JudgeGradients(step, wanted, collected);
    before_ = {std::move(collected.parameters), std::move(wanted.gradients), collected.clip_scale};
    return absl::OkStatus();
  }

  // The last additions of a loss are a handful of roundings of its size, in f32 for the auxiliary losses.
  double LossBound(double variance, double loss) const {
    return reference::kBoundDeviations * unit_ * std::sqrt(variance) +
           8 * unit_ * roundings_.router.arithmetic * std::abs(loss);
  }

  void JudgeGradients(int64_t step, const ReferenceStep& wanted, const Collected& collected) {
    double variance = 0;
    int64_t at = 0;
    for (const auto& [name, gradient] : wanted.gradients) {
      JudgeMatrix(kGradientPlace + at++, step, TapText(TapKind::kGradient, name), 0, gradient,
                  collected.gradients.at(name).value);
      for (size_t i = 0; i < gradient.variance.size(); ++i) {
        variance += gradient.value[i] * gradient.value[i] * gradient.variance[i];
      }
    }
    if (!collected.stepped) {
      FirstDifference skipped;
      skipped.step = step;
      skipped.tensor = "update (skipped: a gradient is not finite)";
      skipped.index = -1;
      Differ(kNormPlace, std::move(skipped));
      return;
    }
    const double norm = ReferenceGlobalNorm(wanted.gradients);
    const double slack = norm > 0 ? reference::kBoundDeviations * unit_ * std::sqrt(variance) / norm : 0;
    JudgeValue(kNormPlace, step, "gradient norm", 0, 0, norm, collected.gradient_norm, slack + 16 * unit_ * norm);
  }

  // With plain SGD, what the update must have made of the parameters before it.
  void JudgeParameters(int64_t step, const ReferenceTensors& after) {
    const zero3::OptimizerOptions& optimizer = config_.zero3.optimizer;
    if (optimizer.kind != zero3::OptimizerOptions::Kind::kSgd || optimizer.momentum != 0) return;
    int64_t at = 0;
    for (const auto& [name, parameter] : after) {
      const Matrix& before = before_.parameters.at(name);
      const Matrix& gradient = before_.gradients.at(name);
      const std::string tensor = TapText(TapKind::kParameter, name);
      const double rate = optimizer.learning_rate * before_.clip_scale;
      for (size_t i = 0; i < parameter.value.size(); ++i) {
        const double p = before.value[i];
        const double move = rate * gradient.value[i] + optimizer.learning_rate * optimizer.weight_decay * p;
        // bf16 parameters follow an f32 master that is within one rounding of what was seen.
        const double bound = rate * Bound(gradient, static_cast<int64_t>(i), unit_) + 4 * store_unit_ * std::abs(p) +
                             4 * store_unit_ * std::abs(move) + kSmallest;
        JudgeValue(kParameterPlace + at, step, tensor, 0, static_cast<int64_t>(i), p - move, parameter.value[i], bound);
      }
      ++at;
    }
  }

  // How far apart two scores of a token must be to be told apart.
  double Margin(const Matrix& scores, int64_t token, int64_t a, int64_t other_token, int64_t b) const {
    return reference::kBoundDeviations * unit_ *
           (std::sqrt(scores.var(token, a)) + std::sqrt(scores.var(other_token, b)));
  }

  void DifferInRoute(int64_t step, int64_t layer, int rank, int64_t route, double wanted, double got, double margin) {
    FirstDifference difference;
    difference.step = step;
    difference.tensor = absl::StrCat("routing layer.", layer, ".moe");
    difference.rank = rank;
    difference.index = route;
    difference.reference = wanted;
    difference.candidate = got;
    difference.bound = margin;
    Differ(kForwardPlace + 10 * (2 * layer + 1) + 5, std::move(difference));
  }

  void JudgeRouting(int64_t step, int64_t layer, int rank, const ReferenceRouting& routing) {
    const ReferenceRouterConfig& router = model_.config().router;
    const Matrix& scores = routing.probabilities;
    const int64_t k = router.top_k;
    const std::vector<int64_t>& expert = routing.used.expert;
    for (int64_t t = 0; t < scores.rows; ++t) {
      for (int64_t j = 0; j < k; ++j) {
        ++finding_.values_compared;
        const int64_t route = t * k + j;
        const int64_t wanted = routing.chosen.expert[route], got = expert[route];
        if (wanted == got) continue;
        ++finding_.routing_differences;
        const double margin = Margin(scores, t, wanted, t, got);
        if (std::abs(scores.at(t, wanted) - scores.at(t, got)) > margin) {
          DifferInRoute(step, layer, rank, route, static_cast<double>(wanted), static_cast<double>(got), margin);
        }
      }
    }
    const std::vector<uint8_t> kept = KeptRoutes(router, scores, expert, routing.capacity);
    if (router.capacity_numerator == 0 || kept == routing.used.kept) return;
    JudgeDrops(step, layer, rank, routing, kept);
  }

  // Dropping by score may differ between close scores; by position it may not.
  void JudgeDrops(int64_t step, int64_t layer, int rank, const ReferenceRouting& routing,
                  const std::vector<uint8_t>& wanted) {
    const ReferenceRouterConfig& router = model_.config().router;
    const int64_t k = router.top_k;
    const bool by_score =
        router.drop == ReferenceDrop::kProbabilities || (router.drop == ReferenceDrop::kByTopK && k > 2);
    const std::vector<int64_t>& expert = routing.used.expert;
    const Matrix& scores = routing.probabilities;
    for (size_t a = 0; a < expert.size(); ++a) {
      if (wanted[a] == routing.used.kept[a]) continue;
      ++finding_.routing_differences;
      bool close = false;
      for (size_t b = 0; by_score && b < expert.size(); ++b) {
        if (expert[b] != expert[a] || wanted[b] == wanted[a] || wanted[b] == routing.used.kept[b]) continue;
        const int64_t ta = static_cast<int64_t>(a) / k, tb = static_cast<int64_t>(b) / k, e = expert[a];
        close |= std::abs(scores.at(ta, e) - scores.at(tb, e)) <= Margin(scores, ta, e, tb, e);
      }
      if (!close) DifferInRoute(step, layer, rank, static_cast<int64_t>(a), wanted[a], routing.used.kept[a], 0);
    }
  }

  // Below this, f32 has no full precision any more.
  static constexpr double kSmallest = 1.2e-38;
  static constexpr double kBeyond = 1e300;

  struct Before {
    ReferenceTensors parameters;
    ReferenceTensors gradients;
    double clip_scale = 1;
  };

  const TrainingConfig config_;
  const comm::Mesh mesh_;
  const ReferenceModel model_;
  const Corpus& corpus_;
  comm::Communicator& world_;
  const ReferenceRunOptions roundings_;
  const double unit_;
  const double store_unit_;
  const std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::vector<zero3::ParameterSpec>> specs_;  // [rank][parameter]
  std::vector<std::vector<int>> owners_;                  // [parameter][rank]: lowest rank with the same slice
  std::map<Key, Shown> shown_;
  Before before_;
  std::vector<double> losses_;
  Finding finding_;
};

}  // namespace

double UnitRoundoff(DType dtype) { return dtype == DType::kF64 ? std::ldexp(1.0, -53) : std::ldexp(1.0, -24); }

ReferenceRunOptions RoundingsOf(DType dtype, int lanes) {
  ReferenceRunOptions options;
  options.partials = lanes;
  options.dense.track = options.router.track = true;
  if (dtype == DType::kBF16) options.dense.store = std::ldexp(1.0, 24 - 8);
  if (dtype == DType::kF64) options.router.arithmetic = options.router.store = std::ldexp(1.0, 53 - 24);
  return options;
}

absl::StatusOr<std::unique_ptr<DenseJudge>> DenseJudge::Create(const TrainingConfig& config, const Corpus* corpus,
                                                               comm::Communicator* world) {
  EK_RETURN_IF_ERROR(ValidateTrainingConfig(config));
  EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(MeshForOrder(config.mesh, config.order)));
  EK_ASSIGN_OR_RETURN(ReferenceModel model, ReferenceModel::Create(ReferenceConfigOf(config.model, mesh.shape())));
  auto judge = std::make_unique<Judging>(config, mesh, std::move(model), corpus, world);
  EK_RETURN_IF_ERROR(judge->Prepare());
  return std::unique_ptr<DenseJudge>(std::move(judge));
}

}  // namespace evenkeel::testutil

#include "evenkeel/testing/dense_judge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/testing/bitwise_judge.h"
#include "evenkeel/testing/dense_verdict.h"
#include "evenkeel/testing/gather_bytes.h"
#include "evenkeel/testing/tensor_difference.h"

namespace evenkeel::testutil {
namespace {

using reference::Matrix;

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

class Judging final : public DenseJudge {
 public:
  Judging(const TrainingConfig& config, const comm::Mesh& mesh, ReferenceModel model, const Corpus* corpus,
          comm::Communicator* world)
      : config_(config),
        mesh_(mesh),
        verdict_(config, mesh.shape(), std::move(model), corpus),
        world_(*world),
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
    Shown& shown = shown_[{tap.kind, std::string(tap.name), tap.batch}];
    shown.dtype = tap.value.dtype();
    shown.bytes.assign(bytes, bytes + tap.value.num_bytes());
  }

  absl::Status Judge(int64_t step, const StepReport& report) override {
    EK_ASSIGN_OR_RETURN(const std::vector<uint8_t> mine, Pack(report, /*whole_step=*/true));
    EK_ASSIGN_OR_RETURN(const GatheredBytes all, GatherBytes(mine, world_, *stream_));
    shown_.clear();
    if (world_.rank() != 0) return absl::OkStatus();
    Collected collected = Unpack(all, /*whole_step=*/true, step);
    if (step > 0) verdict_.JudgeParameters(step - 1, collected.parameters);
    return verdict_.JudgeStep(step, std::move(collected));
  }

  absl::Status Finish() override {
    EK_ASSIGN_OR_RETURN(const std::vector<uint8_t> mine, Pack({}, /*whole_step=*/false));
    EK_ASSIGN_OR_RETURN(const GatheredBytes all, GatherBytes(mine, world_, *stream_));
    shown_.clear();
    if (world_.rank() != 0 || losses().empty()) return absl::OkStatus();
    const int64_t last = static_cast<int64_t>(losses().size()) - 1;
    const Collected collected = Unpack(all, /*whole_step=*/false, last);
    verdict_.JudgeParameters(last, collected.parameters);
    return absl::OkStatus();
  }

  const Finding& finding() const override { return verdict_.finding(); }
  const std::vector<double>& losses() const override { return verdict_.losses(); }
  const ReferenceTensors& parameters() const override { return verdict_.parameters(); }

 private:
  using Key = std::tuple<TapKind, std::string, int64_t>;  // with the batch

  int lane(int rank) const { return mesh_.Coordinate(comm::Axis::kTp, rank); }
  int replica(int rank) const { return mesh_.Coordinate(comm::Axis::kDp, rank); }
  // The number of a rank's batch in that pass.
  int64_t BatchOf(int rank, int64_t pass) const { return pass * mesh_.shape().dp + replica(rank); }

  absl::StatusOr<const Shown*> Find(TapKind kind, const std::string& name, int64_t batch) const {
    const auto it = shown_.find(Key(kind, name, batch));
    if (it != shown_.end()) return &it->second;
    return absl::FailedPreconditionError(absl::StrCat("dense judge: the run did not show ", TapText(kind, name)));
  }

  absl::Status PackTensor(TapKind kind, const std::string& name, int64_t batch, bool in_full, Packer* packer) const {
    EK_ASSIGN_OR_RETURN(const Shown* shown, Find(kind, name, batch));
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
      EK_RETURN_IF_ERROR(PackTensor(TapKind::kParameter, name, 0, owner, &packer));
      if (whole_step) EK_RETURN_IF_ERROR(PackTensor(TapKind::kGradient, name, 0, owner, &packer));
    }
    if (!whole_step) return std::move(packer.bytes());
    for (int64_t pass = 0; pass < config_.passes(); ++pass) {
      EK_RETURN_IF_ERROR(PackPass(report.passes[pass], BatchOf(rank, pass), lane(rank) == 0, &packer));
    }
    packer.Put(report.loss);
    packer.Put(report.update.gradient_norm);
    packer.Put(report.update.clip_scale);
    packer.Put(report.update.loss_scale);
    packer.Put<uint8_t>(report.update.stepped ? 1 : 0);
    return std::move(packer.bytes());
  }

  absl::Status PackPass(const ModelPass& pass, int64_t batch, bool in_full, Packer* packer) const {
    for (const std::string& name : verdict_.model().BoundaryNames()) {
      EK_RETURN_IF_ERROR(PackTensor(TapKind::kActivation, name, batch, in_full, packer));
      EK_RETURN_IF_ERROR(PackTensor(TapKind::kActivationGradient, name, batch, in_full, packer));
    }
    packer->Put(pass.loss);
    for (const moe::RoutingDecision& decision : pass.routing) {
      packer->Put(decision.expert.data(), decision.expert.size() * sizeof(int32_t));
      packer->Put(decision.slot.data(), decision.slot.size() * sizeof(int32_t));
    }
    return absl::OkStatus();
  }

  // Rank 0 from here on.

  // A replica's digest differs from its owner's.
  void JudgeReplica(int64_t place, TapKind kind, const std::string& name, int64_t step, int rank, int owner) {
    FirstDifference difference;
    difference.step = step;
    difference.tensor = absl::StrCat(TapText(kind, name), " (another value than on rank ", owner, ")");
    difference.rank = rank;
    difference.index = -1;
    verdict_.Differ(place, std::move(difference));
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
    verdict_.Differ(place, std::move(difference));
  }

  void UnpackReport(int rank, int64_t step, Unpacker* from, Collected* collected) {
    UnpackShared(kLossPlace + 2, "mean loss", rank, step, from, &collected->mean_loss);
    UnpackShared(kNormPlace, "gradient norm", rank, step, from, &collected->gradient_norm);
    UnpackShared(kNormPlace + 1, "clip scale", rank, step, from, &collected->clip_scale);
    UnpackShared(kNormPlace + 2, "loss scale", rank, step, from, &collected->loss_scale);
    collected->stepped = from->Take<uint8_t>() != 0;
  }

  void UnpackPass(int rank, int64_t pass, int64_t step, std::vector<uint64_t>* lane0, Unpacker* from,
                  Collected* collected) {
    const int64_t batch = BatchOf(rank, pass);
    const std::vector<std::string> names = verdict_.model().BoundaryNames();
    for (size_t b = 0; b < names.size(); ++b) {
      UnpackActivation(verdict_.ForwardPlace(b) + 1, TapKind::kActivation, names[b], rank, step, &(*lane0)[2 * b], from,
                       &collected->activations[batch][b]);
      UnpackActivation(verdict_.BackwardPlace(b) + 1, TapKind::kActivationGradient, names[b], rank, step,
                       &(*lane0)[2 * b + 1], from, &collected->activation_gradients[batch][b]);
    }
    const double loss = from->Take<double>();
    if (lane(rank) == 0) collected->losses[batch] = loss;
    const int64_t routes = config_.model.tokens() * config_.model.top_k;
    for (int64_t layer = 0; layer < config_.model.layers; ++layer) {
      std::vector<int32_t> expert(routes), slot(routes);
      std::memcpy(expert.data(), from->Take(routes * sizeof(int32_t)), routes * sizeof(int32_t));
      std::memcpy(slot.data(), from->Take(routes * sizeof(int32_t)), routes * sizeof(int32_t));
      if (lane(rank) != 0) continue;
      ReferenceRoutes used;
      used.expert.assign(expert.begin(), expert.end());
      for (int32_t place : slot) used.kept.push_back(place >= 0 ? 1 : 0);
      collected->routes[batch].push_back(std::move(used));
    }
  }

  Collected Unpack(const GatheredBytes& all, bool whole_step, int64_t step) {
    Collected collected;
    collected.parameters = verdict_.model().ZeroTensors();
    if (whole_step) collected.gradients = verdict_.model().ZeroTensors();
    const int64_t batches = config_.num_batches();
    collected.losses.resize(batches);
    collected.routes.resize(batches);
    collected.activations.assign(batches, std::vector<std::vector<double>>(verdict_.boundaries()));
    collected.activation_gradients = collected.activations;
    std::vector<std::vector<uint64_t>> parameter_digests(owners_.size(), std::vector<uint64_t>(world_.size()));
    std::vector<std::vector<uint64_t>> gradient_digests = parameter_digests;
    std::vector<std::vector<uint64_t>> lane0(config_.passes(), std::vector<uint64_t>(2 * verdict_.boundaries()));
    const uint8_t* start = all.bytes.data();
    for (int rank = 0; rank < world_.size(); ++rank) {
      Unpacker from(start);
      start += all.sizes[rank];
      for (size_t p = 0; p < owners_.size(); ++p) {
        UnpackSlice(whole_step ? kReplicaPlace : kParameterPlace, TapKind::kParameter, p, rank, step,
                    &parameter_digests[p], &from, &collected.parameters);
        if (!whole_step) continue;
        UnpackSlice(kGradientPlace, TapKind::kGradient, p, rank, step, &gradient_digests[p], &from,
                    &collected.gradients);
      }
      if (!whole_step) continue;
      for (int64_t pass = 0; pass < config_.passes(); ++pass) {
        UnpackPass(rank, pass, step, &lane0[pass], &from, &collected);
      }
      UnpackReport(rank, step, &from, &collected);
    }
    return collected;
  }

  const TrainingConfig config_;
  const comm::Mesh mesh_;
  DenseVerdict verdict_;
  comm::Communicator& world_;
  const std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::vector<zero3::ParameterSpec>> specs_;  // [rank][parameter]
  std::vector<std::vector<int>> owners_;                  // [parameter][rank]: lowest rank with the same slice
  std::map<Key, Shown> shown_;
};

}  // namespace

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

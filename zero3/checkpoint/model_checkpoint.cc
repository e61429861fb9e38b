#include "evenkeel/zero3/checkpoint/model_checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/parameter_spec.h"

namespace evenkeel::zero3 {
namespace {

constexpr char kWeight[] = "weight";
constexpr char kSkippedTotal[] = "zero3.skipped_total";
constexpr char kSkippedInARow[] = "zero3.skipped_in_a_row";
constexpr char kLossScale[] = "zero3.loss_scale";
constexpr char kGoodSteps[] = "zero3.loss_scale_good_steps";
constexpr char kMayLackLossScale[] = "loss_scale";

bool ScalesLoss(const PartitionedModel& model) {
  return absl::c_any_of(model.parameters(),
                        [](const ParameterSpec& spec) { return spec.trainable && spec.dtype == DType::kF16; });
}

// The number under `key`; `value` as it is where there is none.
template <typename T>
absl::Status ReadNumber(const std::map<std::string, std::string>& metadata, const char* key, T* value) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return absl::OkStatus();
  bool parsed = false;
  if constexpr (std::is_same_v<T, double>) {
    int exponent = 0;
    parsed = absl::SimpleAtod(found->second, value) && std::isfinite(*value) && std::frexp(*value, &exponent) == 0.5;
  } else {
    parsed = absl::SimpleAtoi(found->second, value) && *value >= 0;
  }
  if (parsed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("metadata ", key, ": '", found->second, "' is no such number"));
}

absl::Status ReadProgress(const CheckpointReader& reader, const LoadOptions& options, const PartitionedModel& model,
                          StepProgress* progress) {
  const std::map<std::string, std::string> metadata = reader.metadata();
  *progress = model.progress();
  progress->step = reader.step();
  progress->skipped_total = 0;
  progress->skipped_in_a_row = 0;
  EK_RETURN_IF_ERROR(ReadNumber(metadata, kSkippedTotal, &progress->skipped_total));
  EK_RETURN_IF_ERROR(ReadNumber(metadata, kSkippedInARow, &progress->skipped_in_a_row));
  if (!ScalesLoss(model)) return absl::OkStatus();
  if (metadata.count(kLossScale) == 0 && !absl::c_linear_search(options.may_be_missing, kMayLackLossScale)) {
    return absl::FailedPreconditionError(absl::StrCat(reader.folder(), " has no loss scale (", kLossScale,
                                                      "), which a model with f16 parameters continues from"));
  }
  EK_RETURN_IF_ERROR(ReadNumber(metadata, kLossScale, &progress->loss_scale));
  return ReadNumber(metadata, kGoodSteps, &progress->good_steps);
}

CheckpointPiece ToCheckpointPiece(const ParameterSpec& spec, const StateTensor& tensor,
                                  const StateTensor::Fragment& fragment) {
  CheckpointPiece piece;
  piece.parameter.name = spec.name;
  piece.parameter.global_shape = spec.global_shape;
  piece.parameter.expert_dim = spec.expert_dim;
  piece.parameter.tp_dim = spec.tp_dim;
  piece.state = tensor.kind == TensorKind::kState ? tensor.state : kWeight;
  piece.dtype = fragment.data.dtype();
  piece.piece.offset = spec.global_offset;
  piece.piece.shape.assign(spec.shape.dims().begin(), spec.shape.dims().end());
  if (spec.global_shape.empty()) {
    piece.parameter.global_shape = piece.piece.shape;
    piece.piece.offset.assign(piece.piece.shape.size(), 0);
  }
  piece.piece.begin = fragment.begin;
  piece.piece.end = fragment.begin + fragment.data.num_elements();
  piece.data = fragment.data.raw();
  return piece;
}

// Fills this rank's fragments.
absl::Status ReadOwn(const CheckpointReader& reader, const LoadOptions& options, PartitionedModel* model) {
  std::set<std::pair<std::string, std::string>> known;
  for (const StateTensor& tensor : model->StateTensors()) {
    const ParameterSpec& spec = model->parameters()[tensor.parameter];
    known.insert({spec.name, tensor.kind == TensorKind::kState ? tensor.state : kWeight});
    for (const StateTensor::Fragment& fragment : tensor.fragments) {
      const absl::Status read = reader.Read(ToCheckpointPiece(spec, tensor, fragment));
      if (absl::IsNotFound(read) && absl::c_linear_search(options.may_be_missing, tensor.state)) continue;
      EK_RETURN_IF_ERROR(read);
    }
  }
  for (const CheckpointReader::StoredTensor& stored : reader.Tensors()) {
    if (options.ignore_unknown || known.count({stored.parameter->name(), stored.state}) != 0) continue;
    return absl::FailedPreconditionError(absl::StrCat(reader.folder(), " has ", stored.state, " of ",
                                                      stored.parameter->name(), ", which the model does not have"));
  }
  return absl::OkStatus();
}

// OK when `mine` is OK on all ranks; the first failing rank's code otherwise.
absl::Status Agree(const absl::Status& mine, comm::Communicator* world, Stream& stream) {
  if (world == nullptr || world->size() == 1) return mine;
  int32_t code = static_cast<int32_t>(mine.code());
  std::vector<int32_t> codes(static_cast<size_t>(world->size()));
  EK_RETURN_IF_ERROR(world->AllGather(ConstTensorView(&code, DType::kI32, {1}),
                                      TensorView(codes.data(), DType::kI32, {world->size()}), stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  if (!mine.ok()) return mine;
  for (int rank = 0; rank < world->size(); ++rank) {
    if (codes[rank] == 0) continue;
    ErrorContext context{.module = "zero3", .operation = "load", .rank = world->rank(), .size = world->size()};
    context.findings.push_back({rank, "could not load its part"});
    return MakeError(static_cast<absl::StatusCode>(codes[rank]), context, "the checkpoint was not loaded");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<CheckpointPiece> ModelPieces(PartitionedModel& model, int tp_lane) {
  std::vector<CheckpointPiece> pieces;
  for (const StateTensor& tensor : model.StateTensors()) {
    const ParameterSpec& spec = model.parameters()[tensor.parameter];
    if (!tensor.owned || (spec.tp_replicated && tp_lane != 0)) continue;
    for (const StateTensor::Fragment& fragment : tensor.fragments) {
      pieces.push_back(ToCheckpointPiece(spec, tensor, fragment));
    }
  }
  return pieces;
}

std::map<std::string, std::string> ModelMetadata(const PartitionedModel& model) {
  const StepProgress progress = model.progress();
  return {{kSkippedTotal, absl::StrCat(progress.skipped_total)},
          {kSkippedInARow, absl::StrCat(progress.skipped_in_a_row)},
          {kLossScale, absl::StrFormat("%.17g", progress.loss_scale)},
          {kGoodSteps, absl::StrCat(progress.good_steps)}};
}

absl::Status LoadModel(const CheckpointReader& reader, const LoadOptions& options, comm::Communicator* world,
                       Stream& stream, PartitionedModel* model) {
  StepProgress progress;
  absl::Status mine = ReadProgress(reader, options, *model, &progress);
  if (mine.ok()) mine = ReadOwn(reader, options, model);
  if (mine.ok()) mine = model->StateLoaded(progress);
  return Agree(mine, world, stream);
}

}  // namespace evenkeel::zero3

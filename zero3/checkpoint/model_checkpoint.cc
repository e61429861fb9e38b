#include "evenkeel/zero3/checkpoint/model_checkpoint.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/parameter_spec.h"

namespace evenkeel::zero3 {
namespace {

constexpr char kWeight[] = "weight";

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

absl::Status LoadModel(const CheckpointReader& reader, const LoadOptions& options, comm::Communicator* world,
                       Stream& stream, PartitionedModel* model) {
  absl::Status mine = ReadOwn(reader, options, model);
  if (mine.ok()) mine = model->StateLoaded(reader.step());
  return Agree(mine, world, stream);
}

}  // namespace evenkeel::zero3

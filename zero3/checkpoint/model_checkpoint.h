// A partitioned model's state as checkpoint pieces, and back, at any layout.
//
//   std::map<std::string, std::string> metadata = ModelMetadata(*model);
//   metadata["data_position"] = ...
//   EK_RETURN_IF_ERROR(writer->Start(model->step(), metadata, ModelPieces(*model, tp_lane)));
//   ...
//   EK_ASSIGN_OR_RETURN(FoundCheckpoint found, FindLatestCheckpoint(fs, root));
//   EK_RETURN_IF_ERROR(LoadModel(*found.reader, {}, world, *stream, model.get()));   // another W, E or T is fine
#ifndef EVENKEEL_ZERO3_CHECKPOINT_MODEL_CHECKPOINT_H_
#define EVENKEEL_ZERO3_CHECKPOINT_MODEL_CHECKPOINT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/shard_file.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::zero3 {

// This rank's part of every weight (the f32 master where there is one) and optimizer state. What all lanes of a TP
// group hold equally is lane 0's to save. The views belong to the model and stay valid with it; the streams must be
// idle.
std::vector<CheckpointPiece> ModelPieces(PartitionedModel& model, int tp_lane);

// What a run continues from beside tensors: skipped steps and the loss scale, under keys that begin with "zero3.".
// Equal on all ranks.
std::map<std::string, std::string> ModelMetadata(const PartitionedModel& model);

struct LoadOptions {
  // "loss_scale": an f16 model may continue with the scale of its options where the checkpoint has none.
  // States the model has and the checkpoint may lack ("momentum", when SGD took over): they keep their values.
  std::vector<std::string> may_be_missing;
  // Parameters or states of the checkpoint that the model does not have are skipped instead of refused.
  bool ignore_unknown = false;
};

// Reads this rank's part of everything, then lets all ranks of `world` (null: only this one) agree that all succeeded.
// Collective over `world`. On any rank's failure all fail, naming it, and the model's values are undefined: load again.
// NotFound, FailedPrecondition (unknown tensors, shapes, dtypes; an f16 model without a loss scale), DataLoss.
absl::Status LoadModel(const CheckpointReader& reader, const LoadOptions& options, comm::Communicator* world,
                       Stream& stream, PartitionedModel* model);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_MODEL_CHECKPOINT_H_

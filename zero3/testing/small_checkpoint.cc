#include "evenkeel/zero3/testing/small_checkpoint.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"

namespace evenkeel::zero3 {
namespace {

constexpr int64_t kRows = 6, kColumns = 8, kExperts = 4, kWidth = 5;

float ValueAt(const std::string& name, const std::string& state, int64_t step, int64_t global_index) {
  return static_cast<float>(name.size() * 1000 + state.size() * 100 + step * 10000) +
         static_cast<float>(global_index) / 64;
}

// Elements [rank * n, (rank + 1) * n) of the box, n = ceil(elements / world): a ZeRO shard without its padding.
void AddShard(const std::string& name, std::vector<int64_t> global, Piece box, int shard, int shards, int64_t step,
              bool fill, SmallState* state) {
  int64_t elements = 1;
  for (int64_t extent : box.shape) elements *= extent;
  const int64_t each = (elements + shards - 1) / shards;
  box.begin = std::min(elements, shard * each);
  box.end = std::min(elements, box.begin + each);
  for (const std::string optimizer_state : {"weight", "momentum"}) {
    CheckpointPiece piece;
    piece.parameter = {name, global, name == "experts" ? 0 : -1, name == "experts" ? 2 : name == "matrix" ? 1 : -1};
    piece.state = optimizer_state;
    piece.piece = box;
    state->memory.push_back(std::make_unique<std::vector<float>>(box.num_elements(), -1.0f));
    piece.data = state->memory.back()->data();
    if (fill) {
      std::vector<float>& values = *state->memory.back();
      ForEachCommonRun(box, WholePiece(global), [&](int64_t from, int64_t to, int64_t count) {
        for (int64_t i = 0; i < count; ++i) values[from + i] = ValueAt(name, optimizer_state, step, to + i);
      });
    }
    state->pieces.push_back(std::move(piece));
  }
}

}  // namespace

SmallState MakeSmallState(const SmallLayout& layout, int rank, int64_t step, bool fill) {
  SmallState state;
  const int lane = rank % layout.tp, replica = rank / layout.tp;
  const int64_t columns = kColumns / layout.tp, experts = kExperts / layout.ep;
  AddShard("matrix", {kRows, kColumns}, {{0, lane * columns}, {kRows, columns}, 0, 0}, replica, layout.dp, step, fill,
           &state);
  // Equal on all lanes: lane 0 saves it, every lane loads it.
  if (lane == 0 || !fill) AddShard("norm", {kWidth}, {{0}, {kWidth}, 0, 0}, replica, layout.dp, step, fill, &state);
  const int expert_rank = replica % layout.ep, expert_replica = replica / layout.ep;
  AddShard("experts", {kExperts, kWidth, kColumns},
           {{expert_rank * experts, 0, lane * columns}, {experts, kWidth, columns}, 0, 0}, expert_replica,
           layout.dp / layout.ep, step, fill, &state);
  return state;
}

absl::Status SaveOne(FileSystem& fs, int64_t step, const std::string& root) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointWriter> writer,
                      CheckpointWriter::Create(&fs, nullptr, nullptr, {.root = root}));
  const SmallState state = MakeSmallState({}, 0, step, true);
  EK_RETURN_IF_ERROR(writer->Start(step, {{"data_position", absl::StrCat(step * 100)}}, state.pieces));
  return writer->Finish();
}

absl::Status CheckLoad(const CheckpointReader& reader, const SmallLayout& layout, int rank) {
  const SmallState state = MakeSmallState(layout, rank, 0, false);
  for (const CheckpointPiece& piece : state.pieces) {
    EK_RETURN_IF_ERROR(reader.Read(piece));
    absl::Status compared;
    ForEachCommonRun(piece.piece, WholePiece(piece.parameter.global_shape),
                     [&](int64_t from, int64_t to, int64_t count) {
                       for (int64_t i = 0; i < count; ++i) {
                         const float expected = ValueAt(piece.parameter.name, piece.state, reader.step(), to + i);
                         const float found = static_cast<const float*>(piece.data)[from + i];
                         if (found != expected)
                           compared = absl::DataLossError(absl::StrCat(piece.parameter.name, " differs at ", to + i));
                       }
                     });
    EK_RETURN_IF_ERROR(compared);
  }
  return absl::OkStatus();
}

absl::Status SaveAtLayout(FileSystem& fs, const SmallLayout& layout, int64_t step, const std::string& root) {
  EK_ASSIGN_OR_RETURN(const auto world, comm::InProcessWorld::Create({.world_size = layout.world()}));
  const std::vector<absl::Status> statuses = comm::RunRanks(*world, [&](comm::Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("checkpoint"));
    EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(comm::WorldGroup(backend.size())));
    EK_ASSIGN_OR_RETURN(const auto writer,
                        CheckpointWriter::Create(&fs, communicator.get(), stream.get(), {.root = root}));
    const SmallState state = MakeSmallState(layout, backend.rank(), step, true);
    EK_RETURN_IF_ERROR(writer->Start(step, {{"data_position", absl::StrCat(step * 100)}}, state.pieces));
    return writer->Finish();
  });
  return comm::FirstFailure(statuses);
}

}  // namespace evenkeel::zero3

// Manifests, safetensors headers and reshard plans from arbitrary bytes: nothing crashes or runs away, what is accepted
// covers its tensors exactly, and every plan covers its parameter exactly.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/runtime/base/fuzz_input.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/safetensors.h"
#include "evenkeel/zero3/checkpoint/manifest.h"
#include "evenkeel/zero3/checkpoint/piece.h"
#include "evenkeel/zero3/checkpoint/reshard.h"

namespace evenkeel::zero3 {
namespace {

// A well-formed manifest with some of its bytes replaced, and arbitrary text behind a valid first line.
void TryManifest(FuzzInput& input, const std::string& rest) {
  CheckpointManifestProto manifest;
  CheckpointParameterProto* parameter = manifest.add_parameter();
  parameter->set_name("w");
  parameter->add_global_shape(4);
  CheckpointFileProto* file = manifest.add_file();
  file->set_name("f");
  CheckpointPieceProto* piece = file->add_piece();
  piece->set_parameter(static_cast<int>(input.Between(-1, 2)));
  piece->set_state("weight");
  piece->set_dtype(input.Bool() ? "f32" : "f99");
  piece->add_offset(input.Between(-2, 5));
  piece->add_shape(input.Between(-2, 5));
  piece->set_begin(input.Between(-2, 5));
  piece->set_end(input.Bool() ? input.Between(-2, 5) : INT64_MAX);
  piece->add_block_xxh3(1);
  std::string text = RenderManifest(manifest);
  const absl::StatusOr<CheckpointManifestProto> rendered = ParseManifest(text);
  if (rendered.ok()) EK_CHECK_OK(CheckCover({4}, {ToPiece(rendered->file(0).piece(0))}, "w"));
  text[static_cast<size_t>(input.Between(0, static_cast<int64_t>(text.size()) - 1))] = static_cast<char>(input.Byte());
  ParseManifest(text).IgnoreError();
  ParseManifest(rest).IgnoreError();
}

void TrySafetensors(const std::string& rest) {
  const int64_t size = static_cast<int64_t>(rest.size());
  ParseSafetensorsLength(rest, size).IgnoreError();
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader("{" + rest, size + 64);
  if (!header.ok()) return;
  int64_t at = 0;
  for (const SafetensorsEntry& entry : header->tensors) {
    EK_CHECK(entry.begin == at && entry.end >= at);
    at = entry.end;
  }
}

void TryReshard(FuzzInput& input) {
  CheckpointParameterProto parameter;
  parameter.set_name("w");
  std::vector<int64_t> shape;
  for (int64_t i = input.Between(0, 3); i > 0; --i) shape.push_back(input.Between(0, 12));
  for (int64_t extent : shape) parameter.add_global_shape(extent);
  parameter.set_expert_dim(static_cast<int>(input.Between(-1, 3)));
  parameter.set_tp_dim(static_cast<int>(input.Between(-1, 3)));
  CheckpointLayout layout;
  layout.world = static_cast<int>(input.Between(-1, 12));
  layout.tp = static_cast<int>(input.Between(-1, 4));
  layout.ep = static_cast<int>(input.Between(-1, 4));
  std::vector<Piece> pieces;
  for (int rank = 0; rank < layout.world; ++rank) {
    const absl::StatusOr<Piece> piece = PlanPiece(parameter, layout, rank);
    if (!piece.ok()) return;
    EK_CHECK_OK(ValidatePiece(*piece, shape, "w"));
    pieces.push_back(*piece);
  }
  if (!pieces.empty()) EK_CHECK_OK(CheckCover(shape, pieces, "w"));
}

}  // namespace
}  // namespace evenkeel::zero3

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  evenkeel::FuzzInput input(data, size);
  const std::string rest(reinterpret_cast<const char*>(data), size);
  evenkeel::zero3::TryReshard(input);
  evenkeel::zero3::TryManifest(input, rest);
  evenkeel::zero3::TrySafetensors(rest);
  return 0;
}

// The manifest of a checkpoint as text: versioned, digested, and checked before it is believed.
//
//   evenkeel-checkpoint version=1 min_reader=1 xxh3=0123456789abcdef
//   step: 50
//   ...
//
// The digest covers the versions and everything below the first line: any changed bit is found.
#ifndef EVENKEEL_ZERO3_CHECKPOINT_MANIFEST_H_
#define EVENKEEL_ZERO3_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/zero3/checkpoint/manifest.pb.h"
#include "evenkeel/zero3/checkpoint/piece.h"

namespace evenkeel::zero3 {

inline constexpr int kCheckpointVersion = 1;
inline constexpr int64_t kCheckpointBlockBytes = 1 << 20;
inline constexpr int64_t kMaxManifestBytes = 64 << 20;
inline constexpr char kManifestName[] = "manifest.textproto";

// The text of the file: first line versions and digest, then the manifest; ParseManifest reads it back.
std::string RenderManifest(const CheckpointManifestProto& manifest);

// FailedPrecondition with both versions when a newer reader is needed; DataLoss when the digest differs;
// InvalidArgument with the line when the text does not parse or ValidateManifest refuses it.
absl::StatusOr<CheckpointManifestProto> ParseManifest(absl::string_view text);

// Names are plain and unique, indices and dtypes are in range, pieces are inside their tensors, digests are as many as
// blocks, and the pieces of every (parameter, state) cover it exactly once.
absl::Status ValidateManifest(const CheckpointManifestProto& manifest);

// A piece as it stands in the manifest, and back.
Piece ToPiece(const CheckpointPieceProto& proto);
void FromPiece(const Piece& piece, CheckpointPieceProto* proto);

// The name of a piece inside its safetensors file: "layers.0.experts.w_in" for a whole weight,
// "layers.0.experts.w_in[2:4, 0:64, 0:128]@0:8192" for a part, "first_moment.NAME" for optimizer states.
std::string TensorName(const std::string& parameter, const std::string& state, const Piece& piece,
                       absl::Span<const int64_t> global_shape);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_MANIFEST_H_

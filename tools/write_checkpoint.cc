// Writes two small checkpoints below the folder named on the command line, for the test of the checkpoint program.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero3/checkpoint/piece.h"
#include "evenkeel/zero3/checkpoint/shard_file.h"

namespace evenkeel::tools {
namespace {

absl::Status Write(const std::string& root) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<zero3::CheckpointWriter> writer,
                      zero3::CheckpointWriter::Create(FileSystem::Real(), nullptr, nullptr, {.root = root}));
  for (int64_t step : {10, 20}) {
    std::vector<zero3::CheckpointPiece> pieces;
    std::vector<std::vector<float>> memory;
    const std::vector<zero3::CheckpointParameter> parameters = {
        {"attention.q", {8, 8}, -1, 1}, {"experts.w_in", {8, 4, 6}, 0, 2}, {"norm", {5}, -1, -1}};
    for (const zero3::CheckpointParameter& parameter : parameters) {
      for (const char* state : {"weight", "momentum"}) {
        zero3::CheckpointPiece piece;
        piece.parameter = parameter;
        piece.state = state;
        piece.piece = zero3::WholePiece(parameter.global_shape);
        std::vector<float> values;
        for (int64_t i = 0; i < piece.piece.end; ++i) values.push_back(static_cast<float>(i + step * 1000));
        memory.push_back(std::move(values));
        piece.data = memory.back().data();
        pieces.push_back(std::move(piece));
      }
    }
    EK_RETURN_IF_ERROR(writer->Start(step, {{"data_position", std::to_string(step)}}, pieces));
    EK_RETURN_IF_ERROR(writer->Finish());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace evenkeel::tools

int main(int argc, char** argv) {
  const absl::Status status = argc == 2 ? evenkeel::tools::Write(argv[1]) : absl::InvalidArgumentError("one folder");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

// Runs the MoE block of a published checkpoint (Mixtral, Qwen-MoE, DeepSeek names) over an input file, so that a user
// of another framework can compare.
//
//   moe_block Mixtral-8x7B-v0.1 --layer=3 --input=x.safetensors --output=y.safetensors
//
// The input file holds one tensor "x" [tokens, hidden]; without one, --tokens rows of standard normal numbers (Philox,
// --seed) are used and written beside the output. Prints shapes, the routes of the first token, and digests: XXH3 of
// the f32 bytes, row-major.
//
// Exit codes: 0 done, 2 bad usage or files that are missing or damaged, 3 a fault.
#include <gflags/gflags.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/moe/interop/published_block.h"
#include "evenkeel/moe/interop/tensor_files.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/safetensors.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/tools/program.h"

DEFINE_int64(layer, 0, "number N of model.layers.N");
DEFINE_string(family, "", "mixtral, qwen_moe or deepseek; default: by config.json");
DEFINE_string(order, "token_sliced", "a dropless order");
DEFINE_string(input, "", "safetensors file with a tensor `x` [tokens, hidden]");
DEFINE_string(output, "", "safetensors file to write: `y` [tokens, hidden], and `x`");
DEFINE_int64(tokens, 16, "rows of generated input, without --input");
DEFINE_uint64(seed, 1, "of generated input");

namespace evenkeel::tools {
namespace {

constexpr char kUsage[] = "moe_block CHECKPOINT_FOLDER [--layer=N] [--input=FILE] [--output=FILE]";

// Rows [tokens, hidden].
struct Rows {
  int64_t tokens = 0;
  std::vector<float> values;
};

absl::StatusOr<Rows> ReadInput(int64_t hidden) {
  Rows x;
  if (FLAGS_input.empty()) {
    if (FLAGS_tokens < 0 || FLAGS_tokens > (int64_t{1} << 31) / hidden) {
      return absl::InvalidArgumentError(absl::StrCat("--tokens=", FLAGS_tokens, " is out of range"));
    }
    x.tokens = FLAGS_tokens;
    const PhiloxStream stream(PhiloxKey(FLAGS_seed).Add("moe_block.x"));
    for (int64_t i = 0; i < x.tokens * hidden; ++i) x.values.push_back(static_cast<float>(stream.Normal(i)));
    return x;
  }
  if (!gflags::GetCommandLineFlagInfoOrDie("tokens").is_default) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens=", FLAGS_tokens, " beside --input=", FLAGS_input,
                                                   ", which says how many rows there are"));
  }
  EK_ASSIGN_OR_RETURN(const moe::TensorFiles files, moe::TensorFiles::Open(FileSystem::Real(), UserPath(FLAGS_input)));
  const SafetensorsEntry* entry = files.Find("x");
  if (entry == nullptr || entry->shape.rank() != 2 || entry->shape.dim(1) != hidden) {
    return absl::InvalidArgumentError(
        absl::StrCat(FLAGS_input, " has no tensor x of shape [tokens, ", hidden, "]",
                     entry == nullptr ? "" : absl::StrCat("; its x is ", entry->shape.ToString())));
  }
  x.tokens = entry->shape.dim(0);
  x.values.resize(x.tokens * hidden);
  EK_RETURN_IF_ERROR(files.ReadMatrix("x", x.tokens, hidden, false, x.values.data()));
  return x;
}

// Before the work: --output can be made.
absl::Status CheckOutput() {
  if (FLAGS_output.empty()) return absl::OkStatus();
  const std::string path = UserPath(FLAGS_output);
  EK_RETURN_IF_ERROR(FileSystem::Real()->Create(path).status());
  return FileSystem::Real()->RemoveFile(path);
}

absl::Status WriteOutput(const Rows& x, const std::vector<float>& y, int64_t hidden) {
  if (FLAGS_output.empty()) return absl::OkStatus();
  const Shape shape({x.tokens, hidden});
  std::vector<SafetensorsEntry> entries = {{"x", DType::kF32, shape, 0, 0}, {"y", DType::kF32, shape, 0, 0}};
  EK_ASSIGN_OR_RETURN(const std::string front, BuildSafetensorsHeader(entries, {{"format", "pt"}}));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, FileSystem::Real()->Create(UserPath(FLAGS_output)));
  EK_RETURN_IF_ERROR(file->Append(front));
  for (const std::vector<float>* values : {&x.values, &y}) {
    EK_RETURN_IF_ERROR(file->Append({reinterpret_cast<const char*>(values->data()), values->size() * sizeof(float)}));
  }
  return file->Close();
}

void PrintFirstRoutes(const moe::RoutingDecision& decision) {
  std::printf("token 0:");
  for (int64_t i = 0; i < decision.top_k && decision.num_tokens > 0; ++i) {
    std::printf(" expert %d x %.6f", decision.expert[i], static_cast<double>(decision.weight[i]));
  }
  std::printf("\n");
}

uint64_t DigestOf(const std::vector<float>& values) { return Digest64(values.data(), values.size() * sizeof(float)); }

absl::Status Run(const std::vector<std::string>& words) {
  if (words.size() != 1) return absl::InvalidArgumentError(absl::StrCat("usage: ", kUsage));
  EK_RETURN_IF_ERROR(CheckOutput());
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->CreateStream("main"));
  moe::PublishedBlockOptions options;
  options.layer = FLAGS_layer;
  options.family = FLAGS_family;
  options.order = FLAGS_order;
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<moe::PublishedBlock> block,
                      moe::PublishedBlock::Load(FileSystem::Real(), UserPath(words[0]), options, device.get()));
  const int64_t hidden = block->hidden();
  EK_ASSIGN_OR_RETURN(const Rows x, ReadInput(hidden));
  std::vector<float> y(x.values.size());
  EK_RETURN_IF_ERROR(block->Forward(ConstTensorView(x.values.data(), DType::kF32, Shape({x.tokens, hidden})),
                                    TensorView(y.data(), DType::kF32, Shape({x.tokens, hidden})), *stream));
  std::printf("%s layer %lld: %d experts, top %d%s, hidden %lld\n", block->family().c_str(),
              static_cast<long long>(FLAGS_layer), block->config().router.experts, block->config().router.top_k,
              block->has_shared_expert() ? ", shared expert" : "", static_cast<long long>(hidden));
  PrintFirstRoutes(block->decision());
  std::printf("x [%lld, %lld] xxh3 %016llx\n", static_cast<long long>(x.tokens), static_cast<long long>(hidden),
              static_cast<unsigned long long>(DigestOf(x.values)));
  std::printf("y [%lld, %lld] xxh3 %016llx\n", static_cast<long long>(x.tokens), static_cast<long long>(hidden),
              static_cast<unsigned long long>(DigestOf(y)));
  return WriteOutput(x, y, hidden);
}

}  // namespace
}  // namespace evenkeel::tools

int main(int argc, char** argv) {
  gflags::SetUsageMessage(evenkeel::tools::kUsage);
  const std::vector<std::string> words = evenkeel::tools::ParseFlags(&argc, &argv);
  const int code = evenkeel::tools::Report(evenkeel::tools::Run(words));
  return code == evenkeel::tools::kExitMismatch ? evenkeel::tools::kExitBadInput : code;  // it compares nothing
}

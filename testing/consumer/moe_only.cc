// A stranger's program that links the moe component and no other: four ranks on
// threads (TP 2, EP 2) run one MoE layer, forward and backward, under an order of
// this workspace's own, and must get the bits of the built-in reference order.
//
//   bazel run //:moe_only           exit status 0 when the bits are equal

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "runtime/base/philox.h"

namespace stranger {
namespace {

using evenkeel::DType;
using evenkeel::Shape;
using evenkeel::Tensor;

constexpr int64_t kTokens = 24, kHidden = 16, kFfn = 32;
constexpr int kExperts = 4, kTp = 2, kEp = 2, kDp = 2;

// A tensor whose elements are a function of (what it is for, global index).
absl::StatusOr<Tensor> Filled(evenkeel::Device* device, const Shape& shape, const std::string& what, float scale) {
  EK_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Create(device, DType::kF32, shape));
  const evenkeel::PhiloxStream random(evenkeel::PhiloxKey(kOwnSeed).Add(what));
  for (int64_t i = 0; i < shape.num_elements(); ++i) tensor.data<float>()[i] = scale * (random.Uniform(i) - 0.5f);
  return tensor;
}

uint64_t DigestOf(const Tensor& tensor) {
  return evenkeel::Digest64(tensor.data<float>(), static_cast<size_t>(tensor.view().num_bytes()));
}

// The digest of all that one rank computes under `order`.
absl::StatusOr<uint64_t> RunLayer(evenkeel::comm::Backend& rank, const evenkeel::comm::Mesh& mesh,
                                  const evenkeel::moe::Order& order) {
  using evenkeel::comm::Axis;
  auto device = evenkeel::HostDevice::Create();
  EK_ASSIGN_OR_RETURN(auto stream, device->CreateStream("compute"));
  EK_ASSIGN_OR_RETURN(auto tp, rank.CreateGroup(mesh.GroupOf(Axis::kTp, rank.rank())));
  EK_ASSIGN_OR_RETURN(auto ep, rank.CreateGroup(mesh.GroupOf(Axis::kEp, rank.rank())));

  evenkeel::moe::MoeConfig config;
  config.router.layer = "only";
  config.router.hidden = kHidden;
  config.router.experts = kExperts;
  config.router.top_k = 2;
  config.ffn = kFfn;
  EK_ASSIGN_OR_RETURN(auto layer, evenkeel::moe::MoeLayer::Create(
                                      config, order, {.tp = tp.get(), .ep = ep.get(), .expert_tp = kTp}, device.get()));
  const evenkeel::moe::ExpertShape& own = layer->expert_shape();
  const Shape in({own.local_experts, kHidden, own.ffn}), out({own.local_experts, own.ffn, kHidden});
  const Shape tokens({kTokens, kHidden});
  const std::string lane = std::to_string(tp->rank()) + "/" + std::to_string(ep->rank());
  const std::string source = std::to_string(mesh.Coordinate(Axis::kDp, rank.rank()));  // lanes hold the same tokens

  EK_ASSIGN_OR_RETURN(Tensor router, Filled(device.get(), Shape({kExperts, kHidden}), "router", 1.0f));
  EK_ASSIGN_OR_RETURN(Tensor w_in, Filled(device.get(), in, "w_in" + lane, 0.5f));
  EK_ASSIGN_OR_RETURN(Tensor w_out, Filled(device.get(), out, "w_out" + lane, 0.5f));
  EK_ASSIGN_OR_RETURN(Tensor x, Filled(device.get(), tokens, "x" + source, 2.0f));
  EK_ASSIGN_OR_RETURN(Tensor dy, Filled(device.get(), tokens, "dy" + source, 2.0f));
  EK_ASSIGN_OR_RETURN(Tensor y, Tensor::Zeros(device.get(), DType::kF32, tokens));
  EK_ASSIGN_OR_RETURN(Tensor dx, Tensor::Zeros(device.get(), DType::kF32, tokens));
  EK_ASSIGN_OR_RETURN(Tensor d_router, Tensor::Zeros(device.get(), DType::kF32, router.shape()));
  EK_ASSIGN_OR_RETURN(Tensor d_in, Tensor::Zeros(device.get(), DType::kF32, in));
  EK_ASSIGN_OR_RETURN(Tensor d_out, Tensor::Zeros(device.get(), DType::kF32, out));

  evenkeel::moe::MoeWeights weights;
  weights.router = router.const_view();
  weights.experts.w_in = w_in.const_view();
  weights.experts.w_out = w_out.const_view();
  evenkeel::moe::MoeGradients gradients;
  gradients.router = d_router.view();
  gradients.experts.w_in = d_in.view();
  gradients.experts.w_out = d_out.view();

  evenkeel::moe::MoeTape tape;
  EK_RETURN_IF_ERROR(layer->Forward(weights, x.const_view(), y.view(), {}, &tape, *stream));
  EK_RETURN_IF_ERROR(layer->Backward(weights, tape, dy.const_view(), dx.view(), gradients, *stream));
  EK_RETURN_IF_ERROR(stream->Synchronize());
  uint64_t digest = 0;
  for (const Tensor* tensor : {&y, &dx, &d_router, &d_in, &d_out}) {
    digest = evenkeel::CombineDigests(digest, DigestOf(*tensor));
  }
  return digest;
}

absl::Status Run(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError("cannot read " + path);
  EK_ASSIGN_OR_RETURN(evenkeel::moe::Order own, evenkeel::moe::ParseOrder(text.str(), path));
  EK_ASSIGN_OR_RETURN(evenkeel::moe::Order reference, evenkeel::moe::FindOrder("reference"));
  EK_ASSIGN_OR_RETURN(evenkeel::comm::Mesh mesh,
                      evenkeel::comm::Mesh::Create({.tp = kTp, .ep = kEp, .dp = kDp, .etp = kTp}));

  std::vector<std::vector<uint64_t>> digests;
  for (const evenkeel::moe::Order* order : {&reference, &own}) {
    evenkeel::comm::InProcessOptions options;
    options.world_size = mesh.world_size();
    EK_ASSIGN_OR_RETURN(auto world, evenkeel::comm::InProcessWorld::Create(options));
    std::vector<uint64_t>& of_ranks = digests.emplace_back(mesh.world_size());
    EK_RETURN_IF_ERROR(evenkeel::comm::FirstFailure(
        evenkeel::comm::RunRanks(*world, [&](evenkeel::comm::Backend& rank) -> absl::Status {
          EK_ASSIGN_OR_RETURN(of_ranks[rank.rank()], RunLayer(rank, mesh, *order));
          return absl::OkStatus();
        })));
  }
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    std::printf("rank %d: reference %016lx, own order %016lx\n", rank, digests[0][rank], digests[1][rank]);
    if (digests[0][rank] != digests[1][rank]) return absl::DataLossError("the bits differ");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace stranger

int main(int argc, char** argv) {
  const absl::Status status = stranger::Run(argc > 1 ? argv[1] : "own_order.textproto");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

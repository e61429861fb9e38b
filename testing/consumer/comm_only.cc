// A stranger's program that links comm and no other component: every collective once, on threads and on simulated
// ranks by name, and what ranks are told that do not agree.
//
//   bazel run //:comm_only           exit status 0 when every result is right

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace stranger {
namespace {

using evenkeel::TensorView;
using evenkeel::comm::Axis;
using evenkeel::comm::ReduceOp;

constexpr int kRanks = 4;

// The first n of `values`; without n all of them.
TensorView View(std::vector<float>& values, int64_t n = -1) {
  const auto all = static_cast<int64_t>(values.size());
  return TensorView(values.data(), evenkeel::DType::kF32, evenkeel::Shape({n < 0 ? all : n}));
}

absl::Status Expect(const char* what, const std::vector<float>& got, const std::vector<float>& wanted) {
  if (got == wanted) return absl::OkStatus();
  return absl::DataLossError(std::string(what) + " gave a wrong result");
}

// Each rank r begins with 10 r, 10 r + 1, 10 r + 2, 10 r + 3.
absl::Status EveryCall(evenkeel::comm::Communicator& group, evenkeel::Stream& stream) {
  const auto r = static_cast<float>(group.rank());
  std::vector<float> mine = {10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3}, four(4), one(1), many(16);
  EK_RETURN_IF_ERROR(group.AllReduce(View(mine), View(four), ReduceOp::kMax, stream));
  EK_RETURN_IF_ERROR(Expect("all_reduce", four, {30, 31, 32, 33}));
  EK_RETURN_IF_ERROR(group.ReduceScatter(View(mine), View(one), ReduceOp::kSum, stream));
  EK_RETURN_IF_ERROR(Expect("reduce_scatter", one, {60 + 4 * r}));
  EK_RETURN_IF_ERROR(
      group.ReduceScatterV(View(mine), View(four, group.rank() == 2 ? 4 : 0), {0, 0, 4, 0}, ReduceOp::kAvg, stream));
  if (group.rank() == 2) EK_RETURN_IF_ERROR(Expect("reduce_scatter_v", four, {15, 16, 17, 18}));
  EK_RETURN_IF_ERROR(group.AllGather(View(mine, 1), View(four), stream));
  EK_RETURN_IF_ERROR(Expect("all_gather", four, {0, 10, 20, 30}));
  EK_RETURN_IF_ERROR(group.AllGatherV(View(mine, group.rank() < 2 ? 2 : 0), View(four), {2, 2, 0, 0}, stream));
  EK_RETURN_IF_ERROR(Expect("all_gather_v", four, {0, 1, 10, 11}));
  EK_RETURN_IF_ERROR(group.AllToAll(View(mine), View(four), stream));
  EK_RETURN_IF_ERROR(Expect("all_to_all", four, {r, 10 + r, 20 + r, 30 + r}));
  // Everybody sends everything to rank 0.
  const bool first = group.rank() == 0;
  EK_RETURN_IF_ERROR(group.AllToAllV(View(mine), {4, 0, 0, 0}, View(many, first ? 16 : 0),
                                     first ? std::vector<int64_t>(4, 4) : std::vector<int64_t>(4, 0), stream));
  if (first) EK_RETURN_IF_ERROR(Expect("all_to_all_v", {many[5], many[15]}, {11, 33}));
  EK_RETURN_IF_ERROR(group.Broadcast(View(mine), 3, stream));
  EK_RETURN_IF_ERROR(Expect("broadcast", mine, {30, 31, 32, 33}));
  // A ring of sends and a sum, as one.
  evenkeel::comm::CallGroup calls;
  std::vector<float> rank = {r}, sum = {0};
  calls.Send(View(rank), (group.rank() + 1) % kRanks);
  calls.Recv(View(one), (group.rank() + kRanks - 1) % kRanks);
  calls.AllReduce(View(rank), View(sum), ReduceOp::kSum);
  EK_RETURN_IF_ERROR(calls.Run(group, stream));
  EK_RETURN_IF_ERROR(Expect("send and recv", one, {static_cast<float>((group.rank() + kRanks - 1) % kRanks)}));
  EK_RETURN_IF_ERROR(Expect("a grouped sum", sum, {6}));
  return group.Barrier(stream);
}

// Rank 2 has one element more than the others: all are told, and nothing has changed.
absl::Status Disagree(evenkeel::comm::Communicator& group, evenkeel::Stream& stream) {
  std::vector<float> values(group.rank() == 2 ? 5 : 4, 7.0f);
  const absl::Status status = group.AllReduce(View(values), View(values), ReduceOp::kSum, stream);
  if (group.rank() == 1) std::printf("  %s\n", std::string(status.message()).c_str());
  if (status.code() != absl::StatusCode::kFailedPrecondition || !absl::StrContains(status.message(), "rank 2 has")) {
    return absl::InternalError("the odd rank is not named");
  }
  return Expect("a refused call", values, std::vector<float>(values.size(), 7.0f));
}

absl::Status Rank(evenkeel::comm::Backend& rank) {
  EK_ASSIGN_OR_RETURN(const auto mesh, evenkeel::comm::Mesh::Create({.tp = 2, .ep = 2, .dp = 2, .etp = 2}));
  const auto device = evenkeel::HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(const auto world, rank.CreateGroup(mesh.GroupOf(Axis::kWorld, rank.rank())));
  EK_RETURN_IF_ERROR(EveryCall(*world, *stream));
  for (const Axis axis : {Axis::kTp, Axis::kDp, Axis::kEp, Axis::kEdp}) {
    EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(mesh.GroupOf(axis, rank.rank())));
    std::vector<float> value = {1};
    EK_RETURN_IF_ERROR(group->AllReduce(View(value), View(value), ReduceOp::kSum, *stream));
    EK_RETURN_IF_ERROR(Expect("a sum along an axis", value, {static_cast<float>(mesh.size(axis))}));
  }
  return Disagree(*world, *stream);
}

absl::Status Run() {
  for (const std::string& name : evenkeel::comm::BackendNames()) {
    std::printf("%s\n", name.c_str());
    EK_ASSIGN_OR_RETURN(const auto world, evenkeel::comm::CreateWorld(name, {.world_size = kRanks}));
    for (const auto& [rank, status] : world->Run(Rank)) EK_RETURN_IF_ERROR(status);
  }
  return evenkeel::comm::BackendNames().size() == 2 ? absl::OkStatus() : absl::NotFoundError("two backends wanted");
}

}  // namespace
}  // namespace stranger

int main() {
  const absl::Status status = stranger::Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

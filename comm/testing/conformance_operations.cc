// The conformance cases whose calls are right: every operation, and groups of every kind.
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/conformance_calls.h"
#include "evenkeel/comm/testing/conformance_rig.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// Irregular counts with zeros in every row and column, and a rank that gets nothing.
int64_t CountOf(int from, int to, int64_t n) {
  if (to == 1 || (from + to) % 3 == 2) return 0;
  return (n * (1 + (2 * from + to) % 4) + 1) / 2;
}

absl::Status Annotated(const absl::Status& status, absl::string_view where) {
  return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
}

// Calls `body(dtype, n)` for every dtype and extent; names them in what fails.
template <typename Body>
absl::Status ForEachExtent(const ConformanceOptions& options, const Body& body) {
  for (const DType dtype : kAllDTypes) {
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{257}, options.large}) {
      const absl::Status status = body(dtype, n);
      if (!status.ok()) return Annotated(status, absl::StrCat(DTypeName(dtype), " n=", n));
    }
  }
  return absl::OkStatus();
}

// Rank 0 has some, also where it is alone; ranks 1, 4, 7 have none.
Counts IrregularCounts(int size, int64_t n) {
  Counts counts(size);
  for (int r = 0; r < size; ++r) counts[r] = r % 3 == 1 ? 0 : (n * (1 + 3 * r % 4) + 1) / 2;
  return counts;
}

enum class Reducing { kAllReduce, kScatter, kScatterV };

absl::Status ReduceOnce(Rig& rig, Reducing what, DType dtype, ReduceOp op, int64_t n, bool in_place) {
  if (what == Reducing::kAllReduce) return AllReduceOnce(rig, dtype, op, n, in_place, 0);
  const bool equal = what == Reducing::kScatter;
  const Counts counts = equal ? Counts(rig.size(), n) : IrregularCounts(rig.size(), n);
  return ReduceScatterOnce(rig, dtype, op, counts, equal, in_place);
}

absl::Status ReduceAll(Rig& rig, const ConformanceOptions& options, Reducing what) {
  return ForEachExtent(options, [&rig, what](DType dtype, int64_t n) -> absl::Status {
    for (const ReduceOp op : kAllReduceOps) {
      if (!CheckReduction(dtype, op).ok()) continue;
      for (const bool in_place : {false, true}) {
        const absl::Status status = ReduceOnce(rig, what, dtype, op, n, in_place);
        if (!status.ok()) return Annotated(status, absl::StrCat(ReduceOpName(op), in_place ? " in place" : ""));
      }
    }
    return absl::OkStatus();
  });
}

std::vector<Counts> Matrix(int size, int64_t n, bool equal) {
  std::vector<Counts> matrix(size, Counts(size, n));
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size && !equal; ++to) matrix[from][to] = CountOf(from, to, n);
  }
  return matrix;
}

// Every rank is in two more groups, used in turn: halves and strides.
absl::Status SubGroups(Backend& backend, const ConformanceOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Rig> rig, Rig::Create(backend, options));
  const int rank = backend.rank();
  Group half{.axis = Axis::kTp, .name = "tp", .ranks = {}};
  Group stride{.axis = Axis::kDp, .name = "dp", .ranks = {}};
  for (int r = 0; r < backend.size(); ++r) {
    if (r / 2 == rank / 2) half.ranks.push_back(r);
    if (r % 2 == rank % 2) stride.ranks.insert(stride.ranks.begin(), r);  // in falling order
  }
  EK_ASSIGN_OR_RETURN(const auto tp, backend.CreateGroup(half));
  EK_ASSIGN_OR_RETURN(const auto dp, backend.CreateGroup(stride));
  for (int round = 0; round < 10; ++round) {
    for (Communicator* group : {tp.get(), dp.get()}) {
      int32_t mine = rank * 100 + round;
      std::vector<int32_t> all(group->size());
      EK_RETURN_IF_ERROR(group->AllGather(ConstTensorView(&mine, DType::kI32, Shape({1})),
                                          TensorView(all.data(), DType::kI32, Shape({group->size()})), rig->stream()));
      EK_RETURN_IF_ERROR(rig->stream().Synchronize());
      for (int i = 0; i < group->size(); ++i) {
        if (all[i] != group->group().ranks[i] * 100 + round) return absl::InternalError("wrong order in a sub-group");
      }
    }
  }
  return rig->Finish(rig->group().Barrier(rig->stream()), 0);
}

// The members of one group of `mesh` find one another in group order.
absl::Status CheckAxis(Backend& backend, Stream& stream, const Mesh& mesh, Axis axis) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(mesh.GroupOf(axis, backend.rank())));
  int32_t mine = backend.rank();
  std::vector<int32_t> all(group->size());
  EK_RETURN_IF_ERROR(group->AllGather(ConstTensorView(&mine, DType::kI32, Shape({1})),
                                      TensorView(all.data(), DType::kI32, Shape({group->size()})), stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  if (group->rank() == mesh.Coordinate(axis, backend.rank()) && all == mesh.GroupOf(axis, mine).ranks) {
    return absl::OkStatus();
  }
  const MeshShape& shape = mesh.shape();
  return absl::InternalError(
      absl::StrCat("wrong members along ", AxisName(axis), " of tp ", shape.tp, " ep ", shape.ep, " etp ", shape.etp));
}

// Every mesh that fits the world, split along every axis.
absl::Status MeshAxes(Backend& backend, const ConformanceOptions& options) {
  EK_ASSIGN_OR_RETURN(const auto rig, Rig::Create(backend, options));
  for (int tp = 1; tp <= backend.size(); ++tp) {
    for (int ep = 1; ep <= backend.size(); ++ep) {
      for (const int etp : {1, tp}) {
        const auto mesh = Mesh::Create({.tp = tp, .ep = ep, .dp = backend.size() / tp, .etp = etp});
        if (backend.size() % tp != 0 || !mesh.ok()) continue;
        for (const Axis axis : {Axis::kWorld, Axis::kTp, Axis::kDp, Axis::kEp, Axis::kEdp, Axis::kEtp}) {
          EK_RETURN_IF_ERROR(CheckAxis(backend, rig->stream(), *mesh, axis));
        }
      }
    }
  }
  return absl::OkStatus();
}

// A group of one in a larger world: every operation gives this rank's own data, nothing is booked and nobody is met.
absl::Status GroupsOfOne(Backend& backend, const ConformanceOptions& options) {
  const Group alone{.axis = Axis::kOther, .name = "alone", .ranks = {backend.rank()}};
  EK_ASSIGN_OR_RETURN(const auto rig, Rig::Create(backend, options, alone));
  const LedgerCounts before = backend.ledger().Snapshot();
  EK_RETURN_IF_ERROR(ForEachExtent(options, [&rig](DType dtype, int64_t n) -> absl::Status {
    for (const bool in_place : {false, true}) {
      EK_RETURN_IF_ERROR(AllReduceOnce(*rig, dtype, ReduceOp::kSum, n, in_place, 0));
      for (const bool equal : {false, true}) {
        EK_RETURN_IF_ERROR(AllGatherOnce(*rig, dtype, {n}, equal, in_place));
        EK_RETURN_IF_ERROR(ReduceScatterOnce(*rig, dtype, ReduceOp::kMax, {n}, equal, in_place));
        EK_RETURN_IF_ERROR(AllToAllOnce(*rig, dtype, {{n}}, equal, 0));
      }
    }
    return BroadcastOnce(*rig, dtype, 0, n);
  }));
  EK_RETURN_IF_ERROR(rig->Finish(rig->group().Barrier(rig->stream()), 0));
  const LedgerCounts booked = backend.ledger().Snapshot() - before;
  if (booked.bytes(Axis::kOther) == 0 && booked.total_collectives() == 0 && booked.control_bytes == 0) {
    return absl::OkStatus();
  }
  return absl::InternalError("a group of one has booked something");
}

}  // namespace

std::vector<ConformanceCase> OperationCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases;
  const auto add = [&cases, &options](std::string name, std::function<absl::Status(Rig&)> body) {
    cases.push_back(RigCase(options, std::move(name), std::move(body)));
  };
  add("AllReduce", [options](Rig& rig) { return ReduceAll(rig, options, Reducing::kAllReduce); });
  add("ReduceScatter", [options](Rig& rig) { return ReduceAll(rig, options, Reducing::kScatter); });
  add("ReduceScatterV", [options](Rig& rig) { return ReduceAll(rig, options, Reducing::kScatterV); });
  for (const bool in_place : {false, true}) {
    const std::string suffix = in_place ? "InPlace" : "";
    add("AllGather" + suffix, [options, in_place](Rig& rig) {
      return ForEachExtent(options, [&rig, in_place](DType dtype, int64_t n) {
        return AllGatherOnce(rig, dtype, Counts(rig.size(), n), true, in_place);
      });
    });
    add("AllGatherV" + suffix, [options, in_place](Rig& rig) {
      return ForEachExtent(options, [&rig, in_place](DType dtype, int64_t n) {
        return AllGatherOnce(rig, dtype, IrregularCounts(rig.size(), n), false, in_place);
      });
    });
  }
  for (const bool equal : {true, false}) {
    add(equal ? "AllToAll" : "C11_AllToAllVWithEmptyRowsAndColumns", [options, equal](Rig& rig) {
      return ForEachExtent(options, [&rig, equal](DType dtype, int64_t n) {
        return AllToAllOnce(rig, dtype, Matrix(rig.size(), n, equal), equal, 0);
      });
    });
  }
  add("BroadcastFromEveryRoot", [options](Rig& rig) {
    return ForEachExtent(options, [&rig](DType dtype, int64_t n) -> absl::Status {
      for (int root = 0; root < rig.size(); ++root) EK_RETURN_IF_ERROR(BroadcastOnce(rig, dtype, root, n));
      return absl::OkStatus();
    });
  });
  add("Barrier", [](Rig& rig) -> absl::Status {
    for (int i = 0; i < 5; ++i) EK_RETURN_IF_ERROR(rig.Finish(rig.group().Barrier(rig.stream()), 0));
    return absl::OkStatus();
  });
  add("SendRecvRound", [options](Rig& rig) {
    if (rig.size() == 1) return absl::OkStatus();
    return ForEachExtent(options, [&rig](DType dtype, int64_t n) { return SendRecvOnce(rig, dtype, n); });
  });
  for (ConformanceCase& c : ValueCases(options)) cases.push_back(std::move(c));
  for (ConformanceCase& c : GroupedOperationCases(options)) cases.push_back(std::move(c));
  cases.push_back({"SubGroupsInTurn", 1, [options](Backend& backend) { return SubGroups(backend, options); }});
  cases.push_back({"GroupsOfOneBookNothing", 1, [options](Backend& backend) { return GroupsOfOne(backend, options); }});
  cases.push_back({"MeshAxesInTurn", 1, [options](Backend& backend) { return MeshAxes(backend, options); }});
  return cases;
}

}  // namespace evenkeel::comm

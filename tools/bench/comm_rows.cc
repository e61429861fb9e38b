#include "evenkeel/tools/bench/comm_rows.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace evenkeel::bench {
namespace {

constexpr const char* kOps[] = {"all_gather", "all_to_all",     "reduce_scatter",        "all_reduce",
                                "barrier",    "all_gather_x16", "all_gather_x16_grouped"};
constexpr const char* kKinds[] = {"in_process", "copy", "gloo", "mpi", "raw_mpi"};

bool Exists(const Row& row) {
  if (row.op == Op::kBarrier && row.bytes > (1 << 10)) return false;
  if (IsX16(row.op)) {
    if (row.op == Op::kGroupedX16 && row.kind == Kind::kRawMpi) return false;  // MPI has no such call
    return row.ranks <= 4 && row.bytes <= (64 << 10) &&
           (row.kind == Kind::kInProcess || row.kind == Kind::kMpi || row.kind == Kind::kRawMpi);
  }
  if (row.ranks > 4 && (row.bytes > (1 << 10) || (row.kind != Kind::kInProcess && row.kind != Kind::kCopy)))
    return false;
  if (row.kind == Kind::kCopy) return row.op == Op::kAllGather || row.op == Op::kAllToAll;
  if (row.kind == Kind::kGloo) return row.op != Op::kReduceScatter && row.op != Op::kBarrier;
  return true;
}

}  // namespace

const char* OpName(Op op) { return kOps[static_cast<int>(op)]; }

std::string RowName(const Row& row) {
  return absl::StrCat(kKinds[static_cast<int>(row.kind)], "/", OpName(row.op), "/ranks:", row.ranks,
                      "/bytes:", row.bytes);
}

std::vector<Row> AllRows() {
  std::vector<Row> rows;
  for (const Op op : {Op::kAllGather, Op::kAllToAll, Op::kReduceScatter, Op::kAllReduce, Op::kBarrier,
                      Op::kAllGatherX16, Op::kGroupedX16}) {
    for (const int ranks : {2, 4, 16, 64}) {
      for (int64_t bytes = 1 << 10; bytes <= 64 << 20; bytes *= 4) {
        for (const Kind kind : {Kind::kCopy, Kind::kInProcess, Kind::kGloo, Kind::kMpi, Kind::kRawMpi}) {
          const Row row = {kind, op, ranks, bytes};
          if (Exists(row)) rows.push_back(row);
        }
      }
    }
  }
  return rows;
}

int64_t CallsPerWindow(int64_t bytes) { return std::clamp<int64_t>((8 << 20) / bytes, 2, 200); }

int64_t MovedBytes(const Row& row) {
  switch (row.op) {
    case Op::kAllReduce:
      return 2 * row.bytes * (row.ranks - 1) / row.ranks;
    case Op::kBarrier:
      return 0;
    case Op::kAllGatherX16:
    case Op::kGroupedX16:
      return row.bytes * (row.ranks - 1) * kX16;
    default:
      return row.bytes * (row.ranks - 1);
  }
}

}  // namespace evenkeel::bench

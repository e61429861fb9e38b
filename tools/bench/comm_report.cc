#include "evenkeel/tools/bench/comm_report.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace evenkeel::bench {
namespace {

constexpr int64_t kMiB = 1 << 20;

std::string SizeText(int64_t bytes) {
  return bytes >= kMiB ? absl::StrCat(bytes / kMiB, " MiB") : absl::StrCat(bytes >> 10, " KiB");
}

std::string Microseconds(std::optional<double> us) {
  if (!us.has_value()) return "-";
  return *us < 100 ? absl::StrFormat("%.2f", *us) : absl::StrFormat("%.0f", *us);
}

// How many times as fast `ours` is as `theirs`.
std::optional<double> Speed(std::optional<double> ours, std::optional<double> theirs) {
  if (!ours.has_value() || !theirs.has_value() || *ours <= 0) return std::nullopt;
  return *theirs / *ours;
}

std::string Ratio(std::optional<double> ratio) { return ratio.has_value() ? absl::StrFormat("%.2f", *ratio) : "-"; }

// Rows of kind `ours` must be at least `factor` times as fast as those of kind `theirs`.
struct Target {
  const char* text;
  Kind ours;
  Kind theirs;
  double factor;
  std::function<bool(const Row&)> applies;
};

bool IsMove(const Row& row) { return row.op == Op::kAllGather || row.op == Op::kAllToAll; }

std::vector<Target> AllTargets() {
  return {
      {"in_process all_gather, all_to_all >= 0.8 of the copy limit, 2 ranks, from 1 MiB", Kind::kInProcess, Kind::kCopy,
       0.8, [](const Row& row) { return IsMove(row) && row.ranks == 2 && row.bytes >= kMiB; }},
      {"in_process all_gather, all_to_all >= 1.5 x raw MPI, from 1 MiB", Kind::kInProcess, Kind::kRawMpi, 1.5,
       [](const Row& row) { return IsMove(row) && row.bytes >= kMiB; }},
      {"in_process reduce_scatter f32 (canonical) >= raw MPI", Kind::kInProcess, Kind::kRawMpi, 1.0,
       [](const Row& row) { return row.op == Op::kReduceScatter; }},
      {"in_process 1 KiB at 4 ranks no slower than raw MPI", Kind::kInProcess, Kind::kRawMpi, 1.0,
       [](const Row& row) { return row.ranks == 4 && row.bytes == 1 << 10; }},
      {"mpi >= 0.9 of raw MPI, from 1 MiB", Kind::kMpi, Kind::kRawMpi, 0.9,
       [](const Row& row) { return row.bytes >= kMiB; }},
      {"in_process all_gather, all_to_all, all_reduce faster than Gloo", Kind::kInProcess, Kind::kGloo, 1.0,
       [](const Row& row) { return row.ranks <= 4; }},
  };
}

Row WithKind(Row row, Kind kind) {
  row.kind = kind;
  return row;
}

// Each combination of operation, ranks and bytes once.
std::vector<Row> AllShapes() {
  std::vector<Row> shapes;
  for (const Row& row : AllRows()) {
    if (row.kind == Kind::kInProcess) shapes.push_back(row);
  }
  return shapes;
}

std::string ShapeText(const Row& row) {
  return absl::StrCat(OpName(row.op), " ", row.ranks, " ranks ", SizeText(row.bytes));
}

std::string Judge(const CommReport& report, const Target& target) {
  std::optional<double> worst;
  std::string worst_shape, misses;
  for (const Row& shape : AllShapes()) {
    if (!target.applies(shape)) continue;
    const std::optional<double> speed =
        Speed(report.Find(WithKind(shape, target.ours)), report.Find(WithKind(shape, target.theirs)));
    if (!speed.has_value()) continue;
    if (!worst.has_value() || *speed < *worst) {
      worst = speed;
      worst_shape = ShapeText(shape);
    }
    if (*speed < target.factor) absl::StrAppend(&misses, "; ", ShapeText(shape), " ", Ratio(speed));
  }
  if (!worst.has_value()) return absl::StrCat("not measured  ", target.text, "\n");
  if (misses.empty())
    return absl::StrCat("met           ", target.text, ": worst ", Ratio(worst), " (", worst_shape, ")\n");
  return absl::StrCat("missed        ", target.text, misses, "\n");
}

// All that a barrier of processes does is agree: records to and from every rank.
std::string JudgeFingerprint(const CommReport& report) {
  constexpr const char* kText = "the fingerprint costs < 25 us at 4 processes: ";
  const std::optional<double> us = report.Find({.kind = Kind::kMpi, .op = Op::kBarrier, .ranks = 4, .bytes = 1 << 10});
  if (!us.has_value()) return absl::StrCat("not measured  ", kText, "barrier of mpi\n");
  return absl::StrCat(*us < 25 ? "met           " : "missed        ", kText, "barrier of mpi, which is nothing else, ",
                      Microseconds(us), " us\n");
}

}  // namespace

void CommReport::Add(const Row& row, double us) {
  const auto [place, is_new] = us_.emplace(RowName(row), us);
  if (!is_new) place->second = std::min(place->second, us);
}

std::optional<double> CommReport::Find(const Row& row) const {
  const auto found = us_.find(RowName(row));
  if (found == us_.end()) return std::nullopt;
  return found->second;
}

std::string CommReport::Table() const {
  std::string text;
  std::string last_title;
  for (const Row& shape : AllShapes()) {
    const auto us = [this, &shape](Kind kind) { return Find(WithKind(shape, kind)); };
    const auto own = us(Kind::kInProcess), copy = us(Kind::kCopy), gloo = us(Kind::kGloo), mpi = us(Kind::kMpi),
               raw = us(Kind::kRawMpi);
    if (!own && !copy && !gloo && !mpi && !raw) continue;
    const std::string title = absl::StrCat(OpName(shape.op), ", ", shape.ranks, " ranks");
    if (title != last_title) {
      absl::StrAppendFormat(&text, "\n%-24s %10s %10s %10s %10s %10s %10s %10s %10s\n", title, "copy", "in_process",
                            "gloo", "mpi", "raw_mpi", "own/copy", "own/raw", "mpi/raw");
      last_title = title;
    }
    absl::StrAppendFormat(&text, "%24s %10s %10s %10s %10s %10s %10s %10s %10s\n", SizeText(shape.bytes),
                          Microseconds(copy), Microseconds(own), Microseconds(gloo), Microseconds(mpi),
                          Microseconds(raw), Ratio(Speed(own, copy)), Ratio(Speed(own, raw)), Ratio(Speed(mpi, raw)));
  }
  if (text.empty()) return text;
  return absl::StrCat(
      "\nMicroseconds a call, the shortest window of each row. own/copy, own/raw, mpi/raw: how many times as fast as\n"
      "copy or raw_mpi the rows in_process (own) and mpi are; more than 1 is faster.\n",
      text);
}

std::string CommReport::Targets() const {
  std::string text = "\nTargets\n";
  for (const Target& target : AllTargets()) absl::StrAppend(&text, Judge(*this, target));
  absl::StrAppend(&text, JudgeFingerprint(*this));
  return text;
}

}  // namespace evenkeel::bench

// What the comm benchmark says at its end: every row beside its limits and peers, and a line for each target.
#ifndef EVENKEEL_TOOLS_BENCH_COMM_REPORT_H_
#define EVENKEEL_TOOLS_BENCH_COMM_REPORT_H_

#include <map>
#include <optional>
#include <string>

#include "evenkeel/tools/bench/comm_rows.h"

namespace evenkeel::bench {

// The shortest microseconds of one call that any window showed, by row. Rows may be missing.
class CommReport {
 public:
  void Add(const Row& row, double us);
  std::optional<double> Find(const Row& row) const;

  // A table per operation and number of ranks, a line per size: microseconds, and the ratios that targets speak of.
  std::string Table() const;
  // One line each: "met", "missed" with the rows that miss it, or "not measured", with the worst ratio.
  std::string Targets() const;

 private:
  std::map<std::string, double> us_;  // by RowName
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_COMM_REPORT_H_

// Writes a parity job's result for people and for programs: report.json, report.html (loss curves drawn as inline
// SVG), report.md (ready for a pull request) and loss.png (through gnuplot), and the table that ends stdout.
//
//   EK_RETURN_IF_ERROR(PrepareOutputFolder("parity-report"));   // before the job: an unwritable folder is found early
//   EK_ASSIGN_OR_RETURN(ReportFiles files, WriteReport(result, "parity-report"));
//   std::puts(RenderTable(result).c_str());
#ifndef EVENKEEL_TOOLS_REPORT_REPORT_WRITER_H_
#define EVENKEEL_TOOLS_REPORT_REPORT_WRITER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/testing/parity_result.h"

namespace evenkeel::tools {

struct ReportFiles {
  std::vector<std::string> written;  // paths, in the order above
  std::string warning;               // why loss.png is missing, when gnuplot is not there or failed
};

// One row per run: verdict, worst difference, EP and TP bytes counted and predicted, collectives, host operations per
// leaf fetch, peak gathered bytes, loss first and last, ms per step. Plain text, no trailing line end.
std::string RenderTable(const testutil::ParityResult& result);

// The sentence for a mismatch: step, tensor, rank, index, both values, ulps.
std::string RenderDifference(const testutil::ParityRun& run);

// The report as JSON text, with the keys that CONTRACT fixes ("version": 1).
std::string RenderJson(const testutil::ParityResult& result);
std::string RenderMarkdown(const testutil::ParityResult& result);
std::string RenderHtml(const testutil::ParityResult& result);

// Makes the folder (parents too) and proves that it can be written; InvalidArgument naming it otherwise.
absl::Status PrepareOutputFolder(const std::string& folder);

// Writes all files. Unavailable naming the file when one cannot be written. A missing gnuplot is a warning.
absl::StatusOr<ReportFiles> WriteReport(const testutil::ParityResult& result, const std::string& folder);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_REPORT_REPORT_WRITER_H_

#include "evenkeel/tools/report/report_writer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/tools/report/loss_chart.h"

namespace evenkeel::tools {
namespace {

using testutil::AxisBytes;
using testutil::ParityResult;
using testutil::ParityRun;
using testutil::Verdict;
using Json = nlohmann::ordered_json;

// "12,345,678".
std::string Thousands(int64_t value) {
  std::string digits = absl::StrCat(value < 0 ? -value : value);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), 1, ',');
  return value < 0 ? absl::StrCat("-", digits) : digits;
}

// "12,345 =" when the prediction was met to the byte, "12,345 (predicted 12,000)" otherwise.
std::string CountedAndPredicted(int64_t counted, int64_t predicted) {
  if (counted == predicted) return absl::StrCat(Thousands(counted), " =");
  return absl::StrCat(Thousands(counted), " (predicted ", Thousands(predicted), ")");
}

// "1.25": how many times the least that any order sends.
std::string TimesBound(const AxisBytes& bytes) {
  if (bytes.bound <= 0) return "-";
  return absl::StrFormat("%.2f", static_cast<double>(bytes.counted) / static_cast<double>(bytes.bound));
}

// Whether anything goes between nodes; the columns for that are left out where nothing can.
bool IsOverNodes(const ParityResult& result) {
  return std::any_of(result.runs.begin(), result.runs.end(),
                     [](const ParityRun& run) { return run.bytes.ep_inter_node.counted > 0; });
}

std::vector<std::string> Header(bool over_nodes) {
  std::vector<std::string> header = {"order", "zero3", "verdict", "worst difference", "EP bytes", "/bound"};
  if (over_nodes) header.insert(header.end(), {"between nodes", "/bound"});
  header.insert(header.end(), {"TP bytes", "/bound", "collectives", "host ops/fetch", "peak gathered", "loss first",
                               "loss last", "ms/step"});
  return header;
}

std::string WorstDifference(const ParityRun& run) {
  if (run.verdict == Verdict::kReference) return "-";
  if (run.verdict == Verdict::kBounded) {
    return absl::StrFormat("%.2g (%.0f%% of bound)", run.max_abs_diff, 100 * run.bound_used);
  }
  return run.max_abs_diff == 0 ? "0" : absl::StrFormat("%.3g", run.max_abs_diff);
}

std::vector<std::string> Row(const ParityRun& run, bool over_nodes) {
  auto loss = [&run](bool first) {
    return run.loss.empty() ? std::string("-") : absl::StrFormat("%.4f", first ? run.loss.front() : run.loss.back());
  };
  std::vector<std::string> row = {run.order, run.zero3, VerdictName(run.verdict), WorstDifference(run)};
  const auto add_axis = [&](const AxisBytes& bytes) {
    row.push_back(CountedAndPredicted(bytes.counted, bytes.predicted));
    row.push_back(TimesBound(bytes));
  };
  add_axis(run.bytes.ep);
  if (over_nodes) add_axis(run.bytes.ep_inter_node);
  add_axis(run.bytes.tp);
  row.insert(row.end(), {absl::StrCat(run.collectives), absl::StrFormat("%.4g", run.leaf_fetch_host_ops),
                         CountedAndPredicted(run.peak_gathered_bytes.counted, run.peak_gathered_bytes.predicted),
                         loss(true), loss(false), absl::StrFormat("%.1f", run.ms_per_step)});
  return row;
}

std::vector<LossCurve> Curves(const ParityResult& result) {
  std::vector<LossCurve> curves;
  for (const ParityRun& run : result.runs) {
    curves.push_back({absl::StrCat(run.order, " ", run.zero3), run.loss});
  }
  return curves;
}

Json AxisJson(const AxisBytes& bytes) {
  Json json = {{"counted", bytes.counted}, {"predicted", bytes.predicted}};
  json["bound"] = bytes.bound >= 0 ? Json(bytes.bound) : Json(nullptr);
  return json;
}

Json BytesJson(const testutil::OrderBytes& bytes) {
  Json json = {{"ep", AxisJson(bytes.ep)}, {"tp", AxisJson(bytes.tp)}};
  json["ep"]["inter_node"] = AxisJson(bytes.ep_inter_node);
  json["tp"]["bound_at_least_ep"] = bytes.tp_bound_at_least_ep >= 0 ? Json(bytes.tp_bound_at_least_ep) : Json(nullptr);
  return json;
}

Json DifferenceJson(const ParityRun& run) {
  if (!run.first_difference.has_value()) return nullptr;
  const testutil::FirstDifference& first = *run.first_difference;
  return {{"step", first.step},           {"tensor", first.tensor},       {"rank", first.rank}, {"index", first.index},
          {"reference", first.reference}, {"candidate", first.candidate}, {"ulps", first.ulps}, {"bound", first.bound}};
}

Json RunJson(const ParityRun& run) {
  return {{"order", run.order},
          {"zero3", run.zero3},
          {"verdict", VerdictName(run.verdict)},
          {"note", run.note},
          {"max_abs_diff", run.max_abs_diff},
          {"bound_used", run.bound_used},
          {"skipped_steps", run.skipped_steps},
          {"loss_scale", run.loss_scale},
          {"first_difference", DifferenceJson(run)},
          {"loss", run.loss},
          {"bytes", BytesJson(run.bytes)},
          {"collectives", run.collectives},
          {"leaf_fetch_host_ops", run.leaf_fetch_host_ops},
          {"peak_gathered_bytes",
           {{"counted", run.peak_gathered_bytes.counted}, {"predicted", run.peak_gathered_bytes.predicted}}},
          {"ms_per_step", run.ms_per_step},
          {"parameter_digest", run.parameter_digest},
          {"gradient_digest", run.gradient_digest},
          {"loss_digest", run.loss_digest}};
}

Json LateJson(const std::vector<testutil::LateRank>& late_ranks) {
  Json json = Json::array();
  for (const testutil::LateRank& late : late_ranks) {
    json.push_back(
        {{"rank", late.rank}, {"calls", late.calls}, {"waited_ms", late.waited_ms}, {"longest_ms", late.longest_ms}});
  }
  return json;
}

std::string Headline(const ParityResult& result) {
  int held = 0, failed = 0;
  for (const ParityRun& run : result.runs) {
    if (run.verdict == Verdict::kReference) continue;
    (run.verdict == Verdict::kMismatch ? failed : held) += 1;
  }
  if (failed == 0) return absl::StrCat("all ", held, " candidates hold");
  return absl::StrCat(failed, " of ", held + failed, " candidates do NOT hold");
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

// Runs gnuplot over a script file; returns why there is no picture, or "".
std::string RunGnuplot(const std::string& script_path) {
  const std::string quoted = absl::StrReplaceAll(script_path, {{"'", "'\\''"}});
  const int code = std::system(absl::StrCat("gnuplot '", quoted, "' >/dev/null 2>&1").c_str());
  if (code == 0) return "";
  return "loss.png was not drawn: gnuplot is missing or failed (package gnuplot-nox)";
}

}  // namespace

std::string RenderDifference(const ParityRun& run) {
  if (!run.first_difference.has_value()) return "";
  const testutil::FirstDifference& first = *run.first_difference;
  std::string text = absl::StrFormat(
      "%s (zero3 %s): first difference at step %d, %s, rank %d, index %d: reference %.17g, candidate %.17g (%.4g ulps)",
      run.order, run.zero3, first.step, first.tensor, first.rank, first.index, first.reference, first.candidate,
      first.ulps);
  if (first.bound > 0) absl::StrAppendFormat(&text, ", bound %.3g", first.bound);
  return text;
}

std::string RenderTable(const ParityResult& result) {
  std::vector<std::vector<std::string>> rows = {Header(IsOverNodes(result))};
  for (const ParityRun& run : result.runs) rows.push_back(Row(run, IsOverNodes(result)));
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> lines;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (size_t i = 0; i < rows[r].size(); ++i) {
      const bool left = i < 3;
      const int width = static_cast<int>(widths[i]);
      line += left ? absl::StrFormat("%-*s", width, rows[r][i]) : absl::StrFormat("%*s", width, rows[r][i]);
      if (i + 1 < rows[r].size()) line += "  ";
    }
    lines.push_back(line);
    if (r == 0) lines.push_back(std::string(line.size(), '-'));
  }
  return absl::StrJoin(lines, "\n");
}

std::string RenderJson(const ParityResult& result) {
  Json json = {{"version", 1}};
  json["config"] = Json::object();
  for (const auto& [key, value] : result.config) json["config"][key] = value;
  json["runs"] = Json::array();
  for (const ParityRun& run : result.runs) json["runs"].push_back(RunJson(run));
  json["late_ranks"] = LateJson(result.late_ranks);
  // A corpus path may hold bytes that are no UTF-8; the report must still be written.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string RenderMarkdown(const ParityResult& result) {
  std::string text = absl::StrCat("### Parity: ", Headline(result), "\n\n![loss curves](loss.png)\n\n");
  auto add_row = [&text](const std::vector<std::string>& cells) {
    absl::StrAppend(&text, "| ",
                    absl::StrJoin(cells, " | ",
                                  [](std::string* out, const std::string& cell) {
                                    absl::StrAppend(out, absl::StrReplaceAll(cell, {{"|", "\\|"}}));
                                  }),
                    " |\n");
  };
  add_row(Header(IsOverNodes(result)));
  absl::StrAppend(&text, "|", absl::StrJoin(std::vector<std::string>(Header(IsOverNodes(result)).size(), "---"), "|"),
                  "|\n");
  for (const ParityRun& run : result.runs) add_row(Row(run, IsOverNodes(result)));
  absl::StrAppend(&text,
                  "\n`=`: equal to the prediction to the byte. Bytes are MoE traffic summed over ranks and steps.\n");
  for (const ParityRun& run : result.runs) {
    if (!run.note.empty()) absl::StrAppend(&text, "\n* **", run.order, "** (", run.zero3, "): ", run.note);
    if (run.first_difference.has_value()) absl::StrAppend(&text, "\n* ", RenderDifference(run));
  }
  absl::StrAppend(&text, "\n\n<details><summary>configuration</summary>\n\n");
  for (const auto& [key, value] : result.config) absl::StrAppend(&text, "* ", key, ": `", value, "`\n");
  absl::StrAppend(&text, "\n</details>\n");
  return text;
}

std::string RenderHtml(const ParityResult& result) {
  std::string text = absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<title>Parity: ",
      EscapeHtml(Headline(result)),
      "</title>\n<style>body{font-family:sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}"
      "table{border-collapse:collapse;font-size:13px}th,td{border:1px solid #ccc;padding:4px 8px;text-align:right}"
      "th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}.bad{background:#fbdada}.good{color:#1b6e3c}"
      ".scroll{overflow-x:auto}svg{max-width:900px;height:auto}dl{display:grid;grid-template-columns:max-content auto;"
      "gap:2px 14px;font-size:13px}dd{margin:0}</style></head><body>\n<h1>Parity: ",
      EscapeHtml(Headline(result)), "</h1>\n", RenderLossSvg(Curves(result)), "<div class=\"scroll\"><table><tr>");
  for (const std::string& cell : Header(IsOverNodes(result))) absl::StrAppend(&text, "<th>", EscapeHtml(cell), "</th>");
  absl::StrAppend(&text, "</tr>\n");
  for (const ParityRun& run : result.runs) {
    absl::StrAppend(&text, run.verdict == Verdict::kMismatch ? "<tr class=\"bad\">" : "<tr>");
    for (const std::string& cell : Row(run, IsOverNodes(result)))
      absl::StrAppend(&text, "<td>", EscapeHtml(cell), "</td>");
    absl::StrAppend(&text, "</tr>\n");
  }
  absl::StrAppend(&text,
                  "</table></div>\n<p>“=” means equal to the prediction to the byte. Bytes are MoE traffic "
                  "summed over ranks and steps.</p>\n<ul>\n");
  for (const ParityRun& run : result.runs) {
    if (!run.note.empty()) {
      absl::StrAppend(&text, "<li><b>", EscapeHtml(run.order), "</b> (", EscapeHtml(run.zero3),
                      "): ", EscapeHtml(run.note), "</li>\n");
    }
    if (run.first_difference.has_value()) absl::StrAppend(&text, "<li>", EscapeHtml(RenderDifference(run)), "</li>\n");
  }
  absl::StrAppend(&text, "</ul>\n<h2>Configuration</h2>\n<dl>\n");
  for (const auto& [key, value] : result.config) {
    absl::StrAppend(&text, "<dt>", EscapeHtml(key), "</dt><dd><code>", EscapeHtml(value), "</code></dd>\n");
  }
  absl::StrAppend(&text, "</dl>\n</body></html>\n");
  return text;
}

absl::Status PrepareOutputFolder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    return absl::InvalidArgumentError(absl::StrCat("cannot make --out folder ", folder, ": ", error.message()));
  const std::string probe = absl::StrCat(folder, "/.writable");
  if (!WriteFile(probe, "").ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--out folder ", folder, " cannot be written"));
  }
  std::filesystem::remove(probe, error);
  return absl::OkStatus();
}

absl::StatusOr<ReportFiles> WriteReport(const ParityResult& result, const std::string& folder) {
  ReportFiles files;
  const std::string base = absl::StrCat(folder, "/");
  const std::pair<const char*, std::string> texts[] = {
      {"report.json", RenderJson(result)}, {"report.html", RenderHtml(result)}, {"report.md", RenderMarkdown(result)}};
  for (const auto& [name, text] : texts) {
    EK_RETURN_IF_ERROR(WriteFile(base + name, text));
    files.written.push_back(base + name);
  }
  const std::string png = base + "loss.png";
  const std::string script = base + ".loss.gnuplot";
  EK_RETURN_IF_ERROR(WriteFile(script, RenderLossGnuplot(Curves(result), png)));
  files.warning = RunGnuplot(script);
  std::error_code ignored;
  std::filesystem::remove(script, ignored);
  if (files.warning.empty()) files.written.push_back(png);
  return files;
}

}  // namespace evenkeel::tools

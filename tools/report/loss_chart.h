// Loss curves as pictures: SVG text for the HTML report, and a gnuplot script for the PNG beside it.
//
// Curves that are bitwise equal lie on top of one another, so each candidate is dashed at its own phase over a wide
// reference line, and a second panel shows |loss - reference| on a log scale, with a row for exact zeros.
//
//   std::string svg = RenderLossSvg({{"reference", loss_a}, {"fused", loss_b}});
#ifndef EVENKEEL_TOOLS_REPORT_LOSS_CHART_H_
#define EVENKEEL_TOOLS_REPORT_LOSS_CHART_H_

#include <string>
#include <vector>

namespace evenkeel::tools {

// One run's loss by step. The first curve of a chart is the reference.
struct LossCurve {
  std::string name;
  std::vector<double> loss;
};

// A complete <svg> element, no scripts and no external references. Non-finite points are left out.
std::string RenderLossSvg(const std::vector<LossCurve>& curves);

// A gnuplot program that draws the same two panels into `png_path`.
std::string RenderLossGnuplot(const std::vector<LossCurve>& curves, const std::string& png_path);

// "&lt;" for "<" and so on: text for HTML and SVG.
std::string EscapeHtml(const std::string& text);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_REPORT_LOSS_CHART_H_

#include "evenkeel/tools/report/loss_chart.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace evenkeel::tools {
namespace {

constexpr const char* kColors[] = {"#9aa5b1", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#2e7d32", "#8d5524"};
constexpr double kWidth = 830, kLeft = 72, kRight = 235, kTop = 36;
constexpr double kLossHeight = 260, kGap = 58, kDiffHeight = 130, kBottom = 44;
constexpr double kZeroBand = 28;  // pixels for the row of exact zeros

const char* Color(size_t i) { return kColors[i % std::size(kColors)]; }

// Curves that lie on one another are all seen: each is narrower than the one before it, the reference the widest.
double LineWidth(size_t i, size_t num_curves) {
  const double step = std::min(2.0, 14.0 / static_cast<double>(num_curves));
  return 1.5 + step * static_cast<double>(num_curves - 1 - i);
}

struct Range {
  double low = 0, high = 1;
};

// A step of 1, 2 or 5 times a power of ten that cuts `span` into about `parts`.
double NiceStep(double span, int parts) {
  const double raw = span / parts;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10 * power;
}

Range LossRange(const std::vector<LossCurve>& curves) {
  Range range{HUGE_VAL, -HUGE_VAL};
  for (const LossCurve& curve : curves) {
    for (double loss : curve.loss) {
      if (!std::isfinite(loss)) continue;
      range.low = std::min(range.low, loss);
      range.high = std::max(range.high, loss);
    }
  }
  if (!(range.low <= range.high)) return {0, 1};
  const double margin = std::max((range.high - range.low) * 0.06, 1e-6);
  return {range.low - margin, range.high + margin};
}

// |loss - reference| of every finite pair.
std::vector<double> Differences(const LossCurve& curve, const LossCurve& reference) {
  std::vector<double> differences;
  for (size_t i = 0; i < std::min(curve.loss.size(), reference.loss.size()); ++i) {
    differences.push_back(std::fabs(curve.loss[i] - reference.loss[i]));
  }
  return differences;
}

// Powers of ten that enclose all non-zero differences.
Range DifferenceExponents(const std::vector<LossCurve>& curves) {
  Range range{HUGE_VAL, -HUGE_VAL};
  for (const LossCurve& curve : curves) {
    for (double difference : Differences(curve, curves.front())) {
      if (!(difference > 0) || !std::isfinite(difference)) continue;
      range.low = std::min(range.low, std::floor(std::log10(difference)));
      range.high = std::max(range.high, std::ceil(std::log10(difference)));
    }
  }
  if (!(range.low <= range.high)) return {-12, -6};
  if (range.high - range.low < 2) range.high = range.low + 2;
  return range;
}

class Svg {
 public:
  Svg(const std::vector<LossCurve>& curves, size_t steps) : curves_(curves), steps_(std::max<size_t>(steps, 2)) {
    height_ = kTop + kLossHeight + kGap + kDiffHeight + kBottom;
    absl::StrAppendFormat(&text_,
                          "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" role=\"img\" "
                          "aria-label=\"loss curves\" font-family=\"sans-serif\" font-size=\"12\">\n"
                          "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
                          kWidth, height_);
  }

  std::string Render() {
    DrawLossPanel();
    DrawDifferencePanel();
    DrawLegend();
    return absl::StrCat(text_, "</svg>\n");
  }

 private:
  double X(size_t step) const { return kLeft + (kWidth - kLeft - kRight) * step / (steps_ - 1); }

  void Text(double x, double y, const char* anchor, const std::string& what, const char* extra = "") {
    absl::StrAppendFormat(&text_, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" fill=\"#333\" %s>%s</text>\n", x, y,
                          anchor, extra, EscapeHtml(what));
  }
  void Line(double x1, double y1, double x2, double y2, const char* color) {
    absl::StrAppendFormat(&text_, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x1, y1, x2,
                          y2, color);
  }
  void Frame(double top, double bottom) {
    absl::StrAppendFormat(
        &text_, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#888\"/>\n", kLeft,
        top, kWidth - kLeft - kRight, bottom - top);
    const double step = std::max(1.0, NiceStep(static_cast<double>(steps_ - 1), 8));
    for (double at = 0; at <= static_cast<double>(steps_ - 1); at += step) {
      Line(X(static_cast<size_t>(at)), bottom, X(static_cast<size_t>(at)), bottom + 4, "#888");
      Text(X(static_cast<size_t>(at)), bottom + 17, "middle", absl::StrFormat("%g", at));
    }
  }

  void Curve(size_t i, double width, const std::string& points) {
    absl::StrAppendFormat(&text_,
                          "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" stroke-linejoin=\"round\" "
                          "points=\"%s\"/>\n",
                          Color(i), width, points);
  }

  void DrawLossPanel() {
    const Range range = LossRange(curves_);
    const double bottom = kTop + kLossHeight;
    auto y = [&](double loss) { return bottom - kLossHeight * (loss - range.low) / (range.high - range.low); };
    Text(kLeft, kTop - 12, "start", "loss by step (nats per byte)", "font-weight=\"bold\"");
    const double step = NiceStep(range.high - range.low, 6);
    for (double at = std::ceil(range.low / step) * step; at <= range.high; at += step) {
      Line(kLeft, y(at), kWidth - kRight, y(at), "#eee");
      Text(kLeft - 6, y(at) + 4, "end", absl::StrFormat("%.4g", at));
    }
    Frame(kTop, bottom);
    for (size_t i = 0; i < curves_.size(); ++i) {
      std::string points;
      for (size_t step_index = 0; step_index < curves_[i].loss.size(); ++step_index) {
        const double loss = curves_[i].loss[step_index];
        if (std::isfinite(loss)) absl::StrAppendFormat(&points, "%.1f,%.1f ", X(step_index), y(loss));
      }
      Curve(i, LineWidth(i, curves_.size()), points);
    }
  }

  void DrawDifferencePanel() {
    const Range exponents = DifferenceExponents(curves_);
    const double top = kTop + kLossHeight + kGap;
    const double bottom = top + kDiffHeight;
    const double log_bottom = bottom - kZeroBand;
    auto y = [&](double difference) {
      if (!(difference > 0)) return bottom - kZeroBand / 2;
      const double at = (std::log10(difference) - exponents.low) / (exponents.high - exponents.low);
      return log_bottom - (log_bottom - top) * at;
    };
    Text(kLeft, top - 12, "start", "|loss - reference|", "font-weight=\"bold\"");
    Text(kLeft - 6, bottom - kZeroBand / 2 + 4, "end", "exactly 0");
    Line(kLeft, log_bottom, kWidth - kRight, log_bottom, "#ccc");
    const double step = std::max(1.0, std::ceil((exponents.high - exponents.low) / 4));
    for (double at = exponents.low; at <= exponents.high; at += step) {
      Text(kLeft - 6, y(std::pow(10.0, at)) + 4, "end", absl::StrFormat("1e%g", at));
    }
    Frame(top, bottom);
    Text((kLeft + kWidth - kRight) / 2, bottom + 34, "middle", "step");
    for (size_t i = 1; i < curves_.size(); ++i) {
      std::string points;
      const std::vector<double> differences = Differences(curves_[i], curves_.front());
      for (size_t s = 0; s < differences.size(); ++s) {
        if (std::isfinite(differences[s])) absl::StrAppendFormat(&points, "%.1f,%.1f ", X(s), y(differences[s]));
      }
      Curve(i, LineWidth(i, curves_.size()) / 2 + 0.5, points);
    }
  }

  void DrawLegend() {
    const double x = kWidth - kRight + 16;
    for (size_t i = 0; i < curves_.size(); ++i) {
      const double y = kTop + 14 + 20 * static_cast<double>(i);
      absl::StrAppendFormat(
          &text_, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"%g\"/>\n", x,
          y - 4, x + 24, y - 4, Color(i), LineWidth(i, curves_.size()));
      Text(x + 30, y, "start", curves_[i].name);
    }
  }

  const std::vector<LossCurve>& curves_;
  const size_t steps_;
  double height_ = 0;
  std::string text_;
};

// A quoted gnuplot string. Names are data, so quotes and line ends must not end it.
std::string Quote(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "''"}, {"\n", " "}}), "'");
}

}  // namespace

std::string EscapeHtml(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string RenderLossSvg(const std::vector<LossCurve>& curves) {
  if (curves.empty()) return "<svg xmlns=\"http://www.w3.org/2000/svg\"/>\n";
  size_t steps = 0;
  for (const LossCurve& curve : curves) steps = std::max(steps, curve.loss.size());
  return Svg(curves, steps).Render();
}

std::string RenderLossGnuplot(const std::vector<LossCurve>& curves, const std::string& png_path) {
  if (curves.empty()) return "";
  std::string script =
      absl::StrCat("set terminal pngcairo noenhanced size 1100,760 font 'sans,11'\nset output ", Quote(png_path),
                   "\nset encoding utf8\nset grid\nset key outside right top\nset lmargin 15\nset rmargin 30\n");
  std::string loss_plots, difference_plots;
  bool any_difference = false;
  // gnuplot fails on a panel without a single finite point.
  const auto any_finite = [](const std::vector<double>& values) {
    return std::any_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
  };
  for (size_t i = 0; i < curves.size(); ++i) {
    absl::StrAppend(&script, "$run", i, " << EOD\n");
    const std::vector<double> differences = Differences(curves[i], curves.front());
    for (size_t s = 0; s < curves[i].loss.size(); ++s) {
      const double difference = s < differences.size() ? differences[s] : 0;
      any_difference = any_difference || difference > 0;
      // An exact zero has no logarithm: it is drawn on the floor of the panel.
      absl::StrAppendFormat(&script, "%d %.9g %.9g\n", static_cast<int>(s), curves[i].loss[s],
                            difference > 0 ? difference : 1e-16);
    }
    absl::StrAppend(&script, "EOD\n");
    const double width = LineWidth(i, curves.size());
    const auto style = [i](double lw) { return absl::StrFormat("lc rgb '%s' lw %g", Color(i), lw); };
    if (!any_finite(curves[i].loss)) continue;
    absl::StrAppend(&loss_plots, loss_plots.empty() ? "" : ", ", "$run", i, " using 1:2 with lines ", style(width),
                    " title ", Quote(curves[i].name));
    if (i > 0 && any_finite(differences)) {
      absl::StrAppend(&difference_plots, difference_plots.empty() ? "" : ", ", "$run", i, " using 1:3 with lines ",
                      style(width / 2 + 0.5), " title ", Quote(curves[i].name));
    }
  }
  absl::StrAppend(&script, "set multiplot\nset origin 0,0.36\nset size 1,0.64\nset ylabel 'loss (nats per byte)'\n",
                  loss_plots.empty() ? "set xrange [0:1]\nset yrange [0:1]\nplot NaN title 'no finite loss'" : "plot ",
                  loss_plots, "\n");
  if (!difference_plots.empty()) {
    absl::StrAppend(&script,
                    "set origin 0,0\nset size 1,0.36\nset xlabel 'step'\nset ylabel '|loss - reference|'\n"
                    "set logscale y\nset format y '%.0e'\nset yrange [5e-17:",
                    any_difference ? "*" : "1e-12", "]\nset ytics add ('exactly 0' 1e-16)\nplot ", difference_plots,
                    "\n");
  }
  absl::StrAppend(&script, "unset multiplot\n");
  return script;
}

}  // namespace evenkeel::tools

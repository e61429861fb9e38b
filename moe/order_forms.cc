// The closed forms of an order's traffic.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/order_cost.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }
bool AtExperts(const ValueType& type) { return type.ep.dim == Dim::kExperts; }

// Terms of a closed form. Each is count * factor / (T when divided) * unit; the factor is (x-1)/x
// of the group that the step spans: x is T, E, N or L.
// kSums and kGatheredSums count the wide rows of partial sums.
enum Unit {
  kV,
  kArrivedRows,
  kTokenRows,
  kRoutedRows,
  kDestinationRows,
  kSums,
  kGathered,
  kGatheredSums,
  kNodeRows,
  kNodeSumRows
};
constexpr int kNumUnits = 10;
constexpr char kSpans[] = {'T', 'E', 'N', 'L'};
constexpr int kNumSpans = 4;
struct Terms {
  // [span][unit][divided by T]
  std::array<std::array<std::array<int, 2>, kNumUnits>, kNumSpans> count = {};
  // Of one span.
  int& at(char span, Unit unit, int divided) {
    return count[std::find(kSpans, kSpans + kNumSpans, span) - kSpans][unit][divided];
  }
};

char SpanOf(const Step& step) {
  if (step.level == Level::kPeers) return 'N';
  if (step.level == Level::kNode) return 'L';
  return step.axis == comm::Axis::kEp ? 'E' : 'T';
}

Unit UnitOf(const ValueType& type, bool backward) {
  if (type.form == Dim::kSlots) return kV;
  if (type.form == Dim::kTokens) return kTokenRows;
  if (type.form == Dim::kNodes || type.form == Dim::kNodeSums) {
    return (type.form == Dim::kNodeSums) != backward ? kNodeSumRows : kNodeRows;
  }
  if (type.form != Dim::kRows) {
    const bool sums = (type.form == Dim::kSums) != backward;
    if (AtExperts(type) && !IsVarying(type.tp)) return sums ? kGatheredSums : kGathered;
    return sums ? kSums : kDestinationRows;
  }
  return AtExperts(type) && !IsVarying(type.tp) ? kArrivedRows : kRoutedRows;
}

void AddTerms(const TypedStep& typed, bool sliced_rows, bool backward, Terms* terms) {
  const char span = SpanOf(typed.step);
  const Unit unit = UnitOf(typed.before, backward);
  switch (typed.step.kind) {
    case StepKind::kAllGather:
      ++terms->at(span, UnitOf(typed.after, backward), 0);
      break;
    case StepKind::kReduceScatter:
      ++terms->at(span, unit, 0);
      break;
    case StepKind::kAllReduce:
      terms->at(span, unit, 0) += 2;
      break;
    case StepKind::kAllToAll:
      ++terms->at(span, kV, IsVarying(typed.before.tp) ? 1 : 0);
      break;
    case StepKind::kAllToAllV: {
      if (unit == kNodeRows || unit == kNodeSumRows) {
        ++terms->at(span, unit, sliced_rows ? 1 : 0);
        break;
      }
      const bool by_destination = unit != kRoutedRows && unit != kArrivedRows;
      const bool sums = unit == kSums || unit == kGatheredSums;
      ++terms->at(span, by_destination ? (sums ? kSums : kDestinationRows) : kRoutedRows, sliced_rows ? 1 : 0);
      break;
    }
    default:
      break;
  }
}

std::string Coefficient(int count) { return count == 1 ? "" : absl::StrCat(count); }

// "(E-1)/(ET)".
std::string Fraction(char span, int divided) {
  const std::string x(1, span);
  return divided == 1 ? absl::StrCat("(", x, "-1)/(", x, "T)") : absl::StrCat("(", x, "-1)/", x);
}

// Appends the terms of one span, those with a common factor in one bracket.
void AppendSpan(Terms& terms, char span, std::vector<std::string>* parts) {
  for (int divided : {0, 1}) {
    const std::string fraction = Fraction(span, divided);
    const auto count = [&](Unit unit) { return terms.at(span, unit, divided); };
    const auto append = [&](Unit unit, absl::string_view text) {
      if (count(unit) > 0) parts->push_back(absl::StrCat(Coefficient(count(unit)), fraction, " ", text));
    };
    const auto append_whole = [&](Unit unit, absl::string_view text) {
      if (count(unit) > 0) parts->push_back(absl::StrCat(Coefficient(count(unit)), count(unit) > 1 ? " " : "", text));
    };
    append(kV, "V");
    append(kRoutedRows, "k s h b");
    const char* rows = span == 'N' ? "Dn" : span == 'L' ? "Dl" : "D";
    append_whole(kDestinationRows, absl::StrCat(rows, " h b"));
    append_whole(kSums, absl::StrCat(rows, " h w"));
    append_whole(kNodeRows, "M h b");
    append_whole(kNodeSumRows, "M h w");
    append(kGathered, "G h b");
    append(kGatheredSums, "G h w");
    if (count(kArrivedRows) > 0 && count(kTokenRows) > 0) {
      parts->push_back(absl::StrCat(fraction, " (", Coefficient(count(kArrivedRows)), "R + ",
                                    Coefficient(count(kTokenRows)), "s) h b"));
    } else {
      append(kArrivedRows, "R h b");
      append(kTokenRows, "s h b");
    }
  }
}

std::string FormatTerms(Terms& terms, absl::string_view spans) {
  std::vector<std::string> parts;
  for (char span : spans) AppendSpan(terms, span, &parts);
  return parts.empty() ? "0" : absl::StrJoin(parts, " + ");
}

}  // namespace

AxisFormula ClosedForms(const TypedOrder& order, bool backward) {
  const bool sliced_rows = DispatchesOwnTokens(order);
  Terms terms;
  for (const TypedStep& typed : backward ? order.backward : order.forward) {
    AddTerms(typed, sliced_rows, backward, &terms);
  }
  return {.tp = FormatTerms(terms, "T"), .ep = FormatTerms(terms, "ENL")};
}

}  // namespace evenkeel::moe

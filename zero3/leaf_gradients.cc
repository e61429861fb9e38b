#include "evenkeel/zero3/leaf_gradients.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

constexpr size_t kUnitsPerWord = 63;  // of an i64, without its sign

}  // namespace

LeafGradients::LeafGradients(std::vector<Unit*> units, absl::Span<const Leaf> leaves, const StateAccess* homes,
                             int micro_batches, std::unique_ptr<GradientReducer> reducer)
    : units_(std::move(units)), homes_(homes), micro_batches_(micro_batches), reducer_(std::move(reducer)) {
  for (const Leaf& from : leaves) {
    LeafState& leaf = leaves_.emplace_back();
    leaf.parameters = from.parameters;
    for (int p : from.parameters) leaf.units.push_back(homes_->home(p).unit);
    std::sort(leaf.units.begin(), leaf.units.end());
    leaf.units.erase(std::unique(leaf.units.begin(), leaf.units.end()), leaf.units.end());
  }
  for (const Unit* unit : units_) states_.emplace_back().flushed.assign(unit->members().leaves.size(), false);
}

// The views are only written when a unit was opened anew: other threads may be reading them.
absl::StatusOr<absl::Span<const TensorView>> LeafGradients::Open(int index) {
  LeafState& leaf = leaves_[static_cast<size_t>(index)];
  std::vector<uint64_t> openings;
  for (int u : leaf.units) {
    EK_RETURN_IF_ERROR(reducer_->Open(u).status());
    openings.push_back(reducer_->opening(u));
  }
  if (openings == leaf.openings) return absl::MakeConstSpan(leaf.views);
  leaf.openings = std::move(openings);
  leaf.views.clear();
  for (int p : leaf.parameters) {
    const StateAccess::Home home = homes_->home(p);
    EK_ASSIGN_OR_RETURN(const absl::Span<const TensorView> of_unit, reducer_->Open(home.unit));
    leaf.views.push_back(of_unit[static_cast<size_t>(home.position)]);
  }
  return absl::MakeConstSpan(leaf.views);
}

absl::Status LeafGradients::Reduce(int unit) {
  EK_RETURN_IF_ERROR(reducer_->Flush(unit));
  UnitState& state = states_[static_cast<size_t>(unit)];
  state.flushed.assign(state.flushed.size(), false);
  state.reduced = true;
  return absl::OkStatus();
}

absl::Status LeafGradients::Flush(int leaf) {
  for (int u : leaves_[static_cast<size_t>(leaf)].units) {
    std::vector<bool>& flushed = states_[static_cast<size_t>(u)].flushed;
    const std::vector<int>& users = units_[static_cast<size_t>(u)]->members().leaves;
    const size_t user = static_cast<size_t>(std::find(users.begin(), users.end(), leaf) - users.begin());
    // The leaf may begin its next micro-batch before other users of the unit have flushed: their part is zero.
    if (flushed[user]) EK_RETURN_IF_ERROR(Reduce(u));
    flushed[user] = true;
    if (std::find(flushed.begin(), flushed.end(), false) == flushed.end()) EK_RETURN_IF_ERROR(Reduce(u));
  }
  return absl::OkStatus();
}

void LeafGradients::Reset(UnitState& state) {
  state.flushed.assign(state.flushed.size(), false);
  state.reduced = false;
}

std::vector<int64_t> LeafGradients::OpenUnits() const {
  std::vector<int64_t> open(units_.size() / kUnitsPerWord + 1, 0);
  for (size_t u = 0; u < units_.size(); ++u) {
    if (reducer_->is_open(static_cast<int>(u))) open[u / kUnitsPerWord] |= int64_t{1} << (u % kUnitsPerWord);
  }
  return open;
}

absl::Status LeafGradients::FlushRest(absl::Span<const int64_t> open) {
  for (size_t u = 0; u < units_.size(); ++u) {
    UnitState& state = states_[u];
    const bool pending = std::find(state.flushed.begin(), state.flushed.end(), true) != state.flushed.end();
    const bool unused = !pending && !state.reduced;
    const bool open_somewhere = (open[u / kUnitsPerWord] >> (u % kUnitsPerWord) & 1) != 0;
    if (pending || unused || open_somewhere) {
      // A unit that nobody used is zero in all of its micro-batches.
      for (int i = 0; i < (unused ? micro_batches_ : 1); ++i) {
        EK_RETURN_IF_ERROR(reducer_->Flush(static_cast<int>(u)));
      }
    }
    Reset(state);
  }
  EK_RETURN_IF_ERROR(reducer_->Finish());
  return reducer_->CheckComplete();
}

int64_t LeafGradients::PredictPendingBytes() const {
  int64_t shards = 0;
  for (const Unit* unit : units_) {
    if (!unit->trainable()) continue;
    shards += unit->layout().gradient_counts[static_cast<size_t>(unit->rank())] * SizeOf(unit->gradient_dtype());
  }
  int64_t levels = 0;
  while ((int64_t{1} << levels) < micro_batches_) ++levels;
  return levels * shards;
}

void LeafGradients::Discard() {
  reducer_->Discard();
  for (UnitState& state : states_) Reset(state);
}

}  // namespace evenkeel::zero3

#include "evenkeel/zero3/shard_guard.h"

#include <cstddef>
#include <utility>

#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::zero3 {
namespace {

uint64_t DigestOf(const Unit& unit) {
  const TensorView shard = unit.weight_shard();
  return Digest64(shard.raw(), static_cast<size_t>(shard.num_bytes()));
}

}  // namespace

ShardGuard::ShardGuard(std::vector<Unit*> units) : units_(std::move(units)), entries_(units_.size()) { Remember(); }

void ShardGuard::Remember() {
  for (size_t u = 0; u < units_.size(); ++u) entries_[u] = {DigestOf(*units_[u])};
}

void ShardGuard::Look(size_t unit) {
  Entry& entry = entries_[unit];
  entry.changed = entry.changed || DigestOf(*units_[unit]) != entry.digest;
}

void ShardGuard::Verify(int unit) {
  const size_t u = static_cast<size_t>(unit);
  if (std::exchange(entries_[u].verified, true)) return;
  Look(u);
}

std::vector<std::string> ShardGuard::Changed() {
  std::vector<std::string> names;
  for (size_t u = 0; u < units_.size(); ++u) {
    Look(u);
    if (entries_[u].changed) names.push_back(units_[u]->name());
  }
  return names;
}

}  // namespace evenkeel::zero3

// Digests of this rank's weight shards: taken after a step, verified before a shard's next gather and before the next
// step.
//
// Between two steps nobody writes a shard; whatever changes one (a stray write, a flipped bit) trains on silently. A
// rank cannot stop at the gather, because the others are in it; it remembers, and the step's vote stops everybody.
#ifndef EVENKEEL_ZERO3_SHARD_GUARD_H_
#define EVENKEEL_ZERO3_SHARD_GUARD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

// Not thread-safe. The units outlive it.
class ShardGuard {
 public:
  explicit ShardGuard(std::vector<Unit*> units);

  // Takes the shards as they are now for what is right. Both streams are idle.
  void Remember();
  // Before a gather: looks at the unit's shard, once after every Remember.
  void Verify(int unit);
  // Looks at all shards. The names of the units that were found changed since Remember, at their gather or now.
  std::vector<std::string> Changed();

 private:
  struct Entry {
    uint64_t digest = 0;
    bool verified = false;
    bool changed = false;
  };
  void Look(size_t unit);

  const std::vector<Unit*> units_;
  std::vector<Entry> entries_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_SHARD_GUARD_H_

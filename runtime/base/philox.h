// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A value is a pure
// function of (key, counter), so it depends on what it is for and never on
// which rank, lane or thread asks.
//
//   PhiloxStream stream(PhiloxKey(seed).Add(step).Add("layer.0.router"));
//   float u = stream.Uniform(global_index);          // in [0, 1)
#ifndef EVENKEEL_RUNTIME_BASE_PHILOX_H_
#define EVENKEEL_RUNTIME_BASE_PHILOX_H_

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Ten rounds of Philox4x32. Matches the Random123 known-answer tests.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A 64-bit key folded from the parts of a meaning: seed, step, layer, name.
// Order matters.
class PhiloxKey {
 public:
  explicit PhiloxKey(uint64_t seed) : value_(seed) {}
  PhiloxKey Add(uint64_t part) const;
  PhiloxKey Add(absl::string_view part) const;
  uint64_t value() const { return value_; }

 private:
  uint64_t value_;
};

// Random access to one stream. Index i gives the same value on every rank.
// Immutable, thread-safe.
class PhiloxStream {
 public:
  explicit PhiloxStream(PhiloxKey key) : key_(key.value()) {}

  uint32_t Bits32(uint64_t index) const;
  uint64_t Bits64(uint64_t index) const;
  // In [0, 1), a multiple of 2^-24 (exact in float).
  float Uniform(uint64_t index) const;
  // Standard normal (Box-Muller in double, rounded once).
  double Normal(uint64_t index) const;
  // Standard Gumbel: -log(-log(u)), u in (0, 1).
  double Gumbel(uint64_t index) const;
  // In [0, bound), bound >= 1, by multiply-shift of 64 random bits.
  uint64_t Below(uint64_t index, uint64_t bound) const;

 private:
  uint64_t key_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_PHILOX_H_

#include "evenkeel/runtime/base/philox.h"

#include <cmath>

#include "evenkeel/runtime/base/digest.h"

namespace evenkeel {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;
constexpr double kTwoPi = 6.283185307179586476925286766559;

// (0, 1): never 0, never 1.
double OpenUnit(uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

PhiloxKey PhiloxKey::Add(uint64_t part) const {
  const std::array<uint32_t, 4> mixed =
      Philox4x32({static_cast<uint32_t>(part), static_cast<uint32_t>(part >> 32), 0x656b6579u, 0u},
                 {static_cast<uint32_t>(value_), static_cast<uint32_t>(value_ >> 32)});
  return PhiloxKey(mixed[0] | (uint64_t{mixed[1]} << 32));
}

PhiloxKey PhiloxKey::Add(absl::string_view part) const { return Add(Digest64(part)).Add(part.size()); }

uint64_t PhiloxStream::Bits64(uint64_t index) const {
  const std::array<uint32_t, 4> bits =
      Philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0u, 0u},
                 {static_cast<uint32_t>(key_), static_cast<uint32_t>(key_ >> 32)});
  return bits[0] | (uint64_t{bits[1]} << 32);
}

uint32_t PhiloxStream::Bits32(uint64_t index) const { return static_cast<uint32_t>(Bits64(index)); }

float PhiloxStream::Uniform(uint64_t index) const { return static_cast<float>(Bits32(index) >> 8) * 0x1p-24f; }

double PhiloxStream::Normal(uint64_t index) const {
  const std::array<uint32_t, 4> bits =
      Philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 1u, 0u},
                 {static_cast<uint32_t>(key_), static_cast<uint32_t>(key_ >> 32)});
  const double u = OpenUnit(bits[0] | (uint64_t{bits[1]} << 32));
  const double v = OpenUnit(bits[2] | (uint64_t{bits[3]} << 32));
  return std::sqrt(-2.0 * std::log(u)) * std::cos(kTwoPi * v);
}

double PhiloxStream::Gumbel(uint64_t index) const { return -std::log(-std::log(OpenUnit(Bits64(index)))); }

uint64_t PhiloxStream::Below(uint64_t index, uint64_t bound) const {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(Bits64(index)) * bound) >> 64);
}

}  // namespace evenkeel

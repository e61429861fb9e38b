#include "evenkeel/comm/block_copy.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace evenkeel::comm {
namespace {

constexpr int64_t kAssumedCacheBytes = 32 << 20;

int64_t LastCacheBytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const int64_t bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return kAssumedCacheBytes;
}

// In pieces: glibc copies those with string instructions, which need not read what they overwrite, and long spans with
// vector stores, which do; from a few MiB on that is a third of the time.
void CopyThroughCache(std::byte* to, const std::byte* from, int64_t bytes) {
  constexpr int64_t kPiece = 256 << 10;
  for (int64_t begin = 0; begin < bytes; begin += kPiece) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(std::min(kPiece, bytes - begin)));
  }
}

#if defined(__SSE2__)
// Whole lines of `to`, which is aligned to 64.
void StreamLines(std::byte* to, const std::byte* from, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i, to += 64, from += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // such stores are not ordered otherwise: before anybody is told
}
#endif

}  // namespace

bool OutgrowsCache(int64_t bytes, int ranks) { return ranks > 0 && bytes > LastCacheBytes() / ranks; }

void CopyBlock(void* to, const void* from, int64_t bytes, bool past_cache) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
#if defined(__SSE2__)
  if (past_cache && bytes >= 4096) {
    const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % 64);
    const int64_t lines = (bytes - head) / 64;
    std::memcpy(target, source, static_cast<size_t>(head));
    StreamLines(target + head, source + head, lines);
    const int64_t done = head + lines * 64;
    std::memcpy(target + done, source + done, static_cast<size_t>(bytes - done));
    return;
  }
#endif
  CopyThroughCache(target, source, bytes);
}

}  // namespace evenkeel::comm

#include "evenkeel/runtime/base/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace evenkeel {

uint64_t Digest64(const void* data, size_t bytes) { return bytes == 0 ? XXH3_64bits("", 0) : XXH3_64bits(data, bytes); }

uint64_t Digest64(absl::string_view text) { return Digest64(text.data(), text.size()); }

uint64_t CombineDigests(uint64_t first, uint64_t second) {
  const uint64_t both[2] = {first, second};
  return Digest64(both, sizeof(both));
}

}  // namespace evenkeel

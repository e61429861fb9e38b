// 64-bit content digests (XXH3). For equality checks between ranks, runs and
// files; not cryptographic.
#ifndef EVENKEEL_RUNTIME_BASE_DIGEST_H_
#define EVENKEEL_RUNTIME_BASE_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace evenkeel {

// XXH3 of `bytes` bytes at `data`; `data` may be null when `bytes` is 0.
uint64_t Digest64(const void* data, size_t bytes);
uint64_t Digest64(absl::string_view text);
// Order-dependent combination of two digests.
uint64_t CombineDigests(uint64_t first, uint64_t second);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_DIGEST_H_

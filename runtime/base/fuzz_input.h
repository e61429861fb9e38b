// Turns the bytes that a fuzzer supplies into values. Out of bytes, everything is zero.
//
//   extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
//     evenkeel::FuzzInput input(data, size);
//     const int64_t tokens = input.Between(0, 40);
//     ...
//     return 0;
//   }
#ifndef EVENKEEL_RUNTIME_BASE_FUZZ_INPUT_H_
#define EVENKEEL_RUNTIME_BASE_FUZZ_INPUT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Reads front to back. Not thread-safe.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  size_t remaining() const { return size_; }
  uint8_t Byte() { return Take<uint8_t>(); }
  bool Bool() { return Byte() % 2 == 1; }
  // In [low, high]; low <= high.
  int64_t Between(int64_t low, int64_t high) {
    const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    const uint64_t bits = span <= 256 && span != 0 ? Byte() : Take<uint64_t>();
    return static_cast<int64_t>(static_cast<uint64_t>(low) + (span == 0 ? bits : bits % span));
  }
  // Any bit pattern: infinities, NaNs and denormals too.
  float AnyFloat() { return Take<float>(); }
  // All that is left.
  absl::string_view Rest() {
    const absl::string_view rest(reinterpret_cast<const char*>(data_), size_);
    size_ = 0;
    return rest;
  }

 private:
  template <typename T>
  T Take() {
    T value = {};
    const size_t n = size_ < sizeof(T) ? size_ : sizeof(T);
    if (n > 0) std::memcpy(&value, data_, n);
    data_ += n;
    size_ -= n;
    return value;
  }

  const uint8_t* data_;
  size_t size_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_FUZZ_INPUT_H_

// a * b + c on the device, with two roundings as on the host: what the test of
// the toolkit runs.
#ifndef EVENKEEL_THIRD_PARTY_CUDA_MULTIPLY_ADD_H_
#define EVENKEEL_THIRD_PARTY_CUDA_MULTIPLY_ADD_H_

#include <cstdint>

namespace evenkeel {

// out[i] = a[i] * b[i] + c[i] for host arrays of n elements. Returns the name of
// the CUDA error, null on success.
const char* DeviceMultiplyAdd(const float* a, const float* b, const float* c, float* out, int64_t n);

}  // namespace evenkeel

#endif  // EVENKEEL_THIRD_PARTY_CUDA_MULTIPLY_ADD_H_

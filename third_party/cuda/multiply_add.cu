// The kernel and its launch.
#include <cuda_runtime.h>

#include "evenkeel/third_party/cuda/multiply_add.h"

namespace evenkeel {
namespace {

__global__ void MultiplyAdd(const float* a, const float* b, const float* c, float* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] * b[i] + c[i];
}

}  // namespace

const char* DeviceMultiplyAdd(const float* a, const float* b, const float* c, float* out, int64_t n) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  float* device = nullptr;
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&device), 4 * bytes);
  const float* inputs[] = {a, b, c};
  for (int64_t i = 0; i < 3 && error == cudaSuccess; ++i) {
    error = cudaMemcpy(device + i * n, inputs[i], bytes, cudaMemcpyHostToDevice);
  }
  if (error == cudaSuccess) {
    MultiplyAdd<<<static_cast<unsigned>((n + 255) / 256), 256>>>(device, device + n, device + 2 * n, device + 3 * n, n);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaMemcpy(out, device + 3 * n, bytes, cudaMemcpyDeviceToHost);
  cudaFree(device);
  return error == cudaSuccess ? nullptr : cudaGetErrorName(error);
}

}  // namespace evenkeel

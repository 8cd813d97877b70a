// Do gelu_erf, gelu_tanh and silu give the same bits on the device as on the host?
//
//   activation_device STRIDE     compares every STRIDE-th bit pattern and some special values
//
// Exit status 0 when all bits agree, 1 otherwise, 2 when the device cannot run the kernel.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/activation_math.h"

namespace {

using pyquant::bits_from_float;
using pyquant::float_from_bits;

constexpr int kBlock = 1 << 20;

__host__ __device__ float apply(int function, float x) {
  return function == 0 ? pyquant::gelu_erf(x) : function == 1 ? pyquant::gelu_tanh(x) : pyquant::silu(x);
}

__global__ void apply_all(int function, const float* x, float* y, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = apply(function, x[i]);
}

bool good(cudaError_t error) {
  if (error != cudaSuccess) std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  return error == cudaSuccess;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc == 2 ? std::strtoull(argv[1], nullptr, 10) : 0;
  if (stride == 0) return std::fprintf(stderr, "usage: activation_device STRIDE\n"), 2;
  std::vector<float> x;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += stride) x.push_back(float_from_bits(bits));
  for (float special : {kInfinity, -kInfinity, kNaN, 0.f, -0.f, 12.f, -12.f, 14.5f, -14.5f, 120.f, -120.f}) {
    x.push_back(special);
  }
  float *device_x = nullptr, *device_y = nullptr;
  if (!good(cudaMalloc(&device_x, kBlock * sizeof(float)))) return 2;
  if (!good(cudaMalloc(&device_y, kBlock * sizeof(float)))) return 2;
  std::vector<float> y(kBlock);
  uint64_t differ[3] = {0, 0, 0};
  for (size_t first = 0; first < x.size(); first += kBlock) {
    const int count = static_cast<int>(std::min<size_t>(kBlock, x.size() - first));
    if (!good(cudaMemcpy(device_x, &x[first], count * sizeof(float), cudaMemcpyHostToDevice))) return 2;
    for (int function = 0; function < 3; ++function) {
      apply_all<<<(count + 255) / 256, 256>>>(function, device_x, device_y, count);
      if (!good(cudaGetLastError())) return 2;
      if (!good(cudaMemcpy(y.data(), device_y, count * sizeof(float), cudaMemcpyDeviceToHost))) return 2;
      for (int i = 0; i < count; ++i) {
        const float want = apply(function, x[first + i]);
        if (bits_from_float(y[i]) == bits_from_float(want)) continue;
        if (differ[function]++ == 0) {
          std::printf("function %d: x=%.9g device=%.9g host=%.9g\n", function, x[first + i], y[i], want);
        }
      }
    }
  }
  std::printf("checked=%zu gelu_erf=%llu gelu_tanh=%llu silu=%llu differ\n", x.size(),
              static_cast<unsigned long long>(differ[0]), static_cast<unsigned long long>(differ[1]),
              static_cast<unsigned long long>(differ[2]));
  return differ[0] + differ[1] + differ[2] == 0 ? 0 : 1;
}

// Memory that a kernel clears for its successor (cuda.h: Zeros), the device's half.
#pragma once
#include <cstdint>

#include "cuda/cuda.h"

namespace pyquant::cuda {

// Every thread of the grid takes its share. After wait_for_predecessor: the predecessor may count in the same memory.
__device__ __forceinline__ void write_zeros(const Zeros& zeros) {
  if (zeros.bytes == 0) return;
  const int64_t blocks = int64_t{gridDim.x} * gridDim.y, block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
#pragma unroll 1  // to count its turns is a division of 64 bits
  for (int64_t i = block * blockDim.x + threadIdx.x; i < zeros.bytes / 16; i += blocks * blockDim.x)
    static_cast<uint4*>(zeros.at)[i] = uint4{};
}

}  // namespace pyquant::cuda

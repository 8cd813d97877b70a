// Counters of a kernel in front of which no other runs that could clear them.
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/zeros.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

__global__ void __launch_bounds__(kThreads) clear_kernel(const Zeros zeros) {
  wait_for_predecessor();
  release_successor();
  write_zeros(zeros);
}

}  // namespace

void clear_counters(const char* name, const Zeros& zeros, const Context& context) {
  if (zeros.bytes == 0) return;
  if (zeros.bytes % 16 != 0 || reinterpret_cast<uintptr_t>(zeros.at) % 16 != 0)
    throw std::runtime_error(std::string(name) + ": counters must lie on 16-byte boundaries");
  const int64_t blocks = (zeros.bytes / 16 + kThreads - 1) / kThreads;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks));
  shape.block = dim3(kThreads);
  shape.overlaps = true;
  launch<clear_kernel>(name, shape, context, zeros);
}

}  // namespace pyquant::cuda

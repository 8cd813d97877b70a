// The only place that launches: device guard, stream, shared-memory attribute, cluster size, error text.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/cuda.h"

namespace pyquant::cuda {

inline void check(cudaError_t status, const char* what, int device) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " on device " + std::to_string(device) + ": " +
                           cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

// Makes the device current for one scope. Our runtime is a copy of its own, so torch's current device is not ours.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice", device);
    changed_ = previous_ != device;
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice", device);
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

struct LaunchShape {
  dim3 grid, block, cluster{1, 1, 1};
  int shared_bytes = 0;
};

// Launches Kernel(arguments...) on the context's stream. The attribute that opts in to more than 48 KiB of shared
// memory is set once per kernel and device.
template <auto Kernel, class... Arguments>
void launch(const char* name, const LaunchShape& shape, const Context& context, Arguments... arguments) {
  DeviceGuard guard(context.device);
  if (shape.shared_bytes > 48 << 10) {
    static std::atomic<uint64_t> prepared{0};
    const uint64_t bit = uint64_t{1} << (context.device & 63);
    if (context.device > 63 || !(prepared.load(std::memory_order_relaxed) & bit)) {
      check(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes), name,
            context.device);
      prepared.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = shape.cluster.x;
  attribute.val.clusterDim.y = shape.cluster.y;
  attribute.val.clusterDim.z = shape.cluster.z;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = &attribute;
  config.numAttrs = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, Kernel, arguments...), name, context.device);
}

}  // namespace pyquant::cuda

// The only place that launches: device guard, stream, shared-memory attribute, cluster size, error text.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <mutex>
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

// Zeros on the context's stream.
inline void clear(const char* name, void* memory, int64_t nbytes, const Context& context) {
  if (nbytes == 0) return;
  DeviceGuard guard(context.device);
  check(cudaMemsetAsync(memory, 0, static_cast<size_t>(nbytes), static_cast<cudaStream_t>(context.stream)), name,
        context.device);
}
// The same by a kernel (clear.cu): in a layer a memset would end the chain of launches that overlap.
void clear_counters(const char* name, const Zeros& zeros, const Context& context);

struct LaunchShape {
  dim3 grid, block, cluster{1, 1, 1};
  int shared_bytes = 0;
  // The kernel may start before its predecessor in the stream has ended. Only for kernels that call
  // wait_for_predecessor (overlap.cuh); devices before sm_90 do not overlap.
  bool overlaps = false;
};

constexpr int kKnownDevices = 64;

// Whether a device can overlap launches, asked of the driver once.
inline bool can_overlap(int device) {
  static std::atomic<int8_t> known[kKnownDevices];  // 0: not asked yet, 1: no, 2: yes
  if (device < 0 || device >= kKnownDevices) return false;
  int8_t answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute", device);
    answer = major >= 9 ? 2 : 1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

// Dynamic shared memory that a kernel may ask for without opting in. The driver's limit is 48 KiB less what the kernel
// holds statically (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES): 16 KiB are left for that, more than any kernel
// has (tests/gpu/test_machine_code.py).
constexpr int kSharedWithoutOptIn = 32 << 10;

// Launches Kernel(arguments...) on the context's stream. The attribute that opts in to more shared memory is set when a
// kernel first asks a device for that much.
template <auto Kernel, class... Arguments>
void launch(const char* name, const LaunchShape& shape, const Context& context, Arguments... arguments) {
  DeviceGuard guard(context.device);
  if (shape.shared_bytes > kSharedWithoutOptIn) {
    static std::atomic<int> granted[kKnownDevices];
    static std::mutex one_at_a_time;  // the attribute may only grow
    std::atomic<int>& most = granted[context.device & (kKnownDevices - 1)];
    if (context.device >= kKnownDevices || most.load(std::memory_order_relaxed) < shape.shared_bytes) {
      const std::lock_guard<std::mutex> lock(one_at_a_time);
      if (context.device >= kKnownDevices || most.load(std::memory_order_relaxed) < shape.shared_bytes) {
        check(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes), name,
              context.device);
        if (context.device < kKnownDevices) most.store(shape.shared_bytes, std::memory_order_relaxed);
      }
    }
  }
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster.x;
    attributes[count].val.clusterDim.y = shape.cluster.y;
    attributes[count++].val.clusterDim.z = shape.cluster.z;
  }
  if (shape.overlaps && can_overlap(context.device)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, Kernel, arguments...), name, context.device);
}

}  // namespace pyquant::cuda

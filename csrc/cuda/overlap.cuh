// Programmatic dependent launch, the device's half (the host's: LaunchShape::overlaps in launch.h). A kernel that is
// launched so may start while its predecessor in the stream still runs, and has to wait itself for what that one wrote.
#pragma once

namespace pyquant::cuda {

// Every block calls this before its first access to global memory: the predecessor has then ended and its writes are
// visible. A block that skipped it would let the kernel end, and so its successor start, before the predecessor ended.
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 0, after the wait. Where operands are read through the cache for constants, whose loads the compiler may move over
// the wait, addresses that depend on this keep them behind it.
__device__ __forceinline__ int zero_after_predecessor() {
  int zero;
  wait_for_predecessor();
  asm volatile("mov.b32 %0, 0;" : "=r"(zero)::"memory");
  return zero;
}

// From here on the successor's blocks may take the places that this kernel leaves free. They wait as above.
__device__ __forceinline__ void release_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace pyquant::cuda

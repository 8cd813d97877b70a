// Plain accesses to shared memory beside CUTLASS's barriers. The assembly of its waits and of its proxy fence does not
// say that it touches memory, so that a compiler may move such accesses over them.
#pragma once

namespace pyquant::cuda {

// Behind a wait, before what it waited for is read; before a fence, behind what it makes visible. No instruction.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

}  // namespace pyquant::cuda

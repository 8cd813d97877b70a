// The current CUDA stream of a device, found at run time: the function lives in libtorch_cuda.so only, which a CPU
// build of torch does not have.
#pragma once
#include <cstdint>

namespace pyquant::bind {

void* current_cuda_stream(int32_t device);

}  // namespace pyquant::bind

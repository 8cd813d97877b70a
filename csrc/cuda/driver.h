// Whether this library's CUDA runtime finds a driver that serves it. The runtime is linked in, so that torch, which has
// another one, may see GPUs where this library sees none.
#pragma once
#include <string>

namespace pyquant::cuda {

// The oldest driver, by its major number, that serves a CUDA runtime (13000, 12080): NVIDIA's table of minor version
// compatibility, but that kernels with more than 4 KiB of parameters want 530. 0 without CUDA.
constexpr int minimum_driver(int runtime) { return runtime >= 13000 ? 580 : (runtime >= 12000 ? 530 : 0); }

int driver_cuda_version();    // the newest CUDA that the driver serves (12080); 0 without a driver
std::string why_no_device();  // "" where there is a device

}  // namespace pyquant::cuda

// Where the CUDA ops run: one interface, two flavours.
//   device.cpp                 CUDA tensors of torch; library pyquant, key CUDA.
//   tests/csrc/device_sim.cpp  CPU tensors whose memory belongs to a PTX simulator (PYQUANT_BIND_SIMULATOR), so that
//   the
//                              very same ops run where there is no GPU; library pyquant_sim, key CPU, for tests only.
#pragma once
#ifndef PYQUANT_BIND_SIMULATOR
#include <torch/csrc/stable/accelerator.h>
#endif

#include "bind/check.h"
#include "cuda/cuda.h"

#ifdef PYQUANT_BIND_SIMULATOR
#define PYQUANT_BIND_LIBRARY pyquant_sim
#define PYQUANT_BIND_KEY CPU
#else
#define PYQUANT_BIND_LIBRARY pyquant
#define PYQUANT_BIND_KEY CUDA
#endif

namespace pyquant::bind {

#ifdef PYQUANT_BIND_SIMULATOR
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
#else
using torch::stable::accelerator::DeviceGuard;
#endif

int32_t device_index(const Tensor& x);
void* current_stream(int32_t device);

// Makes the device of `x` current and holds what a launch there needs; every op constructs one first.
struct On {
  DeviceGuard guard;
  cuda::Context context;
  explicit On(const Tensor& x) : guard(device_index(x)) {
    context.device = device_index(x);
    context.stream = current_stream(context.device);
  }
};

// Memory on the device of `like`, contiguous and not written.
Tensor empty(const Tensor& like, const Shape& shape, ScalarType type);

// Torch's own product: x [m, k] times w [n, k] transposed, plus bias [n] unless absent, all of one float type.
Tensor framework_linear(const Tensor& x, const Tensor& w, const MaybeTensor& bias);
// The same from 16-bit operands with a float32 result.
Tensor framework_product_f32(const Tensor& x, const Tensor& w);
// x[rows]: rows [m], int64, of x [t, k].
Tensor framework_rows(const Tensor& x, const Tensor& rows);

}  // namespace pyquant::bind

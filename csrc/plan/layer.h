// What whole layers take by the plan: the launch that quantises their rows counted, and the framework's own product of
// 16-bit floats beside them. Auto mode compares the two (pyquant/nn/quicker.py).
#pragma once
#include "core/device.h"
#include "plan/route.h"

namespace pyquant {

struct LayerTime {
  double us = 0;             // infinity: nothing takes the problem
  bool is_measured = false;  // the product's share was measured (plan/tuned.h), the rest is the model's
  const Row* row = nullptr;  // null: the framework multiplies
};

// The framework's product of m rows by an [n, k] matrix, both of `type` (f16, bf16): measured, or the model's.
LayerTime framework_time(int64_t m, int64_t n, int64_t k, DType type, const DeviceInfo& device);

// The framework's product of integer weights, which are dequantised for it, in the activations' type (f32: in f16).
double dequantised_us(const GemmProblem& problem, const DeviceInfo& device);

// A layer as its route runs it. Entry::linear with floats quantises them first; Entry::float_linear dequantises weights
// that no row reads, for the framework.
LayerTime layer_time(const Request& request, const DeviceInfo& device, bool only_compiled = true);

}  // namespace pyquant

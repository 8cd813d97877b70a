// What a kernel instance receives: the problem, its memory, and where to run.
#pragma once
#include "cuda/cuda.h"

namespace pyquant::cuda {

struct GemmCall {
  const Row& row;
  const GemmProblem& problem;
  const GemmOperands& operands;
  const Epilogue& epilogue;
  const Context& context;
  const DeviceInfo& device;
};

using Launcher = void (*)(const GemmCall&);

}  // namespace pyquant::cuda

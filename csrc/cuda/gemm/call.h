// What a kernel instance receives: the problem, its memory, and where to run. Kernels know nothing of the table.
#pragma once
#include "cuda/cuda.h"

namespace pyquant::cuda {

struct GemmCall {
  const char* name;  // of the row, for error texts
  const GemmProblem& problem;
  const GemmOperands& operands;
  const Epilogue& epilogue;
  const Context& context;
  const DeviceInfo& device;
};

// The two entry points of an instance. workspace_bytes looks at sizes only: pointers are null.
struct Launcher {
  void (*run)(const GemmCall&);
  int64_t (*workspace_bytes)(const GemmCall&);
};

// Base of kernels that need no workspace.
struct NoWorkspace {
  static int64_t workspace_bytes(const GemmCall&) { return 0; }
};

}  // namespace pyquant::cuda

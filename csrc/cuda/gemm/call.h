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

// The two entry points of an instance. workspace looks at sizes only: pointers may be null. run finds the counters of
// its workspace cleared.
struct Launcher {
  void (*run)(const GemmCall&);
  Workspace (*workspace)(const GemmCall&);
};

// Base of kernels that need no workspace.
struct NoWorkspace {
  static Workspace workspace(const GemmCall&) { return {}; }
};

}  // namespace pyquant::cuda

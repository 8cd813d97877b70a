// From a checked GEMM to its launch: alignments, the plan's choice, the launch. Every CUDA op that multiplies goes
// through here.
#pragma once
#include "bind/device.h"
#include "plan/row.h"

namespace pyquant::bind {

// The device that launches go to.
const DeviceInfo& device_info(const On& on);
// Fills in the problem's alignments from pointers and strides.
void align(GemmProblem* problem, const GemmOperands& operands);
// The plan's row for the operands as they lie in memory, null when none takes them; aligns the problem. The only place
// where bindings ask the plan.
const Row* choose(GemmProblem* problem, const GemmOperands& operands, const On& on);
// Its predicted time in microseconds; infinity without a row.
double cost_us(const Row* row, const GemmProblem& problem, const On& on);
// Launches a row, with its workspace on the device of `like`; without a row, throws every row's refusal.
void run(const Row* row, const GemmProblem& problem, GemmOperands operands, const Epilogue& epilogue,
         const Tensor& like, const On& on);

}  // namespace pyquant::bind

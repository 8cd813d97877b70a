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
// A launch of its own over the activations, in the cost model's microseconds.
constexpr double kPassUs = 3.0;
// The choice for int4 activations, in the form that the quickest row reads them: one a byte or two, rewritten by a pass
// where that pays. `keep` owns the copy.
const Row* choose_int4(const Tensor& like, const On& on, std::vector<Tensor>* keep, GemmProblem* problem,
                       GemmOperands* operands);
// The row of a name. Refuses a name that there is not, and says why a row does not take the problem. Weights are laid
// out for the row where it does not read checkpoint order.
const Row* named(const std::string& name, const Tensor& like, const On& on, std::vector<Tensor>* keep,
                 GemmProblem* problem, GemmOperands* operands);
// Its predicted time in microseconds; infinity without a row.
double cost_us(const Row* row, const GemmProblem& problem, const On& on);
// Launches a row, with its workspace on the device of `like`; without a row, throws every row's refusal.
void run(const Row* row, const GemmProblem& problem, GemmOperands operands, const Epilogue& epilogue,
         const Tensor& like, const On& on);

}  // namespace pyquant::bind

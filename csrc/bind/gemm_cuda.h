// From a checked GEMM to its launch: alignments, the plan's route, the launch. Every CUDA op that multiplies goes
// through here.
#pragma once
#include "bind/device.h"
#include "plan/route.h"

namespace pyquant::bind {

// The device that launches go to.
const DeviceInfo& device_info(const On& on);
// Fills in the problem's alignments from pointers and strides.
void align(GemmProblem* problem, const GemmOperands& operands);
// The plan's route for the operands as stored in memory. The only place where bindings ask the plan. int4_range: see
// plan/route.h.
Route route_of(Entry entry, GemmProblem problem, const GemmOperands& operands, const On& on, bool int4_range = false);
// Dense rows of codes, one a byte, as rows of two a byte; an even number of columns. `keep` owns them.
const uint8_t* pack_rows(const Tensor& like, const void* codes, int64_t rows, int64_t columns, const On& on,
                         std::vector<Tensor>* keep);
// int4 activations in the packing that the route requires; problem: as they are stored. `keep` owns a copy.
void repack(const Route& route, const Tensor& like, const GemmProblem& problem, const On& on, std::vector<Tensor>* keep,
            GemmOperands* operands);
// The row of a name. Refuses an unknown name, and says why a row does not take the problem. Weights are laid
// out for the row where it does not read checkpoint order.
const Row* named(const std::string& name, const Tensor& like, const On& on, std::vector<Tensor>* keep,
                 GemmProblem* problem, GemmOperands* operands);
// Launches a row, with its workspace on the device of `like`; without a row, throws every row's refusal.
void run(const Row* row, const GemmProblem& problem, GemmOperands operands, const Epilogue& epilogue,
         const Tensor& like, const On& on);

}  // namespace pyquant::bind

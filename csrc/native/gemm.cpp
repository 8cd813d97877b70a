#include <algorithm>
#include <vector>

#include "cuda/cuda.h"
#include "native/parts.h"
#include "plan/select.h"

namespace pyquant::native {

void add_gemm(py::module_& m) {
  m.def(
      "workspace_bytes",
      [](const std::string& row, const py::dict& problem, int32_t device) {
        return cuda::workspace(row_of(row), problem_of(problem), {device, nullptr}).bytes;
      },
      py::arg("row"), py::arg("problem"), py::arg("device") = 0);
  m.def(
      "gemm",
      [](const std::string& name, const py::dict& problem, const py::dict& operands, const py::dict& epilogue,
         int32_t device, uintptr_t stream) {
        const GemmProblem p = problem_of(problem);
        GemmOperands o = operands_of(operands);
        const auto wanted = static_cast<size_t>(std::max<int64_t>(p.experts, 0) * (is_float(p.x) ? 4 : 1));
        std::vector<int64_t> shifts(wanted);
        if (operands.contains("expert_shifts")) shifts = operands["expert_shifts"].cast<std::vector<int64_t>>();
        if (shifts.size() != wanted)
          throw std::invalid_argument(name + ": operand 'expert_shifts' must hold " + std::to_string(wanted) +
                                      " numbers, got " + std::to_string(shifts.size()));
        if (p.experts > 0) o.expert_shifts = shifts.data();
        const Row& row = row_of(name);
        const Refusal refusal = accept(row, p, o.residual != nullptr, cuda::device_info(device));
        if (!refusal.ok()) throw std::invalid_argument(name + ": " + text_of(refusal));
        const int64_t needed = cuda::workspace(row, p, {device, nullptr}).bytes;
        if (needed > 0 && o.workspace == nullptr)
          throw std::invalid_argument(name + ": operand 'workspace' must hold " + std::to_string(needed) +
                                      " bytes, got none");
        cuda::gemm(row, p, o, epilogue_of(epilogue), {device, pointer<void>(stream)});
      },
      py::arg("row"), py::arg("problem"), py::arg("operands"), py::arg("epilogue"), py::arg("device") = 0,
      py::arg("stream") = 0);
}

}  // namespace pyquant::native

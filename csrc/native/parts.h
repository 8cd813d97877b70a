// The parts of the module; each adds its functions.
#pragma once
#include "native/fields.h"

namespace pyquant::native {

void add_plan(py::module_& m);      // the kernel table, acceptance, cost, selection: no device is touched
void add_gemm(py::module_& m);      // raw launches of single rows
void add_quantise(py::module_& m);  // raw launches of quantisers and of what lays out codes
void add_formulas(py::module_& m);  // scalar formulas of the epilogue on host arrays

}  // namespace pyquant::native

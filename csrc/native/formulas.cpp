#include "core/epilogue_math.h"
#include "native/parts.h"

namespace pyquant::native {
namespace {

// Applies a scalar formula of epilogue_math.h to float arrays; which: see the binding below.
void evaluate(const std::string& which, uintptr_t from, uintptr_t to, int64_t count, float a, float b,
              int32_t zero_point, int32_t qmin, int32_t qmax) {
  const float* x = pointer<const float>(from);
  float* y = pointer<float>(to);
  const auto each = [&](auto f) {
    for (int64_t i = 0; i < count; ++i) y[i] = f(x[i]);
  };
  if (which == "code_from_real")
    return each([&](float v) { return static_cast<float>(code_from_real(v, a, zero_point, qmin, qmax)); });
  if (which == "scale_from_amax") return each([&](float v) { return scale_from_amax(v, qmax); });
  if (which == "real_from_code")
    return each([&](float v) { return real_from_code(static_cast<int32_t>(v), a, zero_point); });
  if (which == "scale_recip") return each([](float v) { return scale_recip(v); });
  const Activation activation = activation_of(which);
  each([&](float v) { return activate(v, activation, a, b); });
}

}  // namespace

void add_formulas(py::module_& m) {
  m.def("evaluate", &evaluate, py::arg("which"), py::arg("x"), py::arg("y"), py::arg("count"), py::arg("a") = 0.f,
        py::arg("b") = 0.f, py::arg("zero_point") = 0, py::arg("qmin") = -127, py::arg("qmax") = 127);
}

}  // namespace pyquant::native

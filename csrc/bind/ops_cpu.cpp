// torch.ops.pyquant.* on the CPU: the ops that are written once on the backend of the CPU, the fused Linear, and what
// needs no tensor.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/boxed.h"
#include "bind/backend_cpu.h"
#include "bind/conv_cpu.h"
#include "bind/fake_quantise_ops.h"
#include "bind/first_copy.h"
#include "bind/linear_cpu.h"
#include "bind/linear_ops.h"
#include "bind/product_ops.h"
#include "bind/quantise_ops.h"
#include "bind/weight_only_cpu.h"
#include "core/least_squares.h"
#include "plan/tuned.h"

namespace pyquant::bind {

void Cpu::gemm(GemmCall& call, const Tensor& x) const {
  GemmProblem& p = call.problem;
  if (p.x_packed) {
    call.keep.push_back(widened(x, p.m, p.k));
    call.operands.x = call.keep.back().const_data_ptr();
    p.x_packed = false;
    p.ldx = p.k;
  }
  cpu::gemm(p, call.operands, call.epilogue);
}

namespace {

int64_t packed_bytes_op(std::vector<int64_t> spec) { return static_cast<int64_t>(packed_bytes(linear_spec(spec))); }

std::string cpu_info() { return cpu::isa_report(); }

int64_t cpu_multiply_op(int64_t rows, int64_t quads, int64_t calls) {
  const auto within = [](const char* argument, int64_t value, int64_t most) {
    if (value < 1 || value > most) refuse(argument, std::to_string(value), "1 to " + std::to_string(most));
  };
  within("rows", rows, 48);
  within("quads", quads, 1 << 14);
  within("calls", calls, 1 << 20);
  return cpu::multiply_in_cache(rows, quads, calls);
}

double cpu_read_op(const Tensor& x, int64_t times) {
  dtype_in("x", x, {ScalarType::Float});
  if (!x.is_contiguous()) refuse("x", "a strided view", "a contiguous tensor");
  if (times < 1 || times > 1 << 20) refuse("times", std::to_string(times), "1 to 1048576");
  return static_cast<double>(cpu::read_all(static_cast<const float*>(x.const_data_ptr()), x.numel(), times));
}

int64_t fingerprint_op(const Tensor& x) {
  if (!x.is_contiguous()) refuse("x", "a strided view", "a contiguous tensor");
  return cpu::fingerprint(x.const_data_ptr(), x.numel() * static_cast<int64_t>(x.element_size()));
}

Tensor least_squares_steps_op(const Tensor& rows, int64_t qmin, int64_t qmax, const Tensor& ratios) {
  dtype_in("rows", rows, {ScalarType::Float});
  exact_dim("rows", rows, 2);
  const int64_t n = rows.size(1);
  if (n < 1 || n > kLongestRow) refuse("rows", describe(rows), "[R, 1 to " + std::to_string(kLongestRow) + "]");
  if (!rows.is_contiguous()) refuse("rows", "a strided view", "a contiguous tensor");
  code_range(qmin, qmax);
  if (qmin > -1 || qmax < 1) refuse("qmin", std::to_string(qmin), "below zero, with qmax above zero");
  dtype_in("ratios", ratios, {ScalarType::Double});
  exact_dim("ratios", ratios, 1);
  const int64_t points = ratios.size(0);
  if (points < kStepsKept || points > kMostRatios || !ratios.is_contiguous())
    refuse("ratios", describe(ratios), std::to_string(kStepsKept) + " to " + std::to_string(kMostRatios) + " numbers");
  Tensor steps = empty_cpu({rows.size(0), 1}, ScalarType::Double);
  cpu::least_squares_steps(static_cast<const float*>(rows.const_data_ptr()), rows.size(0), n,
                           static_cast<int32_t>(qmin), static_cast<int32_t>(qmax),
                           static_cast<const double*>(ratios.const_data_ptr()), points,
                           static_cast<double*>(steps.mutable_data_ptr()));
  return steps;
}

// Measured choices of CUDA kernels (plan/tuned.h); they need no GPU to be set.
std::string lines_of(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

std::string set_tuned_op(Text table) { return lines_of(set_tuned(table)); }

std::string tuned_remarks_op() { return lines_of(tuned_remarks()); }

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(pyquant, CPU, m) {
  namespace b = pyquant::bind;
  if (!b::is_first_copy("pyquant")) return;
  b::QuantiseOps<b::Cpu>::add_to(m);
  b::FakeQuantiseOps<b::Cpu>::add_to(m);
  b::ProductOps<b::Cpu>::add_gemms_to(m);
  b::ProductOps<b::Cpu>::add_packing_to(m);
  m.impl("magnitude_histogram", PYQUANT_BOX(&b::QuantiseOps<b::Cpu>::magnitude_histogram));
  m.impl("pack_linear", PYQUANT_BOX(&b::pack_linear_cpu));
  m.impl("unpack_linear", PYQUANT_BOX(&b::unpack_linear_cpu));
  m.impl("qlinear", PYQUANT_BOX(&b::LinearOps<b::Cpu>::qlinear));
  m.impl("qconv2d", PYQUANT_BOX(&b::qconv2d_cpu));
  m.impl("_grouped_linear", PYQUANT_BOX(&b::grouped_linear_cpu));
  m.impl("weight_only_linear", PYQUANT_BOX(&b::weight_only_linear_cpu));
  m.impl("_weight_only", PYQUANT_BOX(&b::weight_only_linear_cpu));
  m.impl("_grouped_weight_only", PYQUANT_BOX(&b::grouped_weight_only_cpu));
  m.impl("_cpu_read", PYQUANT_BOX(&b::cpu_read_op));
  m.impl("_fingerprint", PYQUANT_BOX(&b::fingerprint_op));
  m.impl("_least_squares_steps", PYQUANT_BOX(&b::least_squares_steps_op));
}

STABLE_TORCH_LIBRARY_IMPL(pyquant, CompositeExplicitAutograd, m) {
  if (!pyquant::bind::is_first_copy("pyquant")) return;
  m.impl("_packed_bytes", PYQUANT_BOX(&pyquant::bind::packed_bytes_op));
  m.impl("_cpu_multiply", PYQUANT_BOX(&pyquant::bind::cpu_multiply_op));
  m.impl("_cpu_info", PYQUANT_BOX(&pyquant::bind::cpu_info));
  m.impl("_set_tuned", PYQUANT_BOX(&pyquant::bind::set_tuned_op));
  m.impl("_tuned_remarks", PYQUANT_BOX(&pyquant::bind::tuned_remarks_op));
}

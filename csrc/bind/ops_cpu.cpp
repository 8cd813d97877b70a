// torch.ops.pyquant.* on the CPU: the ops that are written once on the backend of the CPU, the fused Linear, and what
// needs no tensor.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/backend_cpu.h"
#include "bind/conv_cpu.h"
#include "bind/fake_quantise_ops.h"
#include "bind/first_copy.h"
#include "bind/linear_cpu.h"
#include "bind/linear_ops.h"
#include "bind/product_ops.h"
#include "bind/quantise_ops.h"
#include "bind/weight_only_cpu.h"
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
  m.impl("magnitude_histogram", TORCH_BOX(&b::QuantiseOps<b::Cpu>::magnitude_histogram));
  m.impl("pack_linear", TORCH_BOX(&b::pack_linear_cpu));
  m.impl("unpack_linear", TORCH_BOX(&b::unpack_linear_cpu));
  m.impl("qlinear", TORCH_BOX(&b::LinearOps<b::Cpu>::qlinear));
  m.impl("qconv2d", TORCH_BOX(&b::qconv2d_cpu));
  m.impl("_grouped_linear", TORCH_BOX(&b::grouped_linear_cpu));
  m.impl("weight_only_linear", TORCH_BOX(&b::weight_only_linear_cpu));
  m.impl("_weight_only", TORCH_BOX(&b::weight_only_linear_cpu));
  m.impl("_grouped_weight_only", TORCH_BOX(&b::grouped_weight_only_cpu));
  m.impl("_cpu_read", TORCH_BOX(&b::cpu_read_op));
  m.impl("_fingerprint", TORCH_BOX(&b::fingerprint_op));
}

STABLE_TORCH_LIBRARY_IMPL(pyquant, CompositeExplicitAutograd, m) {
  if (!pyquant::bind::is_first_copy("pyquant")) return;
  m.impl("_packed_bytes", TORCH_BOX(&pyquant::bind::packed_bytes_op));
  m.impl("_cpu_multiply", TORCH_BOX(&pyquant::bind::cpu_multiply_op));
  m.impl("_cpu_info", TORCH_BOX(&pyquant::bind::cpu_info));
  m.impl("_set_tuned", TORCH_BOX(&pyquant::bind::set_tuned_op));
  m.impl("_tuned_remarks", TORCH_BOX(&pyquant::bind::tuned_remarks_op));
}

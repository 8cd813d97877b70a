// torch.ops.pyquant.* on CUDA: the ops that are written once on the backend of CUDA, the fused Linear and the layers
// whose activations stay floats.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/boxed.h"
#include "bind/backend_cuda.h"
#include "bind/conv_cuda.h"
#include "bind/fake_quantise_ops.h"
#include "bind/first_copy.h"
#include "bind/float_cuda.h"
#include "bind/gemm_cuda.h"
#include "bind/linear_cuda.h"
#include "bind/linear_ops.h"
#include "bind/product_ops.h"
#include "bind/quantise_ops.h"

namespace pyquant::bind {

void Cuda::gemm(GemmCall& call, const Tensor& x, const std::string& kernel) const {
  GemmProblem& p = call.problem;
  GemmOperands& o = call.operands;
  if (p.has_zero_point) {
    Tensor sums = empty({p.n, p.group_size ? p.k / p.group_size : 1}, ScalarType::Int);
    auto* data = static_cast<int32_t*>(sums.mutable_data_ptr());
    cuda::weight_sums(o.w, p.w, p.n, p.k, p.ldw, p.group_size, data, on.context);
    call.keep.push_back(sums);
    o.w_sum = data;
  }
  if (!kernel.empty()) {
    const Row* row = named(kernel, x, on, &call.keep, &p, &o);
    return run(row, p, o, call.epilogue, x, on);
  }
  const Route route = route_of(Entry::gemm, p, o, on);
  repack(route, x, p, on, &call.keep, &o);
  run(route.row, route.problem, o, call.epilogue, x, on);
}

namespace {

// All pairs of types, and a row of the caller's choice: without one, floats are the framework's (plan/route.h).
Tensor gemm_any(const Tensor& x, const Tensor& w, MaybeTensor w_scale, MaybeTensor x_scale, MaybeTensor x_zero_point,
                MaybeTensor bias, MaybeTensor residual, MaybeTensor out_scale, MaybeTensor out_zero_point,
                int64_t group_size, Text activation, double clamp_min, double clamp_max, int64_t out_qmin,
                int64_t out_qmax, std::optional<ScalarType> out_type, Text kernel) {
  const std::string name = kernel;
  const ScalarType out_dtype = out_type.value_or(ScalarType::Float);
  const GemmArgs args{nullptr,   x,         w,         w_scale,        x_scale,    x_zero_point,
                      bias,      residual,  out_scale, out_zero_point, group_size, activation,
                      clamp_min, clamp_max, out_qmin,  out_qmax,       out_dtype};
  if (name.empty() && w.defined() && is_float(dtype_of(w)) && w.scalar_type() != ScalarType::Float) {
    gemm_call(args);
    return float_linear_cuda(x, w, bias, residual, activation, clamp_min, clamp_max, out_dtype);
  }
  return ProductOps<Cuda>::product(args, name);
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(PYQUANT_BIND_LIBRARY, PYQUANT_BIND_KEY, m) {
  namespace b = pyquant::bind;
  if (!b::is_first_copy(PYQUANT_TEXT(PYQUANT_BIND_LIBRARY))) return;
  b::QuantiseOps<b::Cuda>::add_to(m);
  b::FakeQuantiseOps<b::Cuda>::add_to(m);
  b::ProductOps<b::Cuda>::add_gemms_to(m);
  m.impl("gemm", PYQUANT_BOX(&b::gemm_any));
  m.impl("qlinear", PYQUANT_BOX(&b::LinearOps<b::Cuda>::qlinear));
  m.impl("_grouped_linear", PYQUANT_BOX(&b::grouped_linear_cuda));
  if (!pyquant::cuda::is_built()) return;  // what follows has a stand-in in Python (pyquant/ops/fallback.py)
  b::ProductOps<b::Cuda>::add_packing_to(m);
  m.impl("magnitude_histogram", PYQUANT_BOX(&b::QuantiseOps<b::Cuda>::magnitude_histogram));
  m.impl("qconv2d", PYQUANT_BOX(&b::qconv2d_cuda));
  m.impl("float_linear", PYQUANT_BOX(&b::float_linear_cuda));
  m.impl("weight_only_linear", PYQUANT_BOX(&b::weight_only_linear_cuda));
  m.impl("_weight_only", PYQUANT_BOX(&b::weight_only_linear_cuda));
  m.impl("_grouped_weight_only", PYQUANT_BOX(&b::grouped_weight_only_cuda));
}

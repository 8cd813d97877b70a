// The products of torch.ops.pyquant.* on CUDA (the quantisers: quantize_cuda.cpp): check, ask plan/ for a kernel,
// allocate through torch, launch through csrc/cuda.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/float_cuda.h"
#include "bind/gemm_cuda.h"
#include "bind/linear_cuda.h"
#include "bind/text.h"

namespace pyquant::bind {
namespace {

Tensor gemm(const char* op, const Tensor& x, const Tensor& w, const MaybeTensor& w_scale, const MaybeTensor& x_scale,
            const MaybeTensor& x_zero_point, const MaybeTensor& bias, const MaybeTensor& residual,
            const MaybeTensor& out_scale, const MaybeTensor& out_zero_point, int64_t group_size,
            const std::string& activation, double clamp_min, double clamp_max, int64_t out_qmin, int64_t out_qmax,
            ScalarType out_dtype, const std::string& kernel) {
  GemmCall call = gemm_call({op, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point,
                             group_size, activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype});
  const On on(x);
  Tensor out = empty(x, call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  call.operands.out = out.mutable_data_ptr();
  Tensor sums;
  if (call.problem.has_zero_point) {
    sums = empty(x, {call.problem.n, call.problem.group_size ? call.problem.k / call.problem.group_size : 1},
                 ScalarType::Int);
    auto* data = static_cast<int32_t*>(sums.mutable_data_ptr());
    cuda::weight_sums(call.operands.w, call.problem.w, call.problem.n, call.problem.k, call.problem.ldw,
                      call.problem.group_size, data, on.context);
    call.operands.w_sum = data;
  }
  GemmProblem& p = call.problem;
  if (!kernel.empty()) {
    run(named(kernel, x, on, &call.keep, &p, &call.operands), p, call.operands, call.epilogue, x, on);
    return out;
  }
  const Route route = route_of(Entry::gemm, p, call.operands, on);
  repack(route, x, p, on, &call.keep, &call.operands);
  run(route.row, route.problem, call.operands, call.epilogue, x, on);
  return out;
}

Tensor pack_int4(const Tensor& q) {
  dtype_in("q", q, {ScalarType::Char});
  min_dim("q", q, 1);
  Shape shape = shape_of(q);
  const int64_t k = shape.back();
  shape.back() = (k + 1) / 2;
  const On on(q);
  Tensor out = empty(q, shape, ScalarType::Byte);
  if (out.numel() == 0) return out;
  std::vector<Tensor> keep;
  cuda::pack_int4(static_cast<const int8_t*>(dense(q, keep)), q.numel() / k, k,
                  static_cast<uint8_t*>(out.mutable_data_ptr()), on.context);
  return out;
}

Tensor unpack_int4(const Tensor& packed, int64_t k) {
  dtype_in("packed", packed, {ScalarType::Byte});
  min_dim("packed", packed, 1);
  Shape shape = shape_of(packed);
  shape.back() = unpacked_columns(shape.back(), k);
  const On on(packed);
  Tensor out = empty(packed, shape, ScalarType::Char);
  if (out.numel() == 0) return out;
  std::vector<Tensor> keep;
  cuda::unpack_int4(static_cast<const uint8_t*>(dense(packed, keep)), out.numel() / k, k,
                    static_cast<int8_t*>(out.mutable_data_ptr()), on.context);
  return out;
}

#define PYQUANT_GEMM_OP(NAME)                                                                                       \
  Tensor NAME(const Tensor& x, const Tensor& w, MaybeTensor w_scale, MaybeTensor x_scale, MaybeTensor x_zero_point, \
              MaybeTensor bias, MaybeTensor residual, MaybeTensor out_scale, MaybeTensor out_zero_point,            \
              int64_t group_size, Text activation, double clamp_min, double clamp_max, int64_t out_qmin,            \
              int64_t out_qmax, ScalarType out_dtype) {                                                             \
    return gemm(#NAME, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size, \
                activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype, "");                               \
  }
PYQUANT_GEMM_OP(gemm_s8s8)
PYQUANT_GEMM_OP(gemm_s8s4)
PYQUANT_GEMM_OP(gemm_s4s4)

// All pairs of types, and a row of the caller's choice: without one, floats are the framework's (plan/route.h).
Tensor gemm_any(const Tensor& x, const Tensor& w, MaybeTensor w_scale, MaybeTensor x_scale, MaybeTensor x_zero_point,
                MaybeTensor bias, MaybeTensor residual, MaybeTensor out_scale, MaybeTensor out_zero_point,
                int64_t group_size, Text activation, double clamp_min, double clamp_max, int64_t out_qmin,
                int64_t out_qmax, ScalarType out_dtype, Text kernel) {
  const std::string name = kernel;
  if (name.empty() && w.defined() && is_float(dtype_of(w)) && w.scalar_type() != ScalarType::Float) {
    gemm_call({"gemm", x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size,
               activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype});
    return float_linear_cuda(x, w, bias, residual, activation, clamp_min, clamp_max, out_dtype);
  }
  return gemm("gemm", x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size,
              activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype, name);
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(PYQUANT_BIND_LIBRARY, PYQUANT_BIND_KEY, m) {
  namespace b = pyquant::bind;
  m.impl("gemm_s8s8", TORCH_BOX(&b::gemm_s8s8));
  m.impl("gemm_s8s4", TORCH_BOX(&b::gemm_s8s4));
  m.impl("gemm_s4s4", TORCH_BOX(&b::gemm_s4s4));
  m.impl("gemm", TORCH_BOX(&b::gemm_any));
  m.impl("qlinear", TORCH_BOX(&b::qlinear_cuda));
  if (!pyquant::cuda::is_built()) return;  // what follows has a stand-in in Python (pyquant/ops/fallback.py)
  m.impl("pack_int4", TORCH_BOX(&b::pack_int4));
  m.impl("unpack_int4", TORCH_BOX(&b::unpack_int4));
  m.impl("float_linear", TORCH_BOX(&b::float_linear_cuda));
  m.impl("weight_only_linear", TORCH_BOX(&b::weight_only_linear_cuda));
}

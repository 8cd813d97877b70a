#include "bind/weight_only_cpu.h"

#include "bind/cpu_tensor.h"
#include "bind/float_layer.h"
#include "cpu/weight_only.h"

namespace pyquant::bind {
Tensor weight_only_linear_cpu(const Tensor& x, const Tensor& w, const Tensor& w_scale, MaybeTensor w_zero_point,
                              MaybeTensor bias, MaybeTensor residual, int64_t w_bits, int64_t group_size,
                              Text activation, double clamp_min, double clamp_max,
                              std::optional<ScalarType> out_dtype) {
  const FloatLayer layer = weight_only_layer(x, w, w_scale, w_zero_point, bias, residual, w_bits, group_size,
                                             activation, clamp_min, clamp_max, out_dtype);
  const GemmProblem& p = layer.problem;
  if (w_zero_point) {
    const CodeType& code = code_type(p.w);
    zero_points("w_zero_point", layer.operands.w_zero_point, w_zero_point->numel(), code.qmin, code.qmax);
  }
  const Tensor out = empty_cpu(layer.out_shape, layer.out_type);
  if (p.m == 0 || p.n == 0) return out;
  const Matrix rows = matrix(x), weights = matrix(w);
  cpu::IntegerWeights integers;
  integers.codes = weights.data;
  integers.type = p.w;
  integers.n = p.n;
  integers.k = p.k;
  integers.row_bytes = weights.ld;
  integers.group_size = group_size;
  integers.scale = layer.operands.w_scale;
  integers.zero_point = layer.operands.w_zero_point;
  cpu::FloatEpilogue epilogue;
  epilogue.n = p.n;
  epilogue.bias = layer.operands.bias;
  epilogue.activation = layer.epilogue.activation;
  epilogue.clamp_min = layer.epilogue.clamp_min;
  epilogue.clamp_max = layer.epilogue.clamp_max;
  epilogue.residual = layer.operands.residual;
  epilogue.residual_type = p.residual;
  epilogue.ldr = p.ldr;
  epilogue.out = out.mutable_data_ptr();
  epilogue.out_type = p.out;
  const Tensor ordered = empty_cpu({p.m, cpu::ordered_columns(integers)}, ScalarType::Float);
  auto* const ordered_rows = static_cast<float*>(ordered.mutable_data_ptr());
  cpu::order_rows(integers, rows.data, rows.type, p.m, rows.ld, ordered_rows);
  cpu::weight_only(integers, ordered_rows, p.m, epilogue);
  return out;
}

}  // namespace pyquant::bind

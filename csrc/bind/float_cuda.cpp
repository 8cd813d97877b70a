// 16-bit and weight-only layers on CUDA, and many of the latter for rows of their own. plan/route.h decides between a
// row of ours, which runs the whole layer, and torch's own product (of dequantised weights) with our epilogue behind it
// where torch's does not suffice.
#include "bind/float_cuda.h"

#include <torch/csrc/stable/ops.h>

#include <array>

#include "bind/float_layer.h"
#include "bind/gemm_cuda.h"

namespace pyquant::bind {
namespace {

// The whole layer in one row of ours, or nothing.
std::optional<Tensor> by_own_row(FloatLayer layer, const Tensor& x, const On& on) {
  GemmProblem& p = layer.problem;
  const Matrix rows = matrix(x);
  p.x = rows.type;
  p.ldx = rows.ld;
  layer.operands.x = rows.data;
  const Route route = route_of(Entry::float_linear, p, layer.operands, on);  // the result will start on 16 bytes
  if (route.form == Form::framework) return std::nullopt;
  Tensor out = empty(x, layer.out_shape, layer.out_type);
  layer.operands.out = out.mutable_data_ptr();
  run(route.row, route.problem, layer.operands, layer.epilogue, x, on);
  return out;
}

Tensor as_type(const Tensor& t, ScalarType type) { return t.scalar_type() == type ? t : torch::stable::to(t, type); }

// Where torch's Linear is the whole layer, torch computes it, bias in the layer's type; else the product goes through
// our epilogue, in place where the types are the same.
Tensor by_framework(FloatLayer layer, const Tensor& x, const Tensor& w, const On& on) {
  const bool same = x.scalar_type() == w.scalar_type();
  const ScalarType type = same ? x.scalar_type() : ScalarType::Float;
  GemmProblem& p = layer.problem;
  const Tensor rows = as_type(torch::stable::reshape(x, {p.m, p.k}), type), weights = as_type(w, type);
  const bool is_plain = layer.epilogue.activation == Activation::none && !layer.operands.residual;
  if (is_plain && layer.out_type == type) {
    const MaybeTensor bias = layer.bias ? MaybeTensor(as_type(*layer.bias, type)) : std::nullopt;
    return torch::stable::view(framework_linear(rows, weights, bias), layer.out_shape);
  }
  const bool widen = layer.out_type == ScalarType::Float && type != ScalarType::Float;
  const Tensor t = widen ? framework_product_f32(rows, weights) : framework_linear(rows, weights, std::nullopt);
  Tensor out = t.scalar_type() == layer.out_type ? t : empty(x, {p.m, p.n}, layer.out_type);
  layer.operands.out = out.mutable_data_ptr();
  align(&p, layer.operands);
  cuda::float_epilogue(t.const_data_ptr(), dtype_of(t), p.n, p, layer.operands, layer.epilogue, on.context);
  return torch::stable::view(out, layer.out_shape);
}

// Bytes from the first layer's operands to each: [4][layers], as GemmOperands has them.
std::vector<int64_t> shifts_of(const std::vector<Tensor>& w, const GroupedFloatLayers& g) {
  std::vector<int64_t> shifts;
  const auto add = [&](auto pointer_of) {
    const auto first = reinterpret_cast<intptr_t>(pointer_of(size_t{0}));
    for (size_t i = 0; i < w.size(); ++i) shifts.push_back(reinterpret_cast<intptr_t>(pointer_of(i)) - first);
  };
  for (const Tensor& one : w)
    if (one.stride(1) != 1 || one.stride(0) != w[0].stride(0))
      refuse("w", describe(one), "rows that lie as those of w[0]");
  add([&](size_t i) { return w[i].const_data_ptr(); });
  for (const int64_t shift : shifts)  // kernels copy 16 bytes at a time
    if (shift % 16 != 0)
      refuse("w", "weights " + std::to_string(shift) + " bytes apart", "multiples of 16 bytes apart");
  add([&](size_t i) { return g.layers[i].operands.w_scale; });
  add([&](size_t i) { return g.layers[i].operands.w_zero_point; });
  add([&](size_t i) { return g.layers[i].operands.bias; });
  return shifts;
}

// The codes as a matrix [n, k] in the type of x, for a product that does not read codes.
Tensor dequantised(const Tensor& x, const Matrix& codes, const FloatLayer& layer, const On& on) {
  const GemmProblem& p = layer.problem;
  Tensor real = empty(x, {p.n, p.k}, x.scalar_type());
  cuda::dequantize(codes.data, p.w, p.n, p.k, codes.ld * per_byte(p.w),
                   p.group_size ? Granularity::groups : Granularity::rows, p.group_size, layer.operands.w_scale,
                   layer.operands.w_zero_point, real.mutable_data_ptr(), dtype_of(x), on.context);
  return real;
}

}  // namespace

Tensor float_linear_cuda(const Tensor& x, const Tensor& w, MaybeTensor bias, MaybeTensor residual, Text activation,
                         double clamp_min, double clamp_max, std::optional<ScalarType> out_dtype) {
  floats("x", x);
  min_dim("x", x, 1);
  floats("w", w);
  exact_dim("w", w, 2);
  same_device("w", w, x);
  const int64_t n = w.size(0);
  shape_is("w", w, {n, x.size(x.dim() - 1)});
  FloatLayer layer = float_layer(x, n, bias, residual, activation, clamp_min, clamp_max, out_dtype);
  const On on(x);
  if (layer.problem.m == 0 || layer.problem.n == 0) return empty(x, layer.out_shape, layer.out_type);
  const Matrix weights = matrix(w);
  layer.problem.w = weights.type;
  layer.problem.ldw = weights.ld;
  layer.operands.w = weights.data;
  if (const auto out = by_own_row(layer, x, on)) return *out;
  return by_framework(layer, x, w, on);
}

Tensor weight_only_linear_cuda(const Tensor& x, const Tensor& w, const Tensor& w_scale, MaybeTensor w_zero_point,
                               MaybeTensor bias, MaybeTensor residual, int64_t w_bits, int64_t group_size,
                               Text activation, double clamp_min, double clamp_max,
                               std::optional<ScalarType> out_dtype) {
  FloatLayer layer = weight_only_layer(x, w, w_scale, w_zero_point, bias, residual, w_bits, group_size, activation,
                                       clamp_min, clamp_max, out_dtype);
  const On on(x);
  if (layer.problem.m == 0 || layer.problem.n == 0) return empty(x, layer.out_shape, layer.out_type);
  const Matrix weights = matrix(w);
  layer.problem.ldw = weights.ld * per_byte(layer.problem.w);
  layer.operands.w = weights.data;
  if (const auto out = by_own_row(layer, x, on)) return *out;
  const Tensor real = dequantised(x, weights, layer, on);
  layer.operands.w_scale = nullptr;  // applied
  return by_framework(layer, x, real, on);
}

Tensor grouped_weight_only_cuda(const Tensor& x, std::vector<Tensor> w, std::vector<Tensor> w_scale,
                                std::vector<Tensor> w_zero_point, std::vector<Tensor> bias, const Tensor& ends,
                                int64_t w_bits, int64_t group_size, Text activation, double clamp_min, double clamp_max,
                                MaybeTensor rows) {
  GroupedFloatLayers g = grouped_weight_only_layers(x, w, w_scale, w_zero_point, bias, ends, w_bits, group_size,
                                                    activation, clamp_min, clamp_max, rows);
  GemmProblem p = g.layers[0].problem;
  GemmOperands o = g.layers[0].operands;
  if (g.rows && x.size(0) >= kMaxSize)  // chosen rows are numbers of 32 bits in the kernel
    refuse("x", describe(x), "fewer than " + std::to_string(kMaxSize) + " rows where some are chosen, on CUDA");
  const On on(x);
  Tensor out = empty(x, {g.count, p.n}, g.layers[0].out_type);
  if (out.numel() == 0) return out;
  const std::vector<int64_t> shifts = shifts_of(w, g);
  const Matrix from = matrix(x);
  p.m = g.count;
  p.x = from.type;
  p.ldx = from.ld;
  p.ldw = w[0].stride(0) * per_byte(p.w);
  p.experts = static_cast<int64_t>(w.size());
  o.x = from.data;
  o.x_rows = g.rows;
  o.w = w[0].const_data_ptr();
  o.expert_ends = g.ends;
  o.expert_shifts = shifts.data();
  o.out = out.mutable_data_ptr();
  p.chooses_rows = g.rows != nullptr;
  const Route route = route_of(Entry::float_linear, p, o, on);
  Tensor sorted = x;
  if (route.form == Form::sorted) {
    sorted = framework_rows(x, *rows);
    o.x = sorted.const_data_ptr();
    o.x_rows = nullptr;
  }
  run(route.row, route.problem, o, g.layers[0].epilogue, sorted, on);
  return out;
}

}  // namespace pyquant::bind

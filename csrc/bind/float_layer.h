// The operands of layers whose activations stay floats, checked, on any device.
#pragma once
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

struct FloatLayer {
  Shape out_shape;
  ScalarType out_type = ScalarType::Float;
  GemmProblem problem;
  GemmOperands operands;
  Epilogue epilogue;
  MaybeTensor bias;
  std::vector<Tensor> keep;
};

inline FloatLayer float_layer(const Tensor& x, int64_t n, const MaybeTensor& bias, const MaybeTensor& residual,
                              const std::string& activation, double clamp_min, double clamp_max,
                              std::optional<ScalarType> out_dtype) {
  vector("bias", bias, x, ScalarType::Float, {n});
  FloatLayer layer;
  layer.out_shape = lead_of(x);
  layer.out_shape.push_back(n);
  layer.epilogue.activation = activation_of(activation, clamp_min, clamp_max);
  layer.epilogue.clamp_min = static_cast<float>(clamp_min);
  layer.epilogue.clamp_max = static_cast<float>(clamp_max);
  residual_check(residual, x, layer.out_shape);
  layer.out_type = float_type(out_dtype, x.scalar_type());
  layer.bias = bias;
  GemmProblem& p = layer.problem;
  p.n = p.ldo = n;
  p.k = x.size(x.dim() - 1);
  p.m = 1;
  for (int64_t extent : lead_of(x)) p.m *= extent;
  p.out = dtype_of_scalar(layer.out_type);
  layer.operands.bias = static_cast<const float*>(dense(bias, layer.keep));
  if (residual) {
    const Matrix r = matrix(*residual);
    layer.keep.push_back(r.keep);
    layer.operands.residual = r.data;
    p.residual = r.type;
    p.ldr = r.ld;
  }
  return layer;
}

// weight_only_linear but for its weights' memory.
inline FloatLayer weight_only_layer(const Tensor& x, const Tensor& w, const Tensor& w_scale,
                                    const MaybeTensor& w_zero_point, const MaybeTensor& bias,
                                    const MaybeTensor& residual, int64_t w_bits, int64_t group_size,
                                    const std::string& activation, double clamp_min, double clamp_max,
                                    std::optional<ScalarType> out_dtype) {
  floats("x", x);
  min_dim("x", x, 1);
  const DType type = weight_type_of("w_bits", w_bits);
  dtype_in("w", w, {memory_of(type)});
  exact_dim("w", w, 2);
  same_device("w", w, x);
  const int64_t n = w.size(0), k = x.size(x.dim() - 1);
  shape_is("w", w, {n, columns_of(type, k)});
  group(group_size, k);
  const Shape scale_shape = group_size ? Shape{n, k / group_size} : Shape{n};
  vector("w_scale", w_scale, x, ScalarType::Float, scale_shape);
  vector("w_zero_point", w_zero_point, x, ScalarType::Int, scale_shape);
  FloatLayer layer = float_layer(x, n, bias, residual, activation, clamp_min, clamp_max, out_dtype);
  layer.problem.w = type;
  layer.problem.group_size = group_size;
  layer.problem.has_w_zero_point = w_zero_point.has_value();
  layer.operands.w_scale = static_cast<const float*>(dense(w_scale, layer.keep));
  layer.operands.w_zero_point = static_cast<const int32_t*>(dense(w_zero_point, layer.keep));
  return layer;
}

// Layers of one shape and kind, for rows sorted by layer.
struct GroupedFloatLayers : GroupedRows {
  std::vector<FloatLayer> layers;  // each for all rows, which are not those of x
  std::vector<Tensor> keep;
};

// grouped_weight_only; w_zero_point, bias: one a layer, or none.
inline GroupedFloatLayers grouped_weight_only_layers(const Tensor& x, const std::vector<Tensor>& w,
                                                     const std::vector<Tensor>& w_scale,
                                                     const std::vector<Tensor>& w_zero_point,
                                                     const std::vector<Tensor>& bias, const Tensor& ends,
                                                     int64_t w_bits, int64_t group_size, const std::string& activation,
                                                     double clamp_min, double clamp_max, const MaybeTensor& rows) {
  const auto as_many = [&](const char* argument, const std::vector<Tensor>& given, bool may_lack) {
    if (given.size() == w.size() || (may_lack && given.empty())) return;
    refuse(argument, std::to_string(given.size()) + " tensors",
           std::to_string(w.size()) + ", one a layer" + (may_lack ? ", or none" : ""));
  };
  const auto at = [](const std::vector<Tensor>& tensors, size_t index) {
    return tensors.empty() ? MaybeTensor() : MaybeTensor(tensors[index]);
  };
  if (w.empty()) refuse("w", "no tensors", "one a layer, at least one");
  as_many("w_scale", w_scale, false);
  as_many("w_zero_point", w_zero_point, true);
  as_many("bias", bias, true);
  GroupedFloatLayers g;
  static_cast<GroupedRows&>(g) = grouped_rows(x, w.size(), ends, rows, g.keep);
  g.layers.reserve(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    shape_is("w", w[i], shape_of(w[0]));
    g.layers.push_back(weight_only_layer(x, w[i], w_scale[i], at(w_zero_point, i), at(bias, i), std::nullopt, w_bits,
                                         group_size, activation, clamp_min, clamp_max, std::nullopt));
  }
  return g;
}

}  // namespace pyquant::bind

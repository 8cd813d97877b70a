// The quantisers of torch.ops.pyquant.* on CUDA: check, allocate through torch, launch through csrc/cuda.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/check.h"
#include "bind/device.h"
#include "bind/text.h"

namespace pyquant::bind {
namespace {

cuda::FloatMatrix floats_of(const Matrix& m) { return {m.data, m.type, m.rows, m.cols, m.ld}; }

cuda::CodeRange range_of(bool symmetric, int64_t qmin, int64_t qmax) {
  return {static_cast<int32_t>(qmin), static_cast<int32_t>(qmax), symmetric};
}

Tensor quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity, int64_t group_size,
                int64_t qmin, int64_t qmax) {
  floats("x", x);
  const Quantisation q = granularity_of(granularity, x, group_size);
  qparams(x, scale, zero_point, granularity, q);
  code_range(qmin, qmax);
  const On on(x);
  Tensor out = empty(x, shape_of(x), ScalarType::Char);
  if (out.numel() == 0) return out;
  std::vector<Tensor> keep;
  const Matrix m = matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x);
  cuda::quantize(floats_of(m), q.granularity, group_size, static_cast<const float*>(dense(scale, keep)),
                 static_cast<const int32_t*>(dense(zero_point, keep)), range_of(true, qmin, qmax),
                 {out.mutable_data_ptr(), m.cols}, on.context);
  return out;
}

// Codes, scale and zero point to be written.
struct Dynamic {
  Tensor codes, scale, zero_point;
  Dynamic(const Tensor& x, const Shape& codes_shape, const Shape& scale_shape)
      : codes(empty(x, codes_shape, ScalarType::Char)),
        scale(empty(x, scale_shape, ScalarType::Float)),
        zero_point(empty(x, scale_shape, ScalarType::Int)) {}
  cuda::QuantizeParams params() {
    return {static_cast<float*>(scale.mutable_data_ptr()), static_cast<int32_t*>(zero_point.mutable_data_ptr())};
  }
  cuda::QuantizeOut out(int64_t cols) { return {codes.mutable_data_ptr(), cols}; }
};

using Quantised = std::tuple<Tensor, Tensor, Tensor>;
using QuantisedSum = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Quantised quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size, bool symmetric, int64_t qmin,
                           int64_t qmax) {
  floats("x", x);
  const Quantisation q = granularity_of(granularity, x, group_size);
  dynamic_code_range(symmetric, qmin, qmax);
  const On on(x);
  Dynamic d(x, shape_of(x), q.scale_shape);
  Tensor workspace;
  void* parts = nullptr;
  if (q.granularity == Granularity::tensor) {
    workspace = empty(x, {cuda::kQuantizeWorkspaceBytes}, ScalarType::Byte);
    parts = workspace.mutable_data_ptr();
  }
  const Matrix m = matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x);
  cuda::quantize_dynamic(floats_of(m), q.granularity, group_size, range_of(symmetric, qmin, qmax), d.params(),
                         d.out(m.cols), parts, on.context);
  return {d.codes, d.scale, d.zero_point};
}

Tensor dequantize(const Tensor& q, const Tensor& scale, MaybeTensor zero_point, Text granularity, int64_t group_size,
                  ScalarType out_dtype) {
  dtype_in("q", q, {ScalarType::Char, ScalarType::Byte});
  const Quantisation g = granularity_of(granularity, q, group_size);
  qparams(q, scale, zero_point, granularity, g);
  float_type(out_dtype, out_dtype);
  const On on(q);
  Tensor out = empty(q, shape_of(q), out_dtype);
  if (out.numel() == 0) return out;
  std::vector<Tensor> keep;
  const Matrix m = matrix(q.dim() == 0 ? torch::stable::view(q, {1}) : q);
  cuda::dequantize(m.data, m.type, m.rows, m.cols, m.ld, g.granularity, group_size,
                   static_cast<const float*>(dense(scale, keep)), static_cast<const int32_t*>(dense(zero_point, keep)),
                   out.mutable_data_ptr(), dtype_of_scalar(out_dtype), on.context);
  return out;
}

QuantisedSum norm_quantize(bool subtract_mean, const Tensor& x, const MaybeTensor& residual, const MaybeTensor& weight,
                           const MaybeTensor& bias, double eps, bool symmetric, int64_t qmin, int64_t qmax) {
  NormCall call = norm_call(subtract_mean, x, residual, weight, bias, eps, symmetric, qmin, qmax);
  const On on(x);
  Dynamic d(x, shape_of(x), call.scale_shape);
  Tensor sum;
  if (residual) {
    sum = empty(x, shape_of(x), x.scalar_type());
    call.norm.sum = sum.mutable_data_ptr();
  }
  cuda::norm_quantize(floats_of(call.x), call.norm, range_of(symmetric, qmin, qmax), d.params(), d.out(call.x.cols),
                      on.context);
  return {d.codes, d.scale, d.zero_point, sum};
}

Quantised without_sum(const QuantisedSum& r) { return {std::get<0>(r), std::get<1>(r), std::get<2>(r)}; }

Quantised rms_norm_quantize(const Tensor& x, MaybeTensor weight, double eps, bool symmetric, int64_t qmin,
                            int64_t qmax) {
  return without_sum(norm_quantize(false, x, std::nullopt, weight, std::nullopt, eps, symmetric, qmin, qmax));
}

Quantised layer_norm_quantize(const Tensor& x, MaybeTensor weight, MaybeTensor bias, double eps, bool symmetric,
                              int64_t qmin, int64_t qmax) {
  return without_sum(norm_quantize(true, x, std::nullopt, weight, bias, eps, symmetric, qmin, qmax));
}

QuantisedSum add_rms_norm_quantize(const Tensor& x, const Tensor& residual, MaybeTensor weight, double eps,
                                   bool symmetric, int64_t qmin, int64_t qmax) {
  return norm_quantize(false, x, residual, weight, std::nullopt, eps, symmetric, qmin, qmax);
}

QuantisedSum add_layer_norm_quantize(const Tensor& x, const Tensor& residual, MaybeTensor weight, MaybeTensor bias,
                                     double eps, bool symmetric, int64_t qmin, int64_t qmax) {
  return norm_quantize(true, x, residual, weight, bias, eps, symmetric, qmin, qmax);
}

Quantised silu_mul_quantize(const Tensor& x, bool symmetric, int64_t qmin, int64_t qmax) {
  Shape shape;
  const Matrix m = silu_mul_call(x, symmetric, qmin, qmax, &shape);
  const On on(x);
  Dynamic d(x, shape, lead_of(x));
  cuda::silu_mul_quantize(floats_of(m), range_of(symmetric, qmin, qmax), d.params(), d.out(m.cols / 2), on.context);
  return {d.codes, d.scale, d.zero_point};
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(PYQUANT_BIND_LIBRARY, PYQUANT_BIND_KEY, m) {
  namespace b = pyquant::bind;
  m.impl("quantize", TORCH_BOX(&b::quantize));
  m.impl("quantize_dynamic", TORCH_BOX(&b::quantize_dynamic));
  m.impl("dequantize", TORCH_BOX(&b::dequantize));
  m.impl("rms_norm_quantize", TORCH_BOX(&b::rms_norm_quantize));
  m.impl("layer_norm_quantize", TORCH_BOX(&b::layer_norm_quantize));
  m.impl("add_rms_norm_quantize", TORCH_BOX(&b::add_rms_norm_quantize));
  m.impl("add_layer_norm_quantize", TORCH_BOX(&b::add_layer_norm_quantize));
  m.impl("silu_mul_quantize", TORCH_BOX(&b::silu_mul_quantize));
}

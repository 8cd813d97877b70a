// The quantisers of torch.ops.pyquant, once for all backends: check, allocate, call the backend.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "bind/boxed.h"
#include "bind/check.h"
#include "bind/text.h"
#include "core/histogram_math.h"

namespace pyquant::bind {

template <class Backend>
struct QuantiseOps {
  using Range = typename Backend::Range;
  using Quantised = std::tuple<Tensor, Tensor, Tensor>;
  using QuantisedSum = std::tuple<Tensor, Tensor, Tensor, Tensor>;

  // Codes, scale and zero point to be written.
  struct Results {
    Tensor codes, scale, zero_point;
    Results(const Backend& on, const Shape& codes_shape, const Shape& scale_shape)
        : codes(on.empty(codes_shape, ScalarType::Char)),
          scale(on.empty(scale_shape, ScalarType::Float)),
          zero_point(on.empty(scale_shape, ScalarType::Int)) {}
    int8_t* data() { return static_cast<int8_t*>(codes.mutable_data_ptr()); }
    typename Backend::Params params() {
      return {static_cast<float*>(scale.mutable_data_ptr()), static_cast<int32_t*>(zero_point.mutable_data_ptr())};
    }
  };

  static Range range(bool symmetric, int64_t qmin, int64_t qmax) {
    return {static_cast<int32_t>(qmin), static_cast<int32_t>(qmax), symmetric};
  }

  // A tensor without dimensions is a row of one.
  static Matrix rows(const Tensor& x) { return matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x); }

  static Tensor quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                         int64_t group_size, int64_t qmin, int64_t qmax) {
    floats("x", x);
    const Quantisation q = granularity_of(granularity, x, group_size);
    qparams(x, scale, zero_point, granularity, q);
    code_range_with(zero_point, qmin, qmax);
    const Backend on(x);
    std::vector<Tensor> keep;
    const auto* zeros = static_cast<const int32_t*>(dense(zero_point, keep));
    on.check_zero_points("zero_point", zeros, count_of(zero_point), qmin, qmax);
    Tensor out = on.empty(shape_of(x), ScalarType::Char);
    if (out.numel() == 0) return out;
    on.quantize(rows(x), q, group_size, static_cast<const float*>(dense(scale, keep)), zeros, range(true, qmin, qmax),
                static_cast<int8_t*>(out.mutable_data_ptr()));
    return out;
  }

  static Quantised quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size, bool symmetric, int64_t qmin,
                                    int64_t qmax) {
    floats("x", x);
    const Quantisation q = granularity_of(granularity, x, group_size);
    dynamic_code_range(symmetric, qmin, qmax);
    const Backend on(x);
    Results r(on, shape_of(x), q.scale_shape);
    on.quantize_dynamic(rows(x), q, group_size, range(symmetric, qmin, qmax), r.data(), r.params());
    return {r.codes, r.scale, r.zero_point};
  }

  static Tensor dequantize(const Tensor& q, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                           int64_t group_size, std::optional<ScalarType> out_dtype) {
    dtype_in("q", q, {ScalarType::Char, ScalarType::Byte});
    const Quantisation g = granularity_of(granularity, q, group_size);
    qparams(q, scale, zero_point, granularity, g);
    const ScalarType type = float_type(out_dtype, ScalarType::Float);
    const Backend on(q);
    std::vector<Tensor> keep;
    const auto* zeros = static_cast<const int32_t*>(dense(zero_point, keep));
    const bool is_unsigned = q.scalar_type() == ScalarType::Byte;
    on.check_zero_points("zero_point", zeros, count_of(zero_point), is_unsigned ? 0 : -128, is_unsigned ? 255 : 127);
    Tensor out = on.empty(shape_of(q), type);
    if (out.numel() == 0) return out;
    on.dequantize(rows(q), g, group_size, static_cast<const float*>(dense(scale, keep)), zeros, out.mutable_data_ptr(),
                  dtype_of_scalar(type));
    return out;
  }

  static Quantised rms_norm_quantize(const Tensor& x, MaybeTensor weight, double eps, bool symmetric, int64_t qmin,
                                     int64_t qmax) {
    return without_sum(norm_quantize(false, x, std::nullopt, weight, std::nullopt, eps, symmetric, qmin, qmax));
  }

  static Quantised layer_norm_quantize(const Tensor& x, MaybeTensor weight, MaybeTensor bias, double eps,
                                       bool symmetric, int64_t qmin, int64_t qmax) {
    return without_sum(norm_quantize(true, x, std::nullopt, weight, bias, eps, symmetric, qmin, qmax));
  }

  static QuantisedSum add_rms_norm_quantize(const Tensor& x, const Tensor& residual, MaybeTensor weight, double eps,
                                            bool symmetric, int64_t qmin, int64_t qmax) {
    return norm_quantize(false, x, residual, weight, std::nullopt, eps, symmetric, qmin, qmax);
  }

  static QuantisedSum add_layer_norm_quantize(const Tensor& x, const Tensor& residual, MaybeTensor weight,
                                              MaybeTensor bias, double eps, bool symmetric, int64_t qmin,
                                              int64_t qmax) {
    return norm_quantize(true, x, residual, weight, bias, eps, symmetric, qmin, qmax);
  }

  static Quantised silu_mul_quantize(const Tensor& x, bool symmetric, int64_t qmin, int64_t qmax) {
    return gated(x, silu_mul_call(x, symmetric, qmin, qmax), symmetric, qmin, qmax);
  }

  static Quantised activation_mul_quantize(const Tensor& x, const Tensor& up, Text activation, double clamp_min,
                                           double clamp_max, bool symmetric, int64_t qmin, int64_t qmax) {
    return gated(x, gate_call(x, up, activation, clamp_min, clamp_max, symmetric, qmin, qmax), symmetric, qmin, qmax);
  }

  static Quantised hadamard_quantize(const Tensor& x, int64_t block, bool symmetric, int64_t qmin, int64_t qmax,
                                     std::optional<double> scale) {
    const Hadamard by = hadamard_call(x, block, scale);
    dynamic_code_range(symmetric, qmin, qmax);
    const Backend on(x);
    Results r(on, shape_of(x), lead_of(x));
    on.hadamard_quantize(matrix(x), by, range(symmetric, qmin, qmax), r.data(), r.params());
    return {r.codes, r.scale, r.zero_point};
  }

  static Tensor hadamard_transform(const Tensor& x, int64_t block, std::optional<double> scale) {
    const Hadamard by = hadamard_call(x, block, scale);
    const Backend on(x);
    Tensor out = on.empty(shape_of(x), x.scalar_type());
    if (out.numel() != 0) on.hadamard_transform(matrix(x), by, out.mutable_data_ptr());
    return out;
  }

  static Tensor magnitude_histogram(const Tensor& x, int64_t exponent) {
    histogram_call(x, exponent);
    const Backend on(x);
    Tensor counts = on.empty({2, kHistogramBins}, ScalarType::Long);
    on.magnitude_histogram(rows(x), static_cast<int32_t>(exponent), static_cast<int64_t*>(counts.mutable_data_ptr()));
    return counts;
  }

  // All but magnitude_histogram, which not every build of a backend has.
  static void add_to(torch::stable::detail::StableLibrary& m) {
    m.impl("quantize", PYQUANT_BOX(&QuantiseOps::quantize));
    m.impl("quantize_dynamic", PYQUANT_BOX(&QuantiseOps::quantize_dynamic));
    m.impl("dequantize", PYQUANT_BOX(&QuantiseOps::dequantize));
    m.impl("rms_norm_quantize", PYQUANT_BOX(&QuantiseOps::rms_norm_quantize));
    m.impl("layer_norm_quantize", PYQUANT_BOX(&QuantiseOps::layer_norm_quantize));
    m.impl("add_rms_norm_quantize", PYQUANT_BOX(&QuantiseOps::add_rms_norm_quantize));
    m.impl("add_layer_norm_quantize", PYQUANT_BOX(&QuantiseOps::add_layer_norm_quantize));
    m.impl("silu_mul_quantize", PYQUANT_BOX(&QuantiseOps::silu_mul_quantize));
    m.impl("activation_mul_quantize", PYQUANT_BOX(&QuantiseOps::activation_mul_quantize));
    m.impl("hadamard_quantize", PYQUANT_BOX(&QuantiseOps::hadamard_quantize));
    m.impl("hadamard_transform", PYQUANT_BOX(&QuantiseOps::hadamard_transform));
  }

 private:
  // x: whose leading dimensions and device the results have.
  static Quantised gated(const Tensor& x, const GateCall& call, bool symmetric, int64_t qmin, int64_t qmax) {
    const Backend on(x);
    Results r(on, call.out_shape, lead_of(x));
    on.activation_mul_quantize(call.x, call.gate, range(symmetric, qmin, qmax), r.data(), r.params());
    return {r.codes, r.scale, r.zero_point};
  }

  static QuantisedSum norm_quantize(bool subtract_mean, const Tensor& x, const MaybeTensor& residual,
                                    const MaybeTensor& weight, const MaybeTensor& bias, double eps, bool symmetric,
                                    int64_t qmin, int64_t qmax) {
    NormCall call = norm_call(subtract_mean, x, residual, weight, bias, eps, symmetric, qmin, qmax);
    const Backend on(x);
    Results r(on, shape_of(x), call.scale_shape);
    Tensor sum;
    if (residual) {
      sum = on.empty(shape_of(x), x.scalar_type());
      call.norm.sum = sum.mutable_data_ptr();
    }
    on.norm_quantize(call.x, call.norm, range(symmetric, qmin, qmax), r.data(), r.params());
    return {r.codes, r.scale, r.zero_point, sum};
  }

  static Quantised without_sum(const QuantisedSum& r) { return {std::get<0>(r), std::get<1>(r), std::get<2>(r)}; }
};

}  // namespace pyquant::bind

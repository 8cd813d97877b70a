// torch.ops.pyquant.* on the CPU: check, allocate, call csrc/cpu.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "bind/check.h"
#include "bind/cpu_tensor.h"
#include "bind/text.h"
#include "core/histogram_math.h"
#include "cpu/cpu.h"
#include "plan/tuned.h"

namespace pyquant::bind {
namespace {

// Lends torch's thread pool to the core, which knows no torch.
[[maybe_unused]]
const bool threads_lent = [] {
  cpu::set_parallel_for(
      [](int64_t begin, int64_t end, int64_t grain, cpu::Body body, void* context) {
        torch::stable::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) { body(context, b, e); });
      },
      [] { return static_cast<int>(torch::stable::get_num_threads()); });
  return true;
}();

int32_t torch_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Char: return aoti_torch_dtype_int8();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    case ScalarType::Long: return aoti_torch_dtype_int64();
    default: return aoti_torch_dtype_int32();
  }
}

}  // namespace

Tensor empty_cpu(const Shape& shape, ScalarType type) {
  std::array<int64_t, 16> strides;
  if (shape.size() > strides.size()) refuse("x", std::to_string(shape.size()) + " dimensions", "at most 16 dimensions");
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  const AOTITorchError failed =
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), torch_dtype(type),
                               aoti_torch_device_type_cpu(), 0, &handle);
  if (failed) out_of_memory(step * (type == ScalarType::Long ? 8 : bits_of(dtype_of_scalar(type)) / 8), "cpu");
  return Tensor(handle);
}

namespace {

int32_t small(int64_t value) { return static_cast<int32_t>(value); }

Tensor quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity, int64_t group_size,
                int64_t qmin, int64_t qmax) {
  floats("x", x);
  const Quantisation q = granularity_of(granularity, x, group_size);
  qparams(x, scale, zero_point, granularity, q);
  code_range(qmin, qmax);
  std::vector<Tensor> keep;
  const auto* zeros = static_cast<const int32_t*>(dense(zero_point, keep));
  zero_points("zero_point", zeros, count_of(zero_point), qmin, qmax);
  Tensor out = empty_cpu(shape_of(x), ScalarType::Char);
  if (out.numel() == 0) return out;
  const Tensor flat = x.dim() == 0 ? torch::stable::view(x, {1}) : x;
  const Matrix m = matrix(flat);
  cpu::quantize(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size,
                static_cast<const float*>(dense(scale, keep)), zeros, small(qmin), small(qmax),
                static_cast<int8_t*>(out.mutable_data_ptr()));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size,
                                                    bool symmetric, int64_t qmin, int64_t qmax) {
  floats("x", x);
  const Quantisation q = granularity_of(granularity, x, group_size);
  dynamic_code_range(symmetric, qmin, qmax);
  Tensor codes = empty_cpu(shape_of(x), ScalarType::Char);
  Tensor scale = empty_cpu(q.scale_shape, ScalarType::Float);
  Tensor zero_point = empty_cpu(q.scale_shape, ScalarType::Int);
  const Tensor flat = x.dim() == 0 ? torch::stable::view(x, {1}) : x;
  const Matrix m = matrix(flat);
  cpu::quantize_dynamic(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size, symmetric, small(qmin),
                        small(qmax), static_cast<int8_t*>(codes.mutable_data_ptr()),
                        static_cast<float*>(scale.mutable_data_ptr()),
                        static_cast<int32_t*>(zero_point.mutable_data_ptr()));
  return {codes, scale, zero_point};
}

using Quantised = std::tuple<Tensor, Tensor, Tensor>;
using QuantisedSum = std::tuple<Tensor, Tensor, Tensor, Tensor>;

QuantisedSum norm_quantize(bool subtract_mean, const Tensor& x, const MaybeTensor& residual, const MaybeTensor& weight,
                           const MaybeTensor& bias, double eps, bool symmetric, int64_t qmin, int64_t qmax) {
  NormCall call = norm_call(subtract_mean, x, residual, weight, bias, eps, symmetric, qmin, qmax);
  Tensor codes = empty_cpu(shape_of(x), ScalarType::Char);
  Tensor scale = empty_cpu(call.scale_shape, ScalarType::Float);
  Tensor zero_point = empty_cpu(call.scale_shape, ScalarType::Int);
  Tensor sum;
  if (residual) {
    sum = empty_cpu(shape_of(x), x.scalar_type());
    call.norm.sum = sum.mutable_data_ptr();
  }
  const Matrix& m = call.x;
  cpu::norm_quantize(m.data, m.type, m.rows, m.cols, m.ld, call.norm, symmetric, small(qmin), small(qmax),
                     static_cast<int8_t*>(codes.mutable_data_ptr()), static_cast<float*>(scale.mutable_data_ptr()),
                     static_cast<int32_t*>(zero_point.mutable_data_ptr()));
  return {codes, scale, zero_point, sum};
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
  Tensor codes = empty_cpu(shape, ScalarType::Char);
  Tensor scale = empty_cpu(lead_of(x), ScalarType::Float);
  Tensor zero_point = empty_cpu(lead_of(x), ScalarType::Int);
  cpu::silu_mul_quantize(m.data, m.type, m.rows, m.cols / 2, m.ld, symmetric, small(qmin), small(qmax),
                         static_cast<int8_t*>(codes.mutable_data_ptr()), static_cast<float*>(scale.mutable_data_ptr()),
                         static_cast<int32_t*>(zero_point.mutable_data_ptr()));
  return {codes, scale, zero_point};
}

Tensor dequantize(const Tensor& q, const Tensor& scale, MaybeTensor zero_point, Text granularity, int64_t group_size,
                  ScalarType out_dtype) {
  dtype_in("q", q, {ScalarType::Char, ScalarType::Byte});
  const Quantisation g = granularity_of(granularity, q, group_size);
  qparams(q, scale, zero_point, granularity, g);
  float_type(out_dtype, out_dtype);
  std::vector<Tensor> keep;
  const auto* zeros = static_cast<const int32_t*>(dense(zero_point, keep));
  const bool is_unsigned = q.scalar_type() == ScalarType::Byte;
  zero_points("zero_point", zeros, count_of(zero_point), is_unsigned ? 0 : -128, is_unsigned ? 255 : 127);
  Tensor out = empty_cpu(shape_of(q), out_dtype);
  if (out.numel() == 0) return out;
  const Tensor flat = q.dim() == 0 ? torch::stable::view(q, {1}) : q;
  const Matrix m = matrix(flat);
  cpu::dequantize(m.data, m.type, m.rows, m.cols, m.ld, g.granularity, group_size,
                  static_cast<const float*>(dense(scale, keep)), zeros, out.mutable_data_ptr(),
                  dtype_of_scalar(out_dtype));
  return out;
}

Tensor magnitude_histogram(const Tensor& x, int64_t exponent) {
  histogram_call(x, exponent);
  Tensor counts = empty_cpu({2, kHistogramBins}, ScalarType::Long);
  const Matrix m = matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x);
  cpu::magnitude_histogram(m.data, m.type, m.rows, m.cols, m.ld, small(exponent),
                           static_cast<int64_t*>(counts.mutable_data_ptr()));
  return counts;
}

Tensor pack_int4(const Tensor& q) {
  dtype_in("q", q, {ScalarType::Char});
  min_dim("q", q, 1);
  Shape shape = shape_of(q);
  const int64_t k = shape.back();
  shape.back() = (k + 1) / 2;
  Tensor out = empty_cpu(shape, ScalarType::Byte);
  if (out.numel() == 0) return out;
  const Tensor plain = torch::stable::contiguous(q);
  cpu::pack_int4(static_cast<const int8_t*>(plain.const_data_ptr()), plain.numel() / k, k,
                 static_cast<uint8_t*>(out.mutable_data_ptr()));
  return out;
}

Tensor unpack_int4(const Tensor& packed, int64_t k) {
  dtype_in("packed", packed, {ScalarType::Byte});
  min_dim("packed", packed, 1);
  Shape shape = shape_of(packed);
  shape.back() = unpacked_columns(shape.back(), k);
  Tensor out = empty_cpu(shape, ScalarType::Char);
  if (out.numel() == 0) return out;
  const Tensor plain = torch::stable::contiguous(packed);
  cpu::unpack_int4(static_cast<const uint8_t*>(plain.const_data_ptr()), out.numel() / k, k,
                   static_cast<int8_t*>(out.mutable_data_ptr()));
  return out;
}

Tensor gemm(const char* op, const Tensor& x, const Tensor& w, const MaybeTensor& w_scale, const MaybeTensor& x_scale,
            const MaybeTensor& x_zero_point, const MaybeTensor& bias, const MaybeTensor& residual,
            const MaybeTensor& out_scale, const MaybeTensor& out_zero_point, int64_t group_size,
            const std::string& activation, double clamp_min, double clamp_max, int64_t out_qmin, int64_t out_qmax,
            ScalarType out_dtype) {
  GemmCall call = gemm_call({op, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point,
                             group_size, activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype});
  const bool is_unsigned = call.problem.x == DType::u8, four = call.problem.x == DType::s4;
  zero_points("x_zero_point", call.operands.x_zero_point, count_of(x_zero_point),
              is_unsigned ? 0
              : four      ? -8
                          : -128,
              is_unsigned ? 255
              : four      ? 7
                          : 127);
  zero_points("out_zero_point", call.operands.out_zero_point, 1, out_qmin, out_qmax);
  Tensor out = empty_cpu(call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  call.operands.out = out.mutable_data_ptr();
  GemmProblem& p = call.problem;
  Tensor codes;
  if (p.x_packed) {  // the kernels take a code a byte
    const Tensor dense_rows = torch::stable::contiguous(x);
    codes = empty_cpu({p.m, p.k}, ScalarType::Char);
    cpu::unpack_int4(static_cast<const uint8_t*>(dense_rows.const_data_ptr()), p.m, p.k,
                     static_cast<int8_t*>(codes.mutable_data_ptr()));
    call.operands.x = codes.const_data_ptr();
    p.x_packed = false;
    p.ldx = p.k;
  }
  cpu::gemm(call.problem, call.operands, call.epilogue);
  return out;
}

#define PYQUANT_GEMM_OP(NAME)                                                                                       \
  Tensor NAME(const Tensor& x, const Tensor& w, MaybeTensor w_scale, MaybeTensor x_scale, MaybeTensor x_zero_point, \
              MaybeTensor bias, MaybeTensor residual, MaybeTensor out_scale, MaybeTensor out_zero_point,            \
              int64_t group_size, Text activation, double clamp_min, double clamp_max, int64_t out_qmin,            \
              int64_t out_qmax, ScalarType out_dtype) {                                                             \
    return gemm(#NAME, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size, \
                activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype);                                   \
  }
PYQUANT_GEMM_OP(gemm_s8s8)
PYQUANT_GEMM_OP(gemm_s8s4)
PYQUANT_GEMM_OP(gemm_s4s4)

void own_layout(const LinearSpec& s) {
  if (s.layout != Layout::cpu_blocked) refuse("spec", "a layout of CUDA", "layout 'cpu_blocked' on the CPU");
}

Tensor pack_linear(const Tensor& w, const Tensor& w_scale, MaybeTensor bias, MaybeTensor x_scale,
                   MaybeTensor x_zero_point, MaybeTensor out_scale, MaybeTensor out_zero_point,
                   std::vector<int64_t> spec) {
  const LinearSpec s = linear_spec(spec);
  own_layout(s);
  pack_check(s, w, w_scale, bias, x_scale, x_zero_point, out_scale, out_zero_point);
  std::vector<Tensor> keep;
  LinearWeights weights;
  weights.codes = dense(w, keep);
  weights.w_scale = static_cast<const float*>(dense(w_scale, keep));
  weights.bias = static_cast<const float*>(dense(bias, keep));
  weights.x_scale = static_cast<const float*>(dense(x_scale, keep));
  weights.x_zero_point = static_cast<const int32_t*>(dense(x_zero_point, keep));
  weights.out_scale = static_cast<const float*>(dense(out_scale, keep));
  weights.out_zero_point = static_cast<const int32_t*>(dense(out_zero_point, keep));
  pack_zero_points(s, weights);
  Tensor packed = empty_cpu({static_cast<int64_t>(packed_bytes(s))}, ScalarType::Byte);
  cpu::pack_linear(s, weights, packed.mutable_data_ptr());
  return packed;
}

Tensor unpack_linear(const Tensor& packed, std::vector<int64_t> spec) {
  const LinearSpec s = linear_spec(spec);
  own_layout(s);
  dtype_in("packed", packed, {ScalarType::Byte});
  shape_is("packed", packed, {static_cast<int64_t>(packed_bytes(s))});
  const bool four = s.w_bits == 4;
  Tensor codes = empty_cpu({s.n, four ? (s.k + 1) / 2 : s.k}, four ? ScalarType::Byte : ScalarType::Char);
  const Tensor plain = torch::stable::contiguous(packed);
  cpu::unpack_linear(s, plain.const_data_ptr(), codes.mutable_data_ptr());
  return codes;
}

Tensor qlinear(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
               std::optional<ScalarType> out_dtype, MaybeTensor x_scale, MaybeTensor x_zero_point) {
  const LinearCall call = linear_call(x, packed, residual, spec, out_dtype, x_scale, x_zero_point);
  own_layout(call.spec);
  const LinearSpec& s = call.spec;
  const bool is_unsigned = call.x.type == DType::u8;
  if (s.input == InputMode::static_per_tensor) {
    const int32_t zero = cpu::input_zero_point(packed.const_data_ptr());
    zero_points("x_zero_point", &zero, 1, is_unsigned || s.x_symmetric ? 0 : s.x_qmin,
                is_unsigned     ? 255
                : s.x_symmetric ? 0
                                : s.x_qmax);
  }
  zero_points("x_zero_point", call.x_zero_point, count_of(x_zero_point), s.x_qmin, s.x_qmax);
  Tensor out = empty_cpu(call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  Matrix m = call.x;
  if (m.type == DType::s4) {  // the kernels take a code a byte
    const Tensor dense_rows = torch::stable::contiguous(x);
    m.keep = empty_cpu({m.rows, s.k}, ScalarType::Char);
    cpu::unpack_int4(static_cast<const uint8_t*>(dense_rows.const_data_ptr()), m.rows, s.k,
                     static_cast<int8_t*>(m.keep.mutable_data_ptr()));
    m.data = m.keep.const_data_ptr();
    m.type = DType::s8;
    m.ld = s.k;
  }
  const bool out_packed = call.out == DType::s4;
  Tensor codes = out_packed ? empty_cpu({m.rows, s.n}, ScalarType::Char) : out;
  cpu::linear(s, packed.const_data_ptr(), m.data, m.type, m.rows, m.ld, call.residual.data, call.residual.type,
              call.residual.ld, codes.mutable_data_ptr(), out_packed ? DType::s8 : call.out, call.x_scale,
              call.x_zero_point);
  if (out_packed)
    cpu::pack_int4(static_cast<const int8_t*>(codes.const_data_ptr()), m.rows, s.n,
                   static_cast<uint8_t*>(out.mutable_data_ptr()));
  return out;
}

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
  m.impl("quantize", TORCH_BOX(&b::quantize));
  m.impl("quantize_dynamic", TORCH_BOX(&b::quantize_dynamic));
  m.impl("rms_norm_quantize", TORCH_BOX(&b::rms_norm_quantize));
  m.impl("layer_norm_quantize", TORCH_BOX(&b::layer_norm_quantize));
  m.impl("add_rms_norm_quantize", TORCH_BOX(&b::add_rms_norm_quantize));
  m.impl("add_layer_norm_quantize", TORCH_BOX(&b::add_layer_norm_quantize));
  m.impl("silu_mul_quantize", TORCH_BOX(&b::silu_mul_quantize));
  m.impl("dequantize", TORCH_BOX(&b::dequantize));
  m.impl("magnitude_histogram", TORCH_BOX(&b::magnitude_histogram));
  m.impl("pack_int4", TORCH_BOX(&b::pack_int4));
  m.impl("unpack_int4", TORCH_BOX(&b::unpack_int4));
  m.impl("gemm_s8s8", TORCH_BOX(&b::gemm_s8s8));
  m.impl("gemm_s8s4", TORCH_BOX(&b::gemm_s8s4));
  m.impl("gemm_s4s4", TORCH_BOX(&b::gemm_s4s4));
  m.impl("pack_linear", TORCH_BOX(&b::pack_linear));
  m.impl("unpack_linear", TORCH_BOX(&b::unpack_linear));
  m.impl("qlinear", TORCH_BOX(&b::qlinear));
  m.impl("_cpu_read", TORCH_BOX(&b::cpu_read_op));
}

STABLE_TORCH_LIBRARY_IMPL(pyquant, CompositeExplicitAutograd, m) {
  m.impl("_packed_bytes", TORCH_BOX(&pyquant::bind::packed_bytes_op));
  m.impl("_cpu_multiply", TORCH_BOX(&pyquant::bind::cpu_multiply_op));
  m.impl("_cpu_info", TORCH_BOX(&pyquant::bind::cpu_info));
  m.impl("_set_tuned", TORCH_BOX(&pyquant::bind::set_tuned_op));
  m.impl("_tuned_remarks", TORCH_BOX(&pyquant::bind::tuned_remarks_op));
}

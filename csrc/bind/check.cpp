#include "bind/check.h"

#include "core/histogram_math.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace pyquant::bind {

void refuse(const char* argument, const std::string& got, const std::string& allowed) {
  throw std::runtime_error(std::string("argument '") + argument + "': got " + got + "; allowed: " + allowed);
}

void out_of_memory(int64_t bytes, const std::string& device) {
  throw std::runtime_error("pyquant: out of memory: " + std::to_string(bytes) + " bytes on " + device);
}

const char* name_of_scalar(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "another dtype";
  }
}

std::string text_of(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

Shape lead_of(const Tensor& t) {
  Shape s = shape_of(t);
  s.pop_back();
  return s;
}

std::string describe(const Tensor& t) {
  return std::string(name_of_scalar(t.scalar_type())) + " " + text_of(shape_of(t));
}

DType dtype_of_scalar(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Char: return DType::s8;
    case ScalarType::Byte: return DType::u8;
    case ScalarType::Int: return DType::s32;
    default: return DType::f32;
  }
}

ScalarType memory_of(DType type) {
  const CodeType& code = code_type(type);
  return code.is_packed() || !code.is_signed() ? ScalarType::Byte : ScalarType::Char;
}

DType weight_type_of(const char* argument, int64_t bits) {
  if (const CodeType* type = weight_type(bits)) return type->type;
  std::string allowed;
  for (int64_t b = 0; b <= 8; ++b)
    if (weight_type(b)) allowed += (allowed.empty() ? "" : " or ") + std::to_string(b);
  refuse(argument, std::to_string(bits), allowed);
}

DType dtype_of(const Tensor& t) { return dtype_of_scalar(t.scalar_type()); }

void dtype_in(const char* argument, const Tensor& t, std::initializer_list<ScalarType> allowed) {
  if (!t.defined()) refuse(argument, "None", "a tensor");  // torch hands None for a Tensor on as an undefined one
  std::string names;
  for (ScalarType type : allowed) {
    if (t.scalar_type() == type) return;
    names += (names.empty() ? "" : " or ") + std::string(name_of_scalar(type));
  }
  refuse(argument, describe(t), names);
}

void floats(const char* argument, const Tensor& t) {
  dtype_in(argument, t, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
}

std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device";
}

void same_device(const char* argument, const Tensor& t, const Tensor& x, const char* name_of_x) {
  if (t.is_cpu() && x.is_cpu()) return;
  const std::string a = device_of(t), b = device_of(x);
  if (a != b) refuse(argument, "device " + a, "device " + b + ", where argument '" + name_of_x + "' is");
}

void min_dim(const char* argument, const Tensor& t, int64_t dim) {
  if (t.dim() < dim) refuse(argument, describe(t), "at least " + std::to_string(dim) + " dimension(s)");
}

void exact_dim(const char* argument, const Tensor& t, int64_t dim) {
  if (t.dim() != dim) refuse(argument, describe(t), std::to_string(dim) + " dimensions");
}

void shape_is(const char* argument, const Tensor& t, const Shape& shape) {
  if (shape_of(t) != shape) refuse(argument, describe(t), "shape " + text_of(shape));
}

void vector(const char* argument, const MaybeTensor& t, const Tensor& x, ScalarType type, const Shape& shape) {
  if (!t) return;
  dtype_in(argument, *t, {type});
  same_device(argument, *t, x);
  shape_is(argument, *t, shape);
}

void scalar_or(const char* argument, const MaybeTensor& t, const Tensor& x, ScalarType type, const Shape& shape) {
  if (!t) return;
  dtype_in(argument, *t, {type});
  same_device(argument, *t, x);
  const Shape own = shape_of(*t);
  if (own.empty() || own == Shape{1} || own == shape) return;
  const bool also = !shape.empty() && shape != Shape{1};
  refuse(argument, describe(*t), "shape [] or [1]" + (also ? " or " + text_of(shape) : ""));
}

void buffer(const char* argument, const Tensor& t, const Tensor& x, ScalarType type, const Shape& shape) {
  dtype_in(argument, t, {type});
  same_device(argument, t, x);
  shape_is(argument, t, shape);
  if (t.is_contiguous()) return;
  const auto strides = t.strides();
  refuse(argument, "strides " + text_of(Shape(strides.begin(), strides.end())), "a contiguous tensor");
}

void apart(const char* argument, const Tensor& written, const char* other_name, const Tensor& other, bool same) {
  if (written.numel() == 0 || other.numel() == 0) return;
  const auto bytes = [](const Tensor& t) {
    int64_t last = 0;  // offset of the last element in memory; torch's strides are never negative
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return (last + 1) * static_cast<int64_t>(t.element_size());
  };
  const auto a = reinterpret_cast<uintptr_t>(written.const_data_ptr());
  const auto b = reinterpret_cast<uintptr_t>(other.const_data_ptr());
  if (a + static_cast<uintptr_t>(bytes(written)) <= b || b + static_cast<uintptr_t>(bytes(other)) <= a) return;
  if (same && a == b && written.is_contiguous() && other.is_contiguous() &&
      written.scalar_type() == other.scalar_type() && shape_of(written) == shape_of(other))
    return;
  refuse(argument, std::string("memory that argument '") + other_name + "' shares",
         same ? std::string("memory of its own, or the whole of '") + other_name + "'" : "memory of its own");
}

void code_range(int64_t qmin, int64_t qmax, const char* low, const char* high) {
  constexpr const CodeType& code = code_type(DType::s8);
  const std::string to_last = " to " + std::to_string(code.qmax);
  if (!code.holds(qmin, qmin)) refuse(low, std::to_string(qmin), std::to_string(code.qmin) + to_last);
  if (qmax <= qmin || qmax > code.qmax) refuse(high, std::to_string(qmax), std::to_string(qmin + 1) + to_last);
}

void code_range_with(const MaybeTensor& zero_point, int64_t qmin, int64_t qmax) {
  code_range(qmin, qmax);
  if (!zero_point && (qmin > 0 || qmax < 0))
    refuse("zero_point", "None",
           "int32 from " + std::to_string(qmin) + " to " + std::to_string(qmax) + ": 0 is none of these codes");
}

void dynamic_code_range(bool symmetric, int64_t qmin, int64_t qmax) {
  code_range(qmin, qmax);
  if (symmetric && (qmin > -1 || qmax < 1))
    refuse("qmin", std::to_string(qmin), "below zero, with qmax above zero, when symmetric");
}

void histogram_call(const Tensor& x, int64_t exponent) {
  floats("x", x);
  if (exponent < kHistogramExponentMin || exponent > kHistogramExponentMax)
    refuse("exponent", std::to_string(exponent),
           std::to_string(kHistogramExponentMin) + " to " + std::to_string(kHistogramExponentMax));
}

void group(int64_t group_size, int64_t k) {
  // where K is 0 everything divides it; the limit keeps sizes that are rounded up to a group within 64 bits
  if (group_size < 0 || group_size >= kMaxSize || (group_size > 0 && k % group_size != 0))
    refuse("group_size", std::to_string(group_size), "0, or a positive divisor of K = " + std::to_string(k));
}

void zero_points(const char* argument, const int32_t* values, int64_t count, int64_t low, int64_t high) {
  if (!values) return;
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < low || values[i] > high)
      refuse(argument, "a zero point of " + std::to_string(values[i]),
             "codes from " + std::to_string(low) + " to " + std::to_string(high));
}

int64_t count_of(const MaybeTensor& t) { return t ? t->numel() : 0; }

int64_t unpacked_columns(int64_t bytes, int64_t k) {
  if (k < 0 || bytes != k / 2 + k % 2)
    refuse("k", std::to_string(k),
           std::to_string(std::max<int64_t>(2 * bytes - 1, 0)) + " or " + std::to_string(2 * bytes));
  return k;
}

Activation activation_of(const std::string& name, double clamp_min, double clamp_max) {
  std::string allowed;
  for (int32_t i = 0; i < kActivations; ++i) {
    allowed += std::string(i ? " or '" : "'") + kActivationNames[i] + "'";
    if (name != kActivationNames[i]) continue;
    const auto activation = static_cast<Activation>(i);
    if (activation == Activation::clamp && !(clamp_min <= clamp_max))
      refuse("clamp_min", std::to_string(clamp_min), "at most clamp_max");
    return activation;
  }
  refuse("activation", "'" + name + "'", allowed);
}

bool is_float_type(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

ScalarType float_type(std::optional<ScalarType> wanted, ScalarType otherwise) {
  const ScalarType type = wanted.value_or(otherwise);
  if (!is_float_type(type)) refuse("out_dtype", name_of_scalar(type), "float32 or float16 or bfloat16");
  return type;
}

Matrix matrix(const Tensor& t) {
  Matrix m;
  const int64_t dim = t.dim();
  m.type = dtype_of(t);
  m.cols = t.size(dim - 1);
  m.rows = 1;
  for (int64_t i = 0; i + 1 < dim; ++i) m.rows *= t.size(i);
  bool plain = m.cols <= 1 || t.stride(dim - 1) == 1;
  int64_t ld = m.cols, expected = -1;  // row stride of the collapsed leading dimensions, innermost first
  for (int64_t i = dim - 2; i >= 0 && plain; --i) {
    if (t.size(i) == 1) continue;
    if (expected < 0) {
      ld = t.stride(i);
      expected = ld * t.size(i);
    } else {
      plain = t.stride(i) == expected;
      expected *= t.size(i);
    }
  }
  if (!plain || (ld < m.cols && m.rows > 1)) {
    m.keep = compact(t);
    ld = m.cols;
  } else {
    m.keep = t;
  }
  m.ld = ld;
  m.data = m.keep.const_data_ptr();
  return m;
}

const void* dense(const MaybeTensor& t, std::vector<Tensor>& keep) {
  if (!t) return nullptr;
  keep.push_back(t->is_contiguous() ? *t : compact(*t));
  return keep.back().const_data_ptr();
}

Quantisation granularity_of(const std::string& name, const Tensor& x, int64_t group_size) {
  const bool tensor = name == "per_tensor", rows = name == "per_token" || name == "per_channel";
  if (!tensor && !rows && name != "per_group")
    refuse("granularity", "'" + name + "'", "'per_tensor' or 'per_token' or 'per_channel' or 'per_group'");
  if (tensor || rows) {
    if (rows) min_dim("x", x, 1);
    if (group_size != 0) refuse("group_size", std::to_string(group_size), "0 with granularity '" + name + "'");
    return {tensor ? Granularity::tensor : Granularity::rows, tensor ? Shape{1} : lead_of(x)};
  }
  min_dim("x", x, 1);
  const int64_t k = x.size(x.dim() - 1);
  if (group_size <= 0 || group_size >= kMaxSize || k % group_size != 0)
    refuse("group_size", std::to_string(group_size), "a positive divisor of K = " + std::to_string(k));
  Shape shape = lead_of(x);
  shape.push_back(k / group_size);
  return {Granularity::groups, shape};
}

void qparams(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point, const std::string& granularity,
             const Quantisation& q) {
  if (granularity == "per_tensor") {
    scalar_or("scale", scale, x, ScalarType::Float, {1});
    scalar_or("zero_point", zero_point, x, ScalarType::Int, {1});
    return;
  }
  vector("scale", scale, x, ScalarType::Float, q.scale_shape);
  vector("zero_point", zero_point, x, ScalarType::Int, q.scale_shape);
}

}  // namespace pyquant::bind

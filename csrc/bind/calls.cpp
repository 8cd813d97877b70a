// Whole calls: the rules that tie the operands of one op together, and the plain structs that come of them.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "bind/check.h"
#include "core/bounds.h"
#include "core/rows_layout.h"
#include "cpu/cpu.h"

namespace pyquant::bind {

static int64_t product(const Shape& s) {
  int64_t p = 1;
  for (int64_t d : s) p *= d;
  return p;
}

// ---- the fused layer

// Steps stay beside 4-bit codes for the kernels of GPUs; CPUs get the products of both, 8-bit weights.
static void two_level(const LinearSpec& s) {
  const std::string allowed =
      "4-bit weights with a group size in layout 'rows', or a multiple of 64 in 'rows_blocked128'";
  const bool blocked = s.layout == Layout::rows_blocked128;
  if (s.layout == Layout::cpu_blocked || s.w->type != DType::s4 || s.group_size == 0 ||
      (blocked && s.group_size % kBlocked128StepCodes != 0))
    refuse(
        "spec",
        "two levels of scales with " + std::to_string(s.w->bits) + " bits, group_size " + std::to_string(s.group_size),
        allowed);
}

LinearSpec linear_spec(const std::vector<int64_t>& wire) {
  if (wire.size() != kWireFields)
    refuse("spec", std::to_string(wire.size()) + " integers",
           std::to_string(kWireFields) + ", as LinearSpec.to_ints() gives");
  const LinearSpec s = spec_from_wire(wire.data());
  if (s.n < 0 || s.k < 0 || s.n >= kMaxSize || s.k >= kMaxSize)
    refuse("spec", "n = " + std::to_string(s.n) + ", k = " + std::to_string(s.k), "n and k from 0 to 2147483647");
  if (static_cast<int32_t>(s.activation) >= kActivations)
    refuse("spec", "an unknown activation", "integers as LinearSpec.to_ints() gives");
  weight_type_of("spec", wire_w_bits(wire.data()));
  if (static_cast<int32_t>(s.layout) > 2) refuse("spec", "an unknown layout", "integers as LinearSpec.to_ints() gives");
  if (s.layout == Layout::rows_blocked128 && s.w->type != DType::s4)
    refuse("spec", "layout 'rows_blocked128' with " + std::to_string(s.w->bits) + " bits",
           "4-bit weights in that layout");
  group(s.group_size, s.k);
  if (s.two_level) two_level(s);
  code_range(s.x_qmin, s.x_qmax, "spec", "spec");
  code_range(s.out_qmin, s.out_qmax, "spec", "spec");
  const int64_t reach = s.x_symmetric ? std::max<int64_t>(-s.x_qmin, s.x_qmax) : s.x_qmax - s.x_qmin;
  const int64_t limit = k_max(std::max<int64_t>(reach, 1), product_largest(s));
  if (s.k > limit)
    refuse("spec", "k = " + std::to_string(s.k),
           "k <= " + std::to_string(limit) + ", beyond which an int32 accumulator can overflow");
  return s;
}

// Codes that come as they are were not clamped to the spec's limits: their type bounds K, whatever the spec says.
void codes_bound(const LinearSpec& s, DType type) {
  const CodeType& code = code_type(type);
  int64_t reach = code.span();  // unsigned: a zero point of their own
  if (code.is_signed()) {
    reach = code.largest();
    if (!s.x_symmetric) reach = std::max<int64_t>({reach, code.qmax - s.x_qmin, s.x_qmax - code.qmin});
  }
  const int64_t limit = k_max(reach, product_largest(s));
  if (s.k > limit)
    refuse("x", std::string(name_of(type)) + " codes with k = " + std::to_string(s.k),
           "k <= " + std::to_string(limit) + ", beyond which an int32 accumulator can overflow");
}

size_t packed_bytes(const LinearSpec& s) {
  return s.layout == Layout::cpu_blocked ? cpu::packed_bytes(s) : static_cast<size_t>(rows_layout(s).total);
}

static void present(const char* argument, const MaybeTensor& t, bool wanted, const std::string& allowed) {
  if (wanted && !t) refuse(argument, "None", allowed + ", as the spec says");
  if (!wanted && t) refuse(argument, describe(*t), "None, as the spec says");
}

void pack_check(const LinearSpec& s, const Tensor& w, const Tensor& w_scale, const MaybeTensor& bias,
                const MaybeTensor& x_scale, const MaybeTensor& x_zero_point, const MaybeTensor& out_scale,
                const MaybeTensor& out_zero_point) {
  const bool is_static = s.input == InputMode::static_per_tensor;
  dtype_in("w", w, {memory_of(s.w->type)});
  shape_is("w", w, {s.n, columns_of(s.w->type, s.k)});
  vector("w_scale", w_scale, w, ScalarType::Float, s.group_size ? Shape{s.n, s.k / s.group_size} : Shape{s.n});
  present("bias", bias, s.has_bias, "float32 [" + std::to_string(s.n) + "]");
  vector("bias", bias, w, ScalarType::Float, {s.n});
  present("x_scale", x_scale, is_static, "float32 [1]");
  scalar_or("x_scale", x_scale, w, ScalarType::Float, {1});
  if (!is_static) present("x_zero_point", x_zero_point, false, "int32 [1]");
  scalar_or("x_zero_point", x_zero_point, w, ScalarType::Int, {1});
  present("out_scale", out_scale, s.codes_out, "float32 [1]");
  scalar_or("out_scale", out_scale, w, ScalarType::Float, {1});
  if (!s.codes_out) present("out_zero_point", out_zero_point, false, "int32 [1]");
  scalar_or("out_zero_point", out_zero_point, w, ScalarType::Int, {1});
}

void pack_zero_points(const LinearSpec& s, const LinearWeights& w) {
  // uint8 codes have a zero point in their own terms (docs/numerics.md 3); each call compares it with its codes' type
  zero_points("x_zero_point", w.x_zero_point, 1, s.x_symmetric ? 0 : std::min(s.x_qmin, 0), code_type(DType::u8).qmax);
  zero_points("out_zero_point", w.out_zero_point, 1, s.out_qmin, s.out_qmax);
}

void residual_check(const MaybeTensor& residual, const Tensor& x, const Shape& out_shape) {
  if (!residual) return;
  floats("residual", *residual);
  same_device("residual", *residual, x);
  shape_is("residual", *residual, out_shape);
}

// What came with the codes of a layer with dynamic inputs.
static void row_params(const LinearSpec& s, const Tensor& x, const MaybeTensor& x_scale,
                       const MaybeTensor& x_zero_point, LinearCall& call) {
  if (x_scale && s.input == InputMode::static_per_tensor) refuse("x_scale", "a tensor", "None where inputs are static");
  if (x_zero_point && (!x_scale || s.x_symmetric))
    refuse("x_zero_point", "a tensor", "None unless x_scale is there and inputs are affine");
  vector("x_scale", x_scale, x, ScalarType::Float, lead_of(x));
  vector("x_zero_point", x_zero_point, x, ScalarType::Int, lead_of(x));
  call.x_scale = static_cast<const float*>(dense(x_scale, call.keep));
  call.x_zero_point = static_cast<const int32_t*>(dense(x_zero_point, call.keep));
}

static void packed_buffer(const Tensor& packed, const Tensor& x, int64_t bytes) {
  dtype_in("packed", packed, {ScalarType::Byte});
  shape_is("packed", packed, {bytes});
  same_device("packed", packed, x);
  if (!packed.is_contiguous()) refuse("packed", "a strided view", "the contiguous buffer of pack_linear");
}

// One accumulator a result.
static void one_scale_a_channel(const LinearSpec& s, const char* when) {
  if (s.group_size != 0 && !s.two_level)
    refuse("spec", "group_size " + std::to_string(s.group_size), std::string("0, or two levels of scales, ") + when);
}

// The types of what a layer gives: floats, codes, or int4 codes two a byte.
static void set_results(LinearCall& call, std::optional<ScalarType> out_dtype, ScalarType otherwise) {
  const LinearSpec& s = call.spec;
  if (!s.codes_out) {
    call.out_type = float_type(out_dtype, otherwise);
    call.out = dtype_of_scalar(call.out_type);
    return;
  }
  const CodeType* const packed = packed_type(s.out_qmin, s.out_qmax);
  const bool out_packed = out_dtype && *out_dtype == ScalarType::Byte && packed;
  if (out_dtype && *out_dtype != ScalarType::Char && !out_packed)
    refuse("out_dtype", name_of_scalar(*out_dtype), packed ? "int8, or uint8 for two codes a byte" : "int8");
  call.out_type = out_packed ? ScalarType::Byte : ScalarType::Char;
  call.out = out_packed ? packed->type : DType::s8;
  call.out_shape.back() = columns_of(call.out, call.out_shape.back());
}

// A call that goes on from the layer's own accumulators, int32 [..., n]. Who gives no type for the result has not asked
// for it: integers are his mistake.
static LinearCall finish_call(const Tensor& x, const Tensor& packed, const MaybeTensor& residual,
                              const std::vector<int64_t>& spec, std::optional<ScalarType> out_dtype,
                              const MaybeTensor& x_scale, const MaybeTensor& x_zero_point) {
  if (!out_dtype) refuse("x", describe(x), "float32 or float16 or bfloat16; int32 accumulators with an out_dtype");
  LinearCall call;
  const LinearSpec& s = call.spec = linear_spec(spec);
  one_scale_a_channel(s, "where x holds accumulators");
  min_dim("x", x, 1);
  if (x.size(x.dim() - 1) != s.n)
    refuse("x", describe(x), "last dimension " + std::to_string(s.n) + " (out_features) where x holds accumulators");
  present("x_scale", x_scale, s.input == InputMode::dynamic_per_token, "float32 " + text_of(lead_of(x)));
  if (x_zero_point) refuse("x_zero_point", "a tensor", "None where x holds accumulators");
  vector("x_scale", x_scale, x, ScalarType::Float, lead_of(x));
  call.x_scale = static_cast<const float*>(dense(x_scale, call.keep));
  packed_buffer(packed, x, static_cast<int64_t>(packed_bytes(s)));
  call.out_shape = shape_of(x);
  residual_check(residual, x, call.out_shape);
  if (s.activation == Activation::clamp && !(s.clamp_min <= s.clamp_max))
    refuse("clamp_min", std::to_string(s.clamp_min), "at most clamp_max");
  call.x = matrix(x);
  set_results(call, out_dtype, ScalarType::Float);
  if (residual) call.residual = matrix(*residual);
  return call;
}

LinearCall linear_call(const Tensor& x, const Tensor& packed, const MaybeTensor& residual,
                       const std::vector<int64_t>& spec, std::optional<ScalarType> out_dtype,
                       const MaybeTensor& x_scale, const MaybeTensor& x_zero_point) {
  if (x.defined() && x.scalar_type() == ScalarType::Int)
    return finish_call(x, packed, residual, spec, out_dtype, x_scale, x_zero_point);
  LinearCall call;
  const LinearSpec& s = call.spec = linear_spec(spec);
  const CodeType* const packs = packed_type(s.x_qmin, s.x_qmax);
  if (x_scale && packs)
    dtype_in("x", x, {ScalarType::Char, ScalarType::Byte});
  else if (x_scale)
    dtype_in("x", x, {ScalarType::Char});
  else if (s.input == InputMode::static_per_tensor)
    dtype_in("x", x, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Char, ScalarType::Byte});
  else
    floats("x", x);
  min_dim("x", x, 1);
  if (x_scale || x_zero_point) row_params(s, x, x_scale, x_zero_point, call);
  const int64_t columns = x.size(x.dim() - 1);
  // One code is one byte either way, and then means a code of its own.
  const bool x_packed =
      x.scalar_type() == ScalarType::Byte && packs && columns == columns_of(packs->type, s.k) && columns != s.k;
  if (columns != s.k && !x_packed) refuse("x", describe(x), "last dimension " + std::to_string(s.k) + " (in_features)");
  if (x_scale && x.scalar_type() == ScalarType::Byte && !x_packed)
    refuse("x", describe(x), "int8, or uint8 with two codes a byte");
  packed_buffer(packed, x, static_cast<int64_t>(packed_bytes(s)));
  call.out_shape = lead_of(x);
  call.out_shape.push_back(s.n);
  residual_check(residual, x, call.out_shape);
  if (s.activation == Activation::clamp && !(s.clamp_min <= s.clamp_max))
    refuse("clamp_min", std::to_string(s.clamp_min), "at most clamp_max");
  call.x = matrix(x);
  if (x_packed) {
    call.x.type = packs->type;
    call.x.cols = s.k;
    call.x.ld *= packs->per_byte;
  }
  if (!is_float(call.x.type)) codes_bound(s, call.x.type);
  if (out_dtype && *out_dtype == ScalarType::Int) {
    constexpr auto kWhen = "when out_dtype is int32 (the accumulator has no scale)";
    one_scale_a_channel(s, kWhen);
    if (residual) refuse("residual", describe(*residual), std::string("None ") + kWhen);
    if (is_float(call.x.type) && s.input == InputMode::dynamic_per_token)
      refuse("x", describe(x), "codes with their x_scale where out_dtype is int32 and inputs are dynamic");
    call.out_type = ScalarType::Int;
    call.out = DType::s32;
  } else {
    set_results(call, out_dtype, is_float(dtype_of(x)) ? x.scalar_type() : ScalarType::Float);
  }
  if (residual) call.residual = matrix(*residual);
  return call;
}

GroupedRows grouped_rows(const Tensor& x, size_t layers, const Tensor& ends, const MaybeTensor& rows,
                         std::vector<Tensor>& keep) {
  exact_dim("x", x, 2);
  vector("ends", ends, x, ScalarType::Int, {static_cast<int64_t>(layers)});
  GroupedRows g;
  g.ends = static_cast<const int32_t*>(dense(ends, keep));
  g.count = x.size(0);
  if (rows) {
    exact_dim("rows", *rows, 1);
    vector("rows", rows, x, ScalarType::Long, shape_of(*rows));
    g.rows = static_cast<const int64_t*>(dense(rows, keep));
    g.count = rows->numel();
  }
  return g;
}

GroupedCall grouped_call(const Tensor& x, const std::vector<Tensor>& packed, const Tensor& ends,
                         const std::vector<int64_t>& spec, const MaybeTensor& rows, std::optional<ScalarType> out_dtype,
                         const MaybeTensor& x_scale, const MaybeTensor& x_zero_point) {
  if (packed.empty()) refuse("packed", "no buffers", "one a layer, at least one");
  exact_dim("x", x, 2);
  GroupedCall g;
  LinearCall& call = g.call = linear_call(x, packed[0], std::nullopt, spec, out_dtype, x_scale, x_zero_point);
  if (call.spec.codes_out) refuse("spec", "a layer that gives codes", "one that gives floats");
  if (call.out == DType::s32) refuse("out_dtype", "int32", "float32 or float16 or bfloat16");
  if (call.x.type == DType::s32) refuse("x", describe(x), "floats or codes");
  if (is_packed(call.x.type)) refuse("x", describe(x), "codes of one byte each");
  const auto bytes = static_cast<int64_t>(packed_bytes(call.spec));
  for (const Tensor& one : packed) packed_buffer(one, x, bytes);
  if (rows && !is_float(call.x.type)) refuse("rows", describe(*rows), "None where x holds codes");
  static_cast<GroupedRows&>(g) = grouped_rows(x, packed.size(), ends, rows, call.keep);
  call.out_shape = {g.count, call.spec.n};
  return g;
}

// ---- the plain GEMM

// What the operands are, by the op's product; those of `gemm` by their types and shapes.
struct GemmTypes {
  DType x, w;
  bool x_packed = false;
  int64_t k = 0;
};

static GemmTypes gemm_types(const GemmArgs& a) {
  const bool any = a.product == nullptr;
  if (any) dtype_in("w", a.w, {ScalarType::Char, ScalarType::Byte, ScalarType::Half, ScalarType::BFloat16});
  const bool real = any && is_float(dtype_of(a.w));
  if (real)
    dtype_in("x", a.x, {a.w.scalar_type()});
  else
    dtype_in("x", a.x, {ScalarType::Char, ScalarType::Byte});
  min_dim("x", a.x, 1);
  if (!any) dtype_in("w", a.w, {memory_of(a.product->w)});
  const DType w = !any ? a.product->w : a.w.scalar_type() == ScalarType::Byte ? DType::s4 : dtype_of(a.w);
  exact_dim("w", a.w, 2);
  same_device("w", a.w, a.x);
  const int64_t columns = a.x.size(a.x.dim() - 1), n = a.w.size(0);
  const bool bytes = a.x.scalar_type() == ScalarType::Byte;
  // One uint8 code a row is a code of its own, as in qlinear.
  const bool as_w = any && is_packed(w) && columns == a.w.size(1) && columns != 1;
  const bool named = !any && is_packed(a.product->x), packed = bytes && (named || as_w);
  const DType x = named ? a.product->x : packed ? w : dtype_of(a.x);
  const int64_t k = packed ? columns * per_byte(x) : columns;
  shape_is("w", a.w, {n, columns_of(w, k)});
  return {x, w, packed, k};
}

static int64_t x_reach(const GemmArgs& a, DType x) {
  const CodeType& code = code_type(x);
  return a.x_zero_point ? code.span() : code.largest();
}

// What only codes have.
static void only_floats(const GemmArgs& a) {
  const auto none = [](const char* name, const MaybeTensor& t) {
    if (t) refuse(name, "a tensor", "None where x and w are floats");
  };
  none("w_scale", a.w_scale);
  none("x_scale", a.x_scale);
  none("x_zero_point", a.x_zero_point);
  none("out_scale", a.out_scale);
  none("out_zero_point", a.out_zero_point);
  if (a.group_size != 0) refuse("group_size", std::to_string(a.group_size), "0 where x and w are floats");
  if (!is_float_type(a.out_dtype))
    refuse("out_dtype", name_of_scalar(a.out_dtype), "float32 or float16 or bfloat16 where x and w are floats");
}

static void only_accumulator(const GemmArgs& a) {
  const auto none = [](const char* name, const MaybeTensor& t) {
    if (t) refuse(name, "a tensor", "None when out_dtype is int32 (the accumulator has no scale)");
  };
  none("w_scale", a.w_scale);
  none("x_scale", a.x_scale);
  none("bias", a.bias);
  none("residual", a.residual);
  if (a.group_size != 0) refuse("group_size", std::to_string(a.group_size), "0 when out_dtype is int32");
  if (a.activation != "none") refuse("activation", "'" + a.activation + "'", "'none' when out_dtype is int32");
}

GemmCall gemm_call(const GemmArgs& a) {
  const GemmTypes types = gemm_types(a);
  const bool real = is_float(types.w);
  const Shape lead = lead_of(a.x);
  const int64_t k = types.k, n = a.w.size(0), m = product(lead);
  if (real) only_floats(a);
  group(a.group_size, k);
  const int64_t limit = real ? k : k_max(x_reach(a, types.x), code_type(types.w).largest());
  if (k > limit)
    refuse("x", "K = " + std::to_string(k),
           "K <= " + std::to_string(limit) + ", beyond which an int32 accumulator can overflow");
  const Shape scale_shape = a.group_size ? Shape{n, k / a.group_size} : Shape{n};
  scalar_or("x_scale", a.x_scale, a.x, ScalarType::Float, lead);
  scalar_or("x_zero_point", a.x_zero_point, a.x, ScalarType::Int, lead);
  vector("w_scale", a.w_scale, a.x, ScalarType::Float, scale_shape);
  vector("bias", a.bias, a.x, ScalarType::Float, {n});
  GemmCall call;
  call.out_shape = lead;
  call.out_shape.push_back(n);
  call.epilogue.activation = activation_of(a.activation, a.clamp_min, a.clamp_max);
  residual_check(a.residual, a.x, call.out_shape);
  call.out_type = a.out_dtype;
  const bool accumulator = a.out_dtype == ScalarType::Int, codes = a.out_dtype == ScalarType::Char;
  if (accumulator) {
    only_accumulator(a);
  } else {
    if (!codes && !is_float_type(a.out_dtype))
      refuse("out_dtype", name_of_scalar(a.out_dtype), "float32 or float16 or bfloat16 or int32 or int8");
    if (!a.w_scale && !real) refuse("w_scale", "None", "float32 " + text_of(scale_shape));
  }
  if (codes) {
    if (!a.out_scale) refuse("out_scale", "None", "float32 [1] when out_dtype is int8");
    code_range(a.out_qmin, a.out_qmax, "out_qmin", "out_qmax");
  } else if (a.out_scale || a.out_zero_point) {
    refuse(a.out_scale ? "out_scale" : "out_zero_point", "a tensor", "None unless out_dtype is int8");
  }
  scalar_or("out_scale", a.out_scale, a.x, ScalarType::Float, {1});
  scalar_or("out_zero_point", a.out_zero_point, a.x, ScalarType::Int, {1});

  const Matrix x = matrix(a.x);
  const Matrix w = matrix(a.w);
  call.keep = {x.keep, w.keep};
  GemmProblem& p = call.problem;
  p.m = m;
  p.n = n;
  p.k = k;
  p.x = types.x;
  p.x_packed = types.x_packed;
  p.w = types.w;
  p.out = accumulator ? DType::s32 : codes ? DType::s8 : dtype_of_scalar(a.out_dtype);
  p.ldx = types.x_packed ? x.ld * per_byte(types.x) : x.ld;
  p.ldw = w.ld * per_byte(types.w);
  p.ldo = n;
  p.group_size = a.group_size;
  p.per_token_scale = a.x_scale && shape_of(*a.x_scale) == lead && !lead.empty();
  p.per_token_zero_point = a.x_zero_point && shape_of(*a.x_zero_point) == lead && !lead.empty();
  p.has_zero_point = a.x_zero_point.has_value() || types.x == DType::u8;
  GemmOperands& o = call.operands;
  o.x = x.data;
  o.w = w.data;
  o.x_scale = static_cast<const float*>(dense(a.x_scale, call.keep));
  o.x_zero_point = static_cast<const int32_t*>(dense(a.x_zero_point, call.keep));
  o.w_scale = static_cast<const float*>(dense(a.w_scale, call.keep));
  o.bias = static_cast<const float*>(dense(a.bias, call.keep));
  o.out_scale = static_cast<const float*>(dense(a.out_scale, call.keep));
  o.out_zero_point = static_cast<const int32_t*>(dense(a.out_zero_point, call.keep));
  if (a.residual) {
    const Matrix r = matrix(*a.residual);
    call.keep.push_back(r.keep);
    o.residual = r.data;
    p.residual = r.type;
    p.ldr = r.ld;
  }
  call.epilogue.clamp_min = static_cast<float>(a.clamp_min);
  call.epilogue.clamp_max = static_cast<float>(a.clamp_max);
  call.epilogue.out_qmin = static_cast<int32_t>(a.out_qmin);
  call.epilogue.out_qmax = static_cast<int32_t>(a.out_qmax);
  return call;
}

}  // namespace pyquant::bind

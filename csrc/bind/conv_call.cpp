#include "bind/conv_call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace pyquant::bind {
namespace {

// Sizes of a result whose bytes an int64 counts, with room to spare.
constexpr double kMostNumbers = 1e17;

Window window_of(const std::vector<int64_t>& wire) {
  if (wire.size() != kWindowFields)
    refuse("window", std::to_string(wire.size()) + " integers",
           std::to_string(kWindowFields) + ", as Patches.to_ints() gives");
  for (int i = 0; i < kWindowFields; ++i) {
    const int64_t least = i >= 4 && i < 8 ? 0 : 1;
    if (wire[i] < least || wire[i] >= kMaxSize)
      refuse("window", std::to_string(wire[i]), "integers as Patches.to_ints() gives");
  }
  return window_from_wire(wire.data());
}

// As [batch][height][width][channels]: false where that is the same memory as channels first.
bool is_channels_last(const Tensor& x) {
  if (x.is_contiguous()) return false;
  int64_t step = 1;
  for (int64_t d : {1, 3, 2, 0}) {
    if (x.size(d) == 1) continue;
    if (x.stride(d) != step) return false;
    step *= x.size(d);
  }
  return true;
}

// What came with the codes of a layer with dynamic inputs.
void image_params(const LinearSpec& s, const Tensor& x, const MaybeTensor& scale, const MaybeTensor& zero_point) {
  if (scale && s.input == InputMode::static_per_tensor) refuse("x_scale", "a tensor", "None where inputs are static");
  if (zero_point && (!scale || s.x_symmetric))
    refuse("x_zero_point", "a tensor", "None unless x_scale is there and inputs are affine");
  vector("x_scale", scale, x, ScalarType::Float, {x.size(0)});
  vector("x_zero_point", zero_point, x, ScalarType::Int, {x.size(0)});
}

void sizes(const Window& w, const Tensor& x, ConvCall& call) {
  const LinearSpec& s = call.spec;
  ConvOperands& o = call.operands;
  o.batch = x.size(0);
  o.channels = x.size(1);
  o.height = x.size(2);
  o.width = x.size(3);
  if (s.k % w.taps() != 0)
    refuse("window", std::to_string(w.kernel[0]) + " x " + std::to_string(w.kernel[1]) + " taps",
           "a divisor of k = " + std::to_string(s.k));
  if (s.n % w.groups != 0)
    refuse("window", std::to_string(w.groups) + " groups", "a divisor of n = " + std::to_string(s.n));
  const int64_t channels = s.k / w.taps() * w.groups;
  if (o.channels != channels) refuse("x", describe(x), "[B, " + std::to_string(channels) + ", H, W]");
  for (int axis = 0; axis < 2; ++axis)
    if (w.room(axis, x.size(2 + axis)) < w.span(axis))
      refuse("x", "an image of " + std::to_string(o.height) + " x " + std::to_string(o.width),
             "at least " + std::to_string(w.span(0)) + " x " + std::to_string(w.span(1)) + " with padding");
  call.out_shape = {o.batch, s.n, w.out_size(0, o.height), w.out_size(1, o.width)};
  double numbers = 1;
  for (int64_t size : call.out_shape) numbers *= static_cast<double>(std::max<int64_t>(size, 1));
  if (numbers > kMostNumbers) refuse("window", text_of(call.out_shape), "a result of at most 1e17 numbers");
}

ScalarType result_type(const LinearSpec& s, const Tensor& x, std::optional<ScalarType> wanted) {
  if (!s.codes_out) return float_type(wanted, is_float(dtype_of(x)) ? x.scalar_type() : ScalarType::Float);
  if (wanted && *wanted != ScalarType::Char) refuse("out_dtype", name_of_scalar(*wanted), "int8");
  return ScalarType::Char;
}

// A tensor as the kernels walk over it: its own memory, or a copy.
Tensor laid_out(const Tensor& x, bool channels_last) {
  if (channels_last ? is_channels_last(x) : x.is_contiguous()) return x;
  if (!channels_last) return compact(x);
  // [B, C, H, W] -> [B, H, W, C]
  const Tensor turned = torch::stable::transpose(torch::stable::transpose(x, 1, 2), 2, 3);
  return channels_first(compact(turned));
}

}  // namespace

Tensor channels_first(const Tensor& image) {
  return torch::stable::transpose(torch::stable::transpose(image, 1, 3), 2, 3);
}

ConvCall conv_call(const Tensor& x, const Tensor& packed, const MaybeTensor& residual, const std::vector<int64_t>& spec,
                   const std::vector<int64_t>& window, std::optional<ScalarType> out_dtype, const MaybeTensor& x_scale,
                   const MaybeTensor& x_zero_point) {
  ConvCall call;
  const LinearSpec& s = call.spec = linear_spec(spec);
  const Window w = call.operands.window = window_of(window);
  const bool is_static = s.input == InputMode::static_per_tensor;
  if (x_scale)
    dtype_in("x", x, {ScalarType::Char});
  else if (is_static)
    dtype_in("x", x, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Char});
  else
    floats("x", x);
  exact_dim("x", x, 4);
  image_params(s, x, x_scale, x_zero_point);
  sizes(w, x, call);
  dtype_in("packed", packed, {ScalarType::Byte});
  shape_is("packed", packed, {static_cast<int64_t>(packed_bytes(s))});
  same_device("packed", packed, x);
  if (!packed.is_contiguous()) refuse("packed", "a strided view", "the contiguous buffer of pack_linear");
  residual_check(residual, x, call.out_shape);
  if (s.activation == Activation::clamp && !(s.clamp_min <= s.clamp_max))
    refuse("clamp_min", std::to_string(s.clamp_min), "at most clamp_max");
  ConvOperands& o = call.operands;
  o.x_type = dtype_of(x);
  if (!is_float(o.x_type)) codes_bound(s, o.x_type);
  call.out_type = result_type(s, x, out_dtype);
  o.out_type = dtype_of_scalar(call.out_type);
  o.x_scale = static_cast<const float*>(dense(x_scale, call.keep));
  o.x_zero_point = static_cast<const int32_t*>(dense(x_zero_point, call.keep));
  o.channels_last = is_channels_last(x);
  call.keep.push_back(laid_out(x, o.channels_last));
  o.x = call.keep.back().const_data_ptr();
  if (residual) {
    call.keep.push_back(laid_out(*residual, true));
    o.residual = call.keep.back().const_data_ptr();
    o.residual_type = dtype_of(*residual);
  }
  return call;
}

}  // namespace pyquant::bind

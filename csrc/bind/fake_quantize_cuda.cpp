// The fake quantisers of torch.ops.pyquant on CUDA: check, allocate through torch, launch through csrc/cuda.
#include <torch/csrc/stable/library.h>

#include "bind/check.h"
#include "bind/device.h"
#include "bind/text.h"

namespace pyquant::bind {
namespace {

cuda::FloatMatrix floats_of(const Matrix& m) { return {m.data, m.type, m.rows, m.cols, m.ld}; }

cuda::CodeRange range_of(bool symmetric, int64_t qmin, int64_t qmax) {
  return {static_cast<int32_t>(qmin), static_cast<int32_t>(qmax), symmetric};
}

void write(const FakeCall& call, int64_t group_size, int64_t qmin, int64_t qmax, const Tensor& y, const Tensor& mask,
           const On& on) {
  cuda::fake_quantize(floats_of(call.x), call.q.granularity, group_size, call.scale, call.zero_point,
                      range_of(true, qmin, qmax), y.mutable_data_ptr(), static_cast<uint8_t*>(mask.mutable_data_ptr()),
                      on.context);
}

std::tuple<Tensor, Tensor> fake_quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                                         int64_t group_size, int64_t qmin, int64_t qmax) {
  const FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  const On on(x);
  const Tensor y = empty(x, shape_of(x), x.scalar_type()), mask = empty(x, mask_shape(x), ScalarType::Byte);
  write(call, group_size, qmin, qmax, y, mask, on);
  return {y, mask};
}

void fake_quantize_out(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                       int64_t group_size, int64_t qmin, int64_t qmax, const Tensor& y, const Tensor& mask) {
  const FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  buffer("y", y, x, x.scalar_type(), shape_of(x));
  buffer("mask", mask, x, ScalarType::Byte, mask_shape(x));
  fake_out_apart(x, scale, zero_point, y, mask);
  const On on(x);
  write(call, group_size, qmin, qmax, y, mask, on);
}

void write_dynamic(const Tensor& x, const FakeCall& call, int64_t group_size, bool symmetric, int64_t qmin,
                   int64_t qmax, const Tensor& y, const Tensor& scale, const Tensor& zero_point, const On& on) {
  Tensor workspace;
  void* parts = nullptr;
  if (call.q.granularity == Granularity::tensor) {
    workspace = empty(x, {cuda::kQuantizeWorkspaceBytes}, ScalarType::Byte);
    parts = workspace.mutable_data_ptr();
  }
  const cuda::QuantizeParams params{static_cast<float*>(scale.mutable_data_ptr()),
                                    static_cast<int32_t*>(zero_point.mutable_data_ptr())};
  cuda::fake_quantize_dynamic(floats_of(call.x), call.q.granularity, group_size, range_of(symmetric, qmin, qmax),
                              params, y.mutable_data_ptr(), parts, on.context);
}

std::tuple<Tensor, Tensor, Tensor> fake_quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size,
                                                         bool symmetric, int64_t qmin, int64_t qmax) {
  const FakeCall call = fake_dynamic_call(x, granularity, group_size, symmetric, qmin, qmax);
  const On on(x);
  const Tensor y = empty(x, shape_of(x), x.scalar_type());
  const Tensor scale = empty(x, call.q.scale_shape, ScalarType::Float);
  const Tensor zero_point = empty(x, call.q.scale_shape, ScalarType::Int);
  write_dynamic(x, call, group_size, symmetric, qmin, qmax, y, scale, zero_point, on);
  return {y, scale, zero_point};
}

void fake_quantize_dynamic_out(const Tensor& x, Text granularity, int64_t group_size, bool symmetric, int64_t qmin,
                               int64_t qmax, const Tensor& y, const Tensor& scale, const Tensor& zero_point) {
  const FakeCall call = fake_dynamic_call(x, granularity, group_size, symmetric, qmin, qmax);
  buffer("y", y, x, x.scalar_type(), shape_of(x));
  buffer("scale", scale, x, ScalarType::Float, call.q.scale_shape);
  buffer("zero_point", zero_point, x, ScalarType::Int, call.q.scale_shape);
  fake_dynamic_out_apart(x, y, scale, zero_point);
  const On on(x);
  write_dynamic(x, call, group_size, symmetric, qmin, qmax, y, scale, zero_point, on);
}

void keep(const Tensor& grad, const Tensor& mask, const Tensor& out, const On& on) {
  std::vector<Tensor> own;
  cuda::fake_quantize_backward(dense(grad, own), dtype_of(grad), grad.numel(),
                               static_cast<const uint8_t*>(dense(mask, own)), out.mutable_data_ptr(), on.context);
}

Tensor fake_quantize_backward(const Tensor& grad, const Tensor& mask) {
  fake_backward_check(grad, mask);
  const On on(grad);
  const Tensor out = empty(grad, shape_of(grad), grad.scalar_type());
  keep(grad, mask, out, on);
  return out;
}

void fake_quantize_backward_in_place(const Tensor& grad, const Tensor& mask) {
  fake_backward_check(grad, mask);
  buffer("grad", grad, grad, grad.scalar_type(), shape_of(grad));
  apart("grad", grad, "mask", mask);
  const On on(grad);
  keep(grad, mask, grad, on);
}

std::tuple<Tensor, Tensor> fake_quantize_lsq_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                      MaybeTensor zero_point, Text granularity, int64_t group_size,
                                                      int64_t qmin, int64_t qmax) {
  FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  lsq_check(grad, x);
  const On on(x);
  const Tensor grad_x = empty(x, shape_of(x), x.scalar_type());
  const Tensor grad_scale = empty(x, shape_of(scale), ScalarType::Float);
  const cuda::FloatMatrix m{dense(x, call.keep), call.x.type, call.x.rows, call.x.cols, call.x.cols};
  const Tensor sums = empty(x, {cuda::lsq_workspace_bytes(m, call.q.granularity, group_size)}, ScalarType::Byte);
  cuda::fake_quantize_lsq_backward(dense(grad, call.keep), m, call.q.granularity, group_size, call.scale,
                                   call.zero_point, range_of(true, qmin, qmax), grad_x.mutable_data_ptr(),
                                   static_cast<float*>(grad_scale.mutable_data_ptr()), sums.mutable_data_ptr(),
                                   on.context);
  return {grad_x, grad_scale};
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(PYQUANT_BIND_LIBRARY, PYQUANT_BIND_KEY, m) {
  namespace b = pyquant::bind;
  m.impl("fake_quantize", TORCH_BOX(&b::fake_quantize));
  m.impl("fake_quantize_out", TORCH_BOX(&b::fake_quantize_out));
  m.impl("fake_quantize_dynamic", TORCH_BOX(&b::fake_quantize_dynamic));
  m.impl("fake_quantize_dynamic_out", TORCH_BOX(&b::fake_quantize_dynamic_out));
  m.impl("fake_quantize_backward", TORCH_BOX(&b::fake_quantize_backward));
  m.impl("fake_quantize_backward_", TORCH_BOX(&b::fake_quantize_backward_in_place));
  m.impl("fake_quantize_lsq_backward", TORCH_BOX(&b::fake_quantize_lsq_backward));
}

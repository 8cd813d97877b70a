// The fake quantisers of torch.ops.pyquant on the CPU: check, allocate, call csrc/cpu.
#include <torch/csrc/stable/library.h>

#include "bind/check.h"
#include "bind/cpu_tensor.h"
#include "bind/text.h"
#include "core/epilogue_math.h"
#include "cpu/cpu.h"

namespace pyquant::bind {
namespace {

int32_t small(int64_t value) { return static_cast<int32_t>(value); }

// The values of a scale are at hand here: one look at them costs nothing beside the work, unlike the same check in
// Python, which would cost more than a small tensor.
FakeCall checked_call(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point,
                      const std::string& granularity, int64_t group_size, int64_t qmin, int64_t qmax) {
  FakeCall call = fake_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  for (int64_t i = 0; i < scale.numel(); ++i)
    if (!(call.scale[i] > 0.f && call.scale[i] < kInfinity))
      refuse("scale", "a value of " + std::to_string(call.scale[i]), "finite values above 0");
  zero_points("zero_point", call.zero_point, count_of(zero_point), qmin, qmax);
  return call;
}

void write(const FakeCall& call, int64_t group_size, int64_t qmin, int64_t qmax, const Tensor& y, const Tensor& mask) {
  const Matrix& m = call.x;
  cpu::fake_quantize(m.data, m.type, m.rows, m.cols, m.ld, call.q.granularity, group_size, call.scale, call.zero_point,
                     small(qmin), small(qmax), y.mutable_data_ptr(), static_cast<uint8_t*>(mask.mutable_data_ptr()));
}

std::tuple<Tensor, Tensor> fake_quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                                         int64_t group_size, int64_t qmin, int64_t qmax) {
  const FakeCall call = checked_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  const Tensor y = empty_cpu(shape_of(x), x.scalar_type()), mask = empty_cpu(mask_shape(x), ScalarType::Byte);
  write(call, group_size, qmin, qmax, y, mask);
  return {y, mask};
}

void fake_quantize_out(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity,
                       int64_t group_size, int64_t qmin, int64_t qmax, const Tensor& y, const Tensor& mask) {
  const FakeCall call = checked_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  buffer("y", y, x, x.scalar_type(), shape_of(x));
  buffer("mask", mask, x, ScalarType::Byte, mask_shape(x));
  fake_out_apart(x, scale, zero_point, y, mask);
  write(call, group_size, qmin, qmax, y, mask);
}

void write_dynamic(const FakeCall& call, int64_t group_size, bool symmetric, int64_t qmin, int64_t qmax,
                   const Tensor& y, const Tensor& scale, const Tensor& zero_point) {
  const Matrix& m = call.x;
  cpu::fake_quantize_dynamic(m.data, m.type, m.rows, m.cols, m.ld, call.q.granularity, group_size, symmetric,
                             small(qmin), small(qmax), y.mutable_data_ptr(),
                             static_cast<float*>(scale.mutable_data_ptr()),
                             static_cast<int32_t*>(zero_point.mutable_data_ptr()));
}

std::tuple<Tensor, Tensor, Tensor> fake_quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size,
                                                         bool symmetric, int64_t qmin, int64_t qmax) {
  const FakeCall call = fake_dynamic_call(x, granularity, group_size, symmetric, qmin, qmax);
  const Tensor y = empty_cpu(shape_of(x), x.scalar_type());
  const Tensor scale = empty_cpu(call.q.scale_shape, ScalarType::Float);
  const Tensor zero_point = empty_cpu(call.q.scale_shape, ScalarType::Int);
  write_dynamic(call, group_size, symmetric, qmin, qmax, y, scale, zero_point);
  return {y, scale, zero_point};
}

void fake_quantize_dynamic_out(const Tensor& x, Text granularity, int64_t group_size, bool symmetric, int64_t qmin,
                               int64_t qmax, const Tensor& y, const Tensor& scale, const Tensor& zero_point) {
  const FakeCall call = fake_dynamic_call(x, granularity, group_size, symmetric, qmin, qmax);
  buffer("y", y, x, x.scalar_type(), shape_of(x));
  buffer("scale", scale, x, ScalarType::Float, call.q.scale_shape);
  buffer("zero_point", zero_point, x, ScalarType::Int, call.q.scale_shape);
  fake_dynamic_out_apart(x, y, scale, zero_point);
  write_dynamic(call, group_size, symmetric, qmin, qmax, y, scale, zero_point);
}

Tensor fake_quantize_backward(const Tensor& grad, const Tensor& mask) {
  fake_backward_check(grad, mask);
  const Tensor out = empty_cpu(shape_of(grad), grad.scalar_type());
  std::vector<Tensor> keep;
  cpu::fake_quantize_backward(dense(grad, keep), dtype_of(grad), grad.numel(),
                              static_cast<const uint8_t*>(dense(mask, keep)), out.mutable_data_ptr());
  return out;
}

void fake_quantize_backward_in_place(const Tensor& grad, const Tensor& mask) {
  fake_backward_check(grad, mask);
  buffer("grad", grad, grad, grad.scalar_type(), shape_of(grad));
  apart("grad", grad, "mask", mask);
  std::vector<Tensor> keep;
  cpu::fake_quantize_backward(grad.const_data_ptr(), dtype_of(grad), grad.numel(),
                              static_cast<const uint8_t*>(dense(mask, keep)), grad.mutable_data_ptr());
}

std::tuple<Tensor, Tensor> fake_quantize_lsq_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                      MaybeTensor zero_point, Text granularity, int64_t group_size,
                                                      int64_t qmin, int64_t qmax) {
  FakeCall call = checked_call(x, scale, zero_point, granularity, group_size, qmin, qmax);
  lsq_check(grad, x);
  const Tensor grad_x = empty_cpu(shape_of(x), x.scalar_type());
  const Tensor grad_scale = empty_cpu(shape_of(scale), ScalarType::Float);
  const Matrix& m = call.x;
  cpu::fake_quantize_lsq_backward(dense(grad, call.keep), dense(x, call.keep), m.type, m.rows, m.cols,
                                  call.q.granularity, group_size, call.scale, call.zero_point, small(qmin), small(qmax),
                                  grad_x.mutable_data_ptr(), static_cast<float*>(grad_scale.mutable_data_ptr()));
  return {grad_x, grad_scale};
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(pyquant, CPU, m) {
  namespace b = pyquant::bind;
  m.impl("fake_quantize", TORCH_BOX(&b::fake_quantize));
  m.impl("fake_quantize_out", TORCH_BOX(&b::fake_quantize_out));
  m.impl("fake_quantize_dynamic", TORCH_BOX(&b::fake_quantize_dynamic));
  m.impl("fake_quantize_dynamic_out", TORCH_BOX(&b::fake_quantize_dynamic_out));
  m.impl("fake_quantize_backward", TORCH_BOX(&b::fake_quantize_backward));
  m.impl("fake_quantize_backward_", TORCH_BOX(&b::fake_quantize_backward_in_place));
  m.impl("fake_quantize_lsq_backward", TORCH_BOX(&b::fake_quantize_lsq_backward));
}

// CUDA as a backend of the ops that are written once: the device made current, its memory, and csrc/cuda behind the
// calls that csrc/cpu has too (backend_cpu.h). Values of zero points and scales are not checked, as reading them would
// synchronise.
#pragma once
#include "bind/check.h"
#include "bind/device.h"

namespace pyquant::bind {

struct Cuda {
  using Range = cuda::CodeRange;
  using Params = cuda::QuantizeParams;

  explicit Cuda(const Tensor& x) : like(x), on(x) {}

  Tensor empty(const Shape& shape, ScalarType type) const { return bind::empty(like, shape, type); }

  void check_zero_points(const char*, const int32_t*, int64_t, int64_t, int64_t) const {}
  void check_scales(const float*, int64_t) const {}

  void quantize(const Matrix& m, const Quantisation& q, int64_t group_size, const float* scale,
                const int32_t* zero_point, const Range& range, int8_t* codes) const {
    cuda::quantize(floats(m), q.granularity, group_size, scale, zero_point, range, {codes, m.cols}, on.context);
  }
  void quantize_dynamic(const Matrix& m, const Quantisation& q, int64_t group_size, const Range& range, int8_t* codes,
                        const Params& to) const {
    const Tensor parts = workspace(q);
    cuda::quantize_dynamic(floats(m), q.granularity, group_size, range, to, {codes, m.cols}, data(parts), on.context);
  }
  void norm_quantize(const Matrix& m, const NormOperands& norm, const Range& range, int8_t* codes,
                     const Params& to) const {
    cuda::norm_quantize(floats(m), norm, range, to, {codes, m.cols}, on.context);
  }
  void activation_mul_quantize(const Matrix& m, const GateOperands& gate, const Range& range, int8_t* codes,
                               const Params& to) const {
    cuda::activation_mul_quantize(floats(m), gate, range, to, {codes, m.cols}, on.context);
  }
  void hadamard_quantize(const Matrix& m, const Hadamard& by, const Range& range, int8_t* codes,
                         const Params& to) const {
    cuda::hadamard_quantize(floats(m), by, range, to, {codes, m.cols}, on.context);
  }
  void hadamard_transform(const Matrix& m, const Hadamard& by, void* out) const {
    cuda::hadamard_transform(floats(m), by, out, on.context);
  }
  void dequantize(const Matrix& m, const Quantisation& q, int64_t group_size, const float* scale,
                  const int32_t* zero_point, void* out, DType type) const {
    cuda::dequantize(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size, scale, zero_point, out, type,
                     on.context);
  }
  void magnitude_histogram(const Matrix& m, int32_t exponent, int64_t* counts) const {
    cuda::magnitude_histogram(floats(m), exponent, counts, on.context);
  }
  void pack_int4(const int8_t* codes, int64_t rows, int64_t columns, uint8_t* packed) const {
    cuda::pack_int4(codes, rows, columns, packed, on.context);
  }
  void unpack_int4(const uint8_t* packed, int64_t rows, int64_t columns, int8_t* codes) const {
    cuda::unpack_int4(packed, rows, columns, codes, on.context);
  }

  void fake_quantize(const FakeCall& call, int64_t group_size, const Range& range, void* y, uint8_t* mask) const {
    cuda::fake_quantize(floats(call.x), call.q.granularity, group_size, call.scale, call.zero_point, range, y, mask,
                        on.context);
  }
  void fake_quantize_dynamic(const FakeCall& call, int64_t group_size, const Range& range, void* y,
                             const Params& to) const {
    const Tensor parts = workspace(call.q);
    cuda::fake_quantize_dynamic(floats(call.x), call.q.granularity, group_size, range, to, y, data(parts), on.context);
  }
  void fake_quantize_backward(const void* grad, DType type, int64_t count, const uint8_t* mask, void* out) const {
    cuda::fake_quantize_backward(grad, type, count, mask, out, on.context);
  }
  // x dense.
  void fake_quantize_lsq_backward(const void* grad, const void* x, const FakeCall& call, int64_t group_size,
                                  const Range& range, void* grad_x, float* grad_scale) const {
    const cuda::FloatMatrix m{x, call.x.type, call.x.rows, call.x.cols, call.x.cols};
    const Tensor sums = empty({cuda::lsq_workspace_bytes(m, call.q.granularity, group_size)}, ScalarType::Byte);
    cuda::fake_quantize_lsq_backward(grad, m, call.q.granularity, group_size, call.scale, call.zero_point, range,
                                     grad_x, grad_scale, sums.mutable_data_ptr(), on.context);
  }

  // kernel: the name of a row, or empty for the plan's (ops_cuda.cpp).
  void gemm(GemmCall& call, const Tensor& x, const std::string& kernel = {}) const;

  // The fused Linear (linear_cuda.cpp).
  static void check_layout(const LinearSpec& spec);
  void check_input(const LinearCall&, const Tensor&, int64_t) const {}
  void linear(const LinearCall& call, const Tensor& x, const Tensor& packed, void* out) const;

  const Tensor& like;
  const On on;

 private:
  static cuda::FloatMatrix floats(const Matrix& m) { return {m.data, m.type, m.rows, m.cols, m.ld}; }
  // Of a range over a whole tensor, which blocks find together.
  Tensor workspace(const Quantisation& q) const {
    return q.granularity == Granularity::tensor ? empty({cuda::kQuantizeWorkspaceBytes}, ScalarType::Byte) : Tensor();
  }
  static void* data(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }
};

}  // namespace pyquant::bind

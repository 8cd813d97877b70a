// The CPU as a backend of the ops that are written once (quantise_ops.h, fake_quantise_ops.h, product_ops.h): memory,
// and csrc/cpu behind the calls that csrc/cuda has too. backend_cuda.h has the other; the two are read side by side.
#pragma once
#include "bind/check.h"
#include "bind/cpu_tensor.h"
#include "core/arith.h"
#include "cpu/cpu.h"

namespace pyquant::bind {

struct Cpu {
  struct Range {
    int32_t qmin, qmax;
    bool symmetric;
  };
  struct Params {
    float* scale;
    int32_t* zero_point;
  };

  explicit Cpu(const Tensor&) {}

  Tensor empty(const Shape& shape, ScalarType type) const { return empty_cpu(shape, type); }

  // Values in host memory: reading them costs little compared with the op.
  void check_zero_points(const char* argument, const int32_t* values, int64_t count, int64_t low, int64_t high) const {
    zero_points(argument, values, count, low, high);
  }
  void check_scales(const float* values, int64_t count) const {
    for (int64_t i = 0; i < count; ++i)
      if (!(values[i] > 0.f && values[i] < kInfinity))
        refuse("scale", "a value of " + std::to_string(values[i]), "finite values above 0");
  }

  void quantize(const Matrix& m, const Quantisation& q, int64_t group_size, const float* scale,
                const int32_t* zero_point, Range range, int8_t* codes) const {
    cpu::quantize(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size, scale, zero_point, range.qmin,
                  range.qmax, codes);
  }
  void quantize_dynamic(const Matrix& m, const Quantisation& q, int64_t group_size, Range range, int8_t* codes,
                        Params to) const {
    cpu::quantize_dynamic(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size, range.symmetric, range.qmin,
                          range.qmax, codes, to.scale, to.zero_point);
  }
  void norm_quantize(const Matrix& m, const NormOperands& norm, Range range, int8_t* codes, Params to) const {
    cpu::norm_quantize(m.data, m.type, m.rows, m.cols, m.ld, norm, range.symmetric, range.qmin, range.qmax, codes,
                       to.scale, to.zero_point);
  }
  void activation_mul_quantize(const Matrix& m, const GateOperands& gate, Range range, int8_t* codes, Params to) const {
    cpu::activation_mul_quantize(m.data, m.type, m.rows, m.cols, m.ld, gate, range.symmetric, range.qmin, range.qmax,
                                 codes, to.scale, to.zero_point);
  }
  void hadamard_quantize(const Matrix& m, const Hadamard& by, Range range, int8_t* codes, Params to) const {
    cpu::hadamard_quantize(m.data, m.type, m.rows, m.cols, m.ld, by, range.symmetric, range.qmin, range.qmax, codes,
                           to.scale, to.zero_point);
  }
  void hadamard_transform(const Matrix& m, const Hadamard& by, void* out) const {
    cpu::hadamard_transform(m.data, m.type, m.rows, m.cols, m.ld, by, out);
  }
  void dequantize(const Matrix& m, const Quantisation& q, int64_t group_size, const float* scale,
                  const int32_t* zero_point, void* out, DType type) const {
    cpu::dequantize(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size, scale, zero_point, out, type);
  }
  void magnitude_histogram(const Matrix& m, int32_t exponent, int64_t* counts) const {
    cpu::magnitude_histogram(m.data, m.type, m.rows, m.cols, m.ld, exponent, counts);
  }
  void pack_int4(const int8_t* codes, int64_t rows, int64_t columns, uint8_t* packed) const {
    cpu::pack_int4(codes, rows, columns, packed);
  }
  void unpack_int4(const uint8_t* packed, int64_t rows, int64_t columns, int8_t* codes) const {
    cpu::unpack_int4(packed, rows, columns, codes);
  }

  void fake_quantize(const FakeCall& call, int64_t group_size, Range range, void* y, uint8_t* mask) const {
    const Matrix& m = call.x;
    cpu::fake_quantize(m.data, m.type, m.rows, m.cols, m.ld, call.q.granularity, group_size, call.scale,
                       call.zero_point, range.qmin, range.qmax, y, mask);
  }
  void fake_quantize_dynamic(const FakeCall& call, int64_t group_size, Range range, void* y, Params to) const {
    const Matrix& m = call.x;
    cpu::fake_quantize_dynamic(m.data, m.type, m.rows, m.cols, m.ld, call.q.granularity, group_size, range.symmetric,
                               range.qmin, range.qmax, y, to.scale, to.zero_point);
  }
  void fake_quantize_backward(const void* grad, DType type, int64_t count, const uint8_t* mask, void* out) const {
    cpu::fake_quantize_backward(grad, type, count, mask, out);
  }
  // x dense.
  void fake_quantize_lsq_backward(const void* grad, const void* x, const FakeCall& call, int64_t group_size,
                                  Range range, void* grad_x, float* grad_scale) const {
    cpu::fake_quantize_lsq_backward(grad, x, call.x.type, call.x.rows, call.x.cols, call.q.granularity, group_size,
                                    call.scale, call.zero_point, range.qmin, range.qmax, grad_x, grad_scale);
  }

  void gemm(GemmCall& call, const Tensor& x) const;  // ops_cpu.cpp

  // The fused Linear (linear_cpu.cpp). check_input: values of zero points, those of the buffer too.
  static void check_layout(const LinearSpec& spec);
  void check_input(const LinearCall& call, const Tensor& packed, int64_t zero_points) const;
  void linear(const LinearCall& call, const Tensor& x, const Tensor& packed, void* out) const;
  // Codes of x, which share bytes, a byte each as the kernels take them: dense [rows, columns].
  Tensor widened(const Tensor& x, int64_t rows, int64_t columns) const;
};

}  // namespace pyquant::bind

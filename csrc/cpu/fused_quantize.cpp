// Norm, gate or Hadamard transform, then codes per row (docs/numerics.md 9, 15): a row stays in cache from its
// first sum to its codes.
#include <algorithm>

#include "core/norm_math.h"
#include "cpu/row_codes.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements worth a task: norms do more with one than a quantiser

// Sum of term(v[0..n)) in the order of norm_math.h.
template <class Term>
float sum_in_lanes(const float* v, int64_t n, Term term) {
  alignas(64) float lanes[kSumLanes] = {};
  for (int64_t first = 0; first < n; first += kSumLanes) {
    const int64_t count = std::min<int64_t>(n - first, kSumLanes);
    for (int64_t i = 0; i < count; ++i) lanes[i] = fadd(lanes[i], term(v[first + i]));
  }
  int used = 1;
  while (used < kSumLanes && used < n) used *= 2;
  return tree_sum(lanes, used);
}

// Replaces the row by its norm. weight and bias: fp32 or null.
void normalise(float* v, int64_t n, bool subtract_mean, const float* weight, const float* bias, float eps) {
  if (subtract_mean) {
    const float mean = mean_of(sum_in_lanes(v, n, [](float x) { return x; }), n);
    for (int64_t i = 0; i < n; ++i) v[i] = fsub(v[i], mean);
  }
  const float factor = norm_factor(mean_of(sum_in_lanes(v, n, [](float x) { return fmul(x, x); }), n), eps);
  for (int64_t i = 0; i < n; ++i) v[i] = fmul(v[i], factor);
  if (weight)
    for (int64_t i = 0; i < n; ++i) v[i] = fmul(v[i], weight[i]);
  if (bias)
    for (int64_t i = 0; i < n; ++i) v[i] = fadd(v[i], bias[i]);
}

template <class Row>
void each_row(int64_t rows, int64_t cols, Row row) {
  Shares(rows, rows * cols, kGrain).run([&](Share share) { row(share.begin, share.end); });
}

}  // namespace

void norm_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const NormOperands& norm,
                   bool symmetric, int32_t qmin, int32_t qmax, int8_t* q, float* scale, int32_t* zero_point) {
  const Kernels& in_use = kernels();
  const auto width = static_cast<size_t>(cols);
  each_row(rows, cols, [&](int64_t begin, int64_t end) {
    auto& scratch = Scratch::of_this_thread();
    scratch.reset(4 * Scratch::rounded(width * sizeof(float)));
    auto *v = scratch.take<float>(width), *other = scratch.take<float>(width);
    float *weight = nullptr, *bias = nullptr;
    if (norm.weight) in_use.widen(norm.weight, norm.weight_type, cols, weight = scratch.take<float>(width));
    if (norm.bias) in_use.widen(norm.bias, norm.bias_type, cols, bias = scratch.take<float>(width));
    for (int64_t r = begin; r < end; ++r) {
      in_use.widen(static_cast<const unsigned char*>(x) + r * ld * bytes_of(x_type), x_type, cols, v);
      if (norm.residual) {
        auto* sum = static_cast<unsigned char*>(norm.sum) + r * cols * bytes_of(x_type);
        in_use.widen(static_cast<const unsigned char*>(norm.residual) + r * norm.ldr * bytes_of(x_type), x_type, cols,
                     other);
        for (int64_t i = 0; i < cols; ++i) v[i] = fadd(v[i], other[i]);
        in_use.narrow(v, cols, sum, x_type);
        in_use.widen(sum, x_type, cols, v);
      }
      normalise(v, cols, norm.subtract_mean, weight, bias, norm.eps);
      const RowParams p = quantize_row(in_use, v, DType::f32, cols, symmetric, qmin, qmax, q + r * cols);
      scale[r] = p.scale;
      zero_point[r] = p.zero_point;
    }
  });
}

void activation_mul_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld,
                             const GateOperands& gate, bool symmetric, int32_t qmin, int32_t qmax, int8_t* q,
                             float* scale, int32_t* zero_point) {
  const Kernels& in_use = kernels();
  const auto width = static_cast<size_t>(cols);
  each_row(rows, cols, [&](int64_t begin, int64_t end) {
    auto& scratch = Scratch::of_this_thread();
    scratch.reset(Scratch::rounded(width * sizeof(float)));
    auto* v = scratch.take<float>(width);
    GateOperands by = gate;
    for (int64_t r = begin; r < end; ++r) {
      by.up = static_cast<const unsigned char*>(gate.up) + r * gate.ldu * bytes_of(x_type);
      in_use.activation_mul(static_cast<const unsigned char*>(x) + r * ld * bytes_of(x_type), x_type, cols, by, v);
      const RowParams p = quantize_row(in_use, v, DType::f32, cols, symmetric, qmin, qmax, q + r * cols);
      scale[r] = p.scale;
      zero_point[r] = p.zero_point;
    }
  });
}

// each(row, its transform in float32)
template <class Each>
static void transformed_rows(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const Hadamard& by,
                             Each each) {
  const Kernels& in_use = kernels();
  each_row(rows, cols, [&](int64_t begin, int64_t end) {
    auto& scratch = Scratch::of_this_thread();
    scratch.reset(Scratch::rounded(static_cast<size_t>(cols) * sizeof(float)));
    auto* v = scratch.take<float>(static_cast<size_t>(cols));
    for (int64_t r = begin; r < end; ++r) {
      in_use.widen(static_cast<const unsigned char*>(x) + r * ld * bytes_of(x_type), x_type, cols, v);
      in_use.hadamard(v, cols, by);
      each(r, v);
    }
  });
}

void hadamard_transform(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const Hadamard& by,
                        void* out) {
  transformed_rows(x, x_type, rows, cols, ld, by, [&](int64_t r, const float* v) {
    kernels().narrow(v, cols, static_cast<unsigned char*>(out) + r * cols * bytes_of(x_type), x_type);
  });
}

void hadamard_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const Hadamard& by,
                       bool symmetric, int32_t qmin, int32_t qmax, int8_t* q, float* scale, int32_t* zero_point) {
  transformed_rows(x, x_type, rows, cols, ld, by, [&](int64_t r, const float* v) {
    const RowParams p = quantize_row(kernels(), v, DType::f32, cols, symmetric, qmin, qmax, q + r * cols);
    scale[r] = p.scale;
    zero_point[r] = p.zero_point;
  });
}

}  // namespace pyquant::cpu

// The ordered epilogue on a ready float product [m, n], in place where types allow: what follows a product that is not
// one of our own kernels.
#include "cuda/elements.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/grid.h"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kBlock = 128, kColumns = 8;

// blockIdx.x walks the rows; a thread owns eight neighbouring columns.
template <class T>
__global__ void __launch_bounds__(kBlock)
    float_epilogue_kernel(const T* t, int64_t ldt, bool vector, EpilogueParams p) {
  const int32_t m = static_cast<int32_t>(blockIdx.x);
  const int32_t n = (static_cast<int32_t>(blockIdx.y) * kBlock + static_cast<int32_t>(threadIdx.x)) * kColumns;
  if (n >= p.n) return;
  const T* row = t + m * ldt + n;
  float acc[kColumns] = {};
  if (vector && n + kColumns <= p.n) {
#pragma unroll
    for (int i = 0; i < kColumns / kVector<T>; ++i) {
      float part[kVector<T>];
      load_vector(row + i * kVector<T>, part);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) acc[i * kVector<T> + j] = part[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (n + i < p.n) acc[i] = widen(row[i]);
    }
  }
  Channel channel[kColumns];
  load_channels(p, n, channel);
  finish_row(acc, channel, Token{}, load_code_limits(p), p, m, n);
}

}  // namespace

void float_epilogue(const void* t, DType type, int64_t ldt, const GemmProblem& problem, const GemmOperands& operands,
                    const Epilogue& epilogue, const Context& context) {
  if (problem.m == 0 || problem.n == 0) return;
  const DeviceInfo device{};
  const GemmCall call{"float_epilogue", problem, operands, epilogue, context, device};
  LaunchShape shape;
  shape.grid = grid_of(call.name, problem.m, (problem.n + kBlock * kColumns - 1) / (kBlock * kColumns));
  shape.block = dim3(kBlock);
  with_float_type(type, call.name, [&](auto element) {
    using T = decltype(element);
    const bool vector = is_aligned(t, ldt * static_cast<int64_t>(sizeof(T)), 16);
    launch<float_epilogue_kernel<T>>(call.name, shape, context, static_cast<const T*>(t), ldt, vector,
                                     epilogue_params(call));
  });
}

}  // namespace pyquant::cuda

// Counts of magnitudes in floating bins.
//
// A block keeps 32-bit counts of the eight octaves at the top of the window, and of bin 0 with the zeros, in shared
// memory; the rest, one number in a hundred of a normal distribution, goes to the table in global memory. At the end a
// block adds what it has counted. Integer sums: the order in which blocks run changes nothing.
#include "core/histogram_math.h"
#include "cuda/divisor.cuh"
#include "cuda/elements.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kNearOctaves = 8;
constexpr int kNear = kNearOctaves << kHistogramFractionBits;  // bins of one sign in shared memory, bin 0 not counted
constexpr int kFirstNear = kHistogramBins - kNear;
constexpr int kSharedBytes = 2 * (kNear + 1) * static_cast<int>(sizeof(uint32_t));
constexpr int64_t kPerBlock = 1 << 16;  // elements worth a block, which adds up to 2 * kNear counts at its end
constexpr int64_t kBlocks = 264;        // two for each SM of a large chip

template <class T>
__global__ void __launch_bounds__(kThreads)
    magnitude_histogram_kernel(const T* x, int64_t rows, int64_t cols, int64_t ld, Divisor units, bool vector,
                               int32_t first_key, unsigned long long* counts) {
  extern __shared__ uint32_t near[];  // [sign][bin 0, then the top octaves]
  for (int i = threadIdx.x; i < 2 * (kNear + 1); i += kThreads) near[i] = 0;
  __syncthreads();
  constexpr int kWidth = kVector<T>;
#pragma unroll 1
  for (int64_t u = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; u < rows * units.by;
       u += int64_t{kThreads} * gridDim.x) {
    const int64_t row = units.quotient(u), col = (u - row * units.by) * kWidth;
    float v[kWidth];
    load_run(x + row * ld + col, cols - col, vector, v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (col + j >= cols) break;
      const uint32_t pattern = bits_from_float(v[j]);
      const int positive = pattern >> 31 ? 0 : 1, bin = histogram_bin(pattern, first_key);
      if (bin == 0)
        atomicAdd(near + positive * (kNear + 1), 1u);
      else if (bin >= kFirstNear)
        atomicAdd(near + positive * (kNear + 1) + 1 + (bin - kFirstNear), 1u);
      else
        atomicAdd(counts + positive * kHistogramBins + bin, 1ull);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * (kNear + 1); i += kThreads) {
    const int positive = i / (kNear + 1), at = i % (kNear + 1);
    if (near[i]) atomicAdd(counts + positive * kHistogramBins + (at == 0 ? 0 : kFirstNear + at - 1), near[i]);
  }
}

}  // namespace

void magnitude_histogram(const FloatMatrix& x, int32_t exponent, int64_t* counts, const Context& context) {
  clear("magnitude_histogram", counts, int64_t{2} * kHistogramBins * 8, context);
  FloatMatrix m = x;
  if (m.ld == m.cols || m.rows <= 1) m = {x.data, x.type, 1, x.rows * x.cols, x.rows * x.cols};
  const int64_t total = m.rows * m.cols;
  if (total == 0) return;
  const int64_t blocks = (total + kPerBlock - 1) / kPerBlock;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks < kBlocks ? blocks : kBlocks));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kSharedBytes;
  with_float_type(m.type, "magnitude_histogram", [&](auto element) {
    using T = decltype(element);
    const bool vector = is_aligned(m.data, m.rows > 1 ? m.ld * static_cast<int64_t>(sizeof(T)) : 0, 16);
    launch<magnitude_histogram_kernel<T>>("magnitude_histogram", shape, context, static_cast<const T*>(m.data), m.rows,
                                          m.cols, m.ld, Divisor((m.cols + kVector<T> - 1) / kVector<T>), vector,
                                          histogram_first_key(exponent), reinterpret_cast<unsigned long long*>(counts));
  });
}

}  // namespace pyquant::cuda

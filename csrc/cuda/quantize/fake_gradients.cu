// Fake quantisation, backward: the masked gradient, and the gradient of a learned scale in its one order of additions
// (docs/numerics.md 10.4). A block of 1 024 elements belongs to a team of 16 threads (8 for 16-bit elements), whose
// units are the 64 lanes: no synchronisation before the tree of additions, and a tensor with one scale still fills the
// device.
#include "cuda/divisor.cuh"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/fake.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kLanes = 64;
constexpr int64_t kSumBlock = 1024;

// Bits in, bits out: Word is an unsigned integer of the element's size.
template <class Word>
__global__ void __launch_bounds__(kBlock)
    keep_kernel(const Word* grad, int64_t count, const uint8_t* mask, Word* out, bool vector, bool in_place) {
  constexpr int kWidth = kVector<Word>;
  constexpr uint32_t kAll = (1u << kWidth) - 1;
  wait_for_predecessor();
  release_successor();
#pragma unroll 1
  for (int64_t c = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * kWidth; c < count;
       c += int64_t{kBlock} * gridDim.x * kWidth) {
    const uint32_t bits = static_cast<uint32_t>(mask[c / 8]) >> (c % 8) & kAll;
    if (in_place && bits == kAll) continue;
    union {
      uint4 words;
      Word element[kWidth];
    } v;
    const bool whole = vector && c + kWidth <= count;
    if (whole) v.words = *reinterpret_cast<const uint4*>(grad + c);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const bool keep = bits >> j & 1;
      if (whole)
        v.element[j] = keep ? v.element[j] : Word{0};
      else if (c + j < count)
        out[c + j] = keep ? grad[c + j] : Word{0};
    }
    if (whole) *reinterpret_cast<uint4*>(out + c) = v.words;
  }
}

template <class Word>
void keep(const void* grad, int64_t count, const uint8_t* mask, void* out, const Context& context) {
  const int64_t units = (count + kVector<Word> - 1) / kVector<Word>, blocks = (units + kBlock - 1) / kBlock;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20));
  shape.block = dim3(kBlock);
  shape.overlaps = true;
  launch<keep_kernel<Word>>("fake_quantize_backward", shape, context, static_cast<const Word*>(grad), count, mask,
                            static_cast<Word*>(out), is_aligned(grad, 0, 16) && is_aligned(out, 0, 16), grad == out);
}

// Lane sums of a team -> the sum of its block, in every thread of the team. The whole warp calls this.
template <int Width>
__device__ __forceinline__ float team_sum(float (&lane)[Width]) {
#pragma unroll
  for (int width = 1; width < Width; width *= 2)
#pragma unroll
    for (int j = 0; j < Width; j += 2 * width) lane[j] = fadd(lane[j], lane[j + width]);
  float sum = lane[0];
#pragma unroll
  for (int step = 1; step < kLanes / Width; step *= 2) sum = fadd(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  return sum;
}

struct Blocks {
  int64_t runs, length, per_run;  // per_run blocks cover a run of `length` elements
  Divisor by_run = Divisor(per_run < 1 ? 1 : per_run);
  int64_t count() const { return runs * per_run; }
};

template <class T>
struct Learned {
  const T *x, *grad;
  T* grad_x;
  const float* scale;
  const int32_t* zero_point;
  int32_t qmin, qmax;
  bool vector;
};

template <class T>
__global__ void __launch_bounds__(kBlock) learned_kernel(Learned<T> in, Blocks blocks, float* sums) {
  constexpr int kWidth = kVector<T>, kTeam = kLanes / kWidth;
  wait_for_predecessor();
  release_successor();
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) / kTeam;
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  const bool exists = block < blocks.runs * blocks.per_run;
  const int64_t run = exists ? blocks.by_run.quotient(block) : 0;
  const int64_t begin = exists ? (block - run * blocks.per_run) * kSumBlock : 0;
  const int64_t size = exists ? blocks.length - begin < kSumBlock ? blocks.length - begin : kSumBlock : 0;
  const int64_t base = run * blocks.length + begin;
  FakeStep step{};
  if (exists) step = fake_step(step_at(in.scale, in.zero_point, run), in.qmin, in.qmax);
  float lane[kWidth] = {};
#pragma unroll 4
  for (int64_t c = member * kWidth; c < size; c += kLanes) {
    float v[kWidth], g[kWidth];
    load_run(in.x + base + c, size - c, in.vector, v);
    load_run(in.grad + base + c, size - c, in.vector, g);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      bool inside;
      const float scaled = fmul(v[j], step.recip), code = fake_code(scaled, step, &inside);
      if (c + j < size) lane[j] = fadd(lane[j], fmul(g[j], inside ? fsub(code, scaled) : code));
      g[j] = inside ? g[j] : 0.f;
    }
    store_unit(in.grad_x + base + c, clipped(size - c, kVector<T>), in.vector, narrow_unit<T>(g));
  }
  const float sum = team_sum(lane);
  if (exists && member == 0) sums[block] = sum;
}

// The sums of the blocks of a run by the same rule.
__global__ void __launch_bounds__(kBlock) sum_kernel(const float* from, Blocks blocks, float* sums) {
  constexpr int kWidth = 4, kTeam = kLanes / kWidth;
  wait_for_predecessor();
  release_successor();
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) / kTeam;
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  const bool exists = block < blocks.runs * blocks.per_run;
  const int64_t run = exists ? blocks.by_run.quotient(block) : 0;
  const int64_t begin = exists ? (block - run * blocks.per_run) * kSumBlock : 0;
  const int64_t size = exists ? blocks.length - begin < kSumBlock ? blocks.length - begin : kSumBlock : 0;
  const float* v = from + run * blocks.length + begin;
  float lane[kWidth] = {};
  for (int64_t c = member * kWidth; c < size; c += kLanes)
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (c + j < size) lane[j] = fadd(lane[j], v[c + j]);
  const float sum = team_sum(lane);
  if (exists && member == 0) sums[block] = sum;
}

Blocks blocks_of_runs(int64_t runs, int64_t length) { return {runs, length, (length + kSumBlock - 1) / kSumBlock}; }

Blocks blocks_of(const FloatMatrix& x, Granularity granularity, int64_t group_size) {
  if (granularity == Granularity::tensor) return blocks_of_runs(1, x.rows * x.cols);
  if (granularity == Granularity::rows) return blocks_of_runs(x.rows, x.cols);
  return blocks_of_runs(x.rows * (x.cols / group_size), group_size);
}

LaunchShape teams(int64_t count, int team) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((count * team + kBlock - 1) / kBlock));
  shape.block = dim3(kBlock);
  shape.overlaps = true;
  return shape;
}

}  // namespace

void fake_quantize_backward(const void* grad, DType type, int64_t count, const uint8_t* mask, void* out,
                            const Context& context) {
  if (count == 0) return;
  if (type == DType::f32)
    keep<uint32_t>(grad, count, mask, out, context);
  else
    keep<uint16_t>(grad, count, mask, out, context);
}

int64_t lsq_workspace_bytes(const FloatMatrix& x, Granularity granularity, int64_t group_size) {
  const Blocks blocks = blocks_of(x, granularity, group_size);
  if (blocks.per_run <= 1) return 0;
  const Blocks next = blocks_of_runs(blocks.runs, blocks.per_run);
  return static_cast<int64_t>(sizeof(float)) * (blocks.count() + (next.per_run > 1 ? next.count() : 0));
}

void fake_quantize_lsq_backward(const void* grad, const FloatMatrix& x, Granularity granularity, int64_t group_size,
                                const float* scale, const int32_t* zero_point, const CodeRange& range, void* grad_x,
                                float* grad_scale, void* workspace, const Context& context) {
  const char* name = "fake_quantize_lsq_backward";
  Blocks blocks = blocks_of(x, granularity, group_size);
  if (blocks.per_run == 0) return clear(name, grad_scale, blocks.runs * static_cast<int64_t>(sizeof(float)), context);
  if (blocks.count() == 0) return;
  auto* sums = blocks.per_run > 1 ? static_cast<float*>(workspace) : grad_scale;
  with_float_type(x.type, name, [&](auto element) {
    using T = decltype(element);
    const int64_t run_bytes = blocks.runs > 1 ? blocks.length * static_cast<int64_t>(sizeof(T)) : 0;
    const bool vector = is_aligned(x.data, run_bytes, 16) && is_aligned(grad, 0, 16) && is_aligned(grad_x, 0, 16);
    const Learned<T> in{static_cast<const T*>(x.data),
                        static_cast<const T*>(grad),
                        static_cast<T*>(grad_x),
                        scale,
                        zero_point,
                        range.qmin,
                        range.qmax,
                        vector};
    launch<learned_kernel<T>>(name, teams(blocks.count(), kLanes / kVector<T>), context, in, blocks, sums);
  });
  // Two halves of the workspace take turns; the last sums go to the caller.
  float* other = sums + blocks.count();
  while (blocks.per_run > 1) {
    blocks = blocks_of_runs(blocks.runs, blocks.per_run);
    float* next = blocks.per_run > 1 ? other : grad_scale;
    launch<sum_kernel>(name, teams(blocks.count(), kLanes / 4), context, static_cast<const float*>(sums), blocks, next);
    other = sums;
    sums = next;
  }
}

}  // namespace pyquant::cuda

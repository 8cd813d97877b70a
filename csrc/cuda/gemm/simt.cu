// The family that takes every problem: any alignment, any K (0 too), u8 and packed s4 operands, group scales and steps.
// It keeps the promise that no shape is refused by the backend; select() takes it only when no tensor-core row can run.
//   partition: 256 threads own 64 x 64 outputs, a thread 4 x 4 of them; K moves 32 codes at a time through shared
//   memory, loaded byte by byte (no alignment assumed), multiplied by dp4a. Codes beyond a group or K are zero.
//   Neighbouring lanes hold neighbouring columns: packed int4 output is paired by one shuffle.
//   Groups run in ascending order, each closed by t += float(acc_g) * w_scale[n, g]: ordered, bit-exact.
#include "cuda/gemm/byte_weights.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

struct SimtOperands {
  const uint8_t* x;
  ByteWeights w;
  int64_t ldx_bytes;
  int32_t k, group_size, groups;
  bool x_unsigned;  // u8 codes: multiplied as they are, so their zero point needs no shift
  bool x_packed;    // two s4 codes per byte
};

struct SimtTile {
  static constexpr int kRows = 64, kDepth = 32, kThreads = 256;
  static constexpr int kPitch = kDepth + 4;  // bytes; words of neighbouring rows fall into different banks
  alignas(4) uint8_t x[kRows][kPitch];
  alignas(4) uint8_t w[kRows][kPitch];
};

__device__ __forceinline__ int32_t dot4(int32_t a, int32_t b, int32_t acc, bool a_unsigned) {
  if (!a_unsigned) return __dp4a(a, b, acc);
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(acc) : "r"(a), "r"(b));
  return acc;
}

// acc += the products of codes [begin, end).
__device__ __forceinline__ void simt_accumulate(const SimtOperands& o, const EpilogueParams& p, SimtTile& tile,
                                                int32_t m0, int32_t n0, int32_t begin, int32_t end,
                                                int32_t (&acc)[4][4]) {
  const int row = static_cast<int>(threadIdx.x) / 16 * 4, column = static_cast<int>(threadIdx.x) % 16;
  for (int32_t k0 = begin; k0 < end; k0 += SimtTile::kDepth) {
    for (int i = threadIdx.x; i < SimtTile::kRows * SimtTile::kDepth; i += SimtTile::kThreads) {
      const int r = i / SimtTile::kDepth, c = i % SimtTile::kDepth;
      const bool inside = k0 + c < end;
      const int64_t m = m0 + r, n = n0 + r;
      tile.x[r][c] = inside && m < p.m ? code_at(o.x + m * o.ldx_bytes, k0 + c, o.x_packed) : uint8_t{0};
      tile.w[r][c] = inside && n < p.n ? o.w.at(n, k0 + c) : uint8_t{0};
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < SimtTile::kDepth; c += 4) {
      int32_t a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = *reinterpret_cast<const int32_t*>(&tile.x[row + i][c]);
        b[i] = *reinterpret_cast<const int32_t*>(&tile.w[column + 16 * i][c]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = dot4(a[i], b[j], acc[i][j], o.x_unsigned);
      }
    }
    __syncthreads();
  }
}

// From the scaled sum on. Every lane comes here: columns beyond N hold the other half of a byte.
__device__ __forceinline__ void simt_finish(float t, const EpilogueParams& p, const CodeLimits& limits, int32_t m,
                                            int32_t n) {
  const bool inside = m < p.m && n < p.n;
  float v[1] = {t};
  if (inside) {
    activate_all(v, p);
    add_residual(v, p, m, n);
  }
  if (p.out_type != DType::s4) {
    if (inside) store_real(v, p, limits, m, n);
    return;
  }
  const int32_t own = inside ? code(v[0], limits) & 15 : 0;
  const int32_t next = __shfl_down_sync(0xffffffffu, own, 1);
  if (inside && n % 2 == 0)
    static_cast<uint8_t*>(p.out)[(static_cast<int64_t>(m) * p.ldo + n) / 2] = static_cast<uint8_t>(own | next << 4);
}

__global__ void __launch_bounds__(SimtTile::kThreads, 2) gemm_simt_kernel(SimtOperands o, EpilogueParams p) {
  __shared__ SimtTile tile;
  const int32_t m0 = static_cast<int32_t>(blockIdx.x) * SimtTile::kRows;
  const int32_t n0 = static_cast<int32_t>(blockIdx.y) * SimtTile::kRows;
  const int32_t row = m0 + static_cast<int32_t>(threadIdx.x) / 16 * 4;
  const int32_t column = n0 + static_cast<int32_t>(threadIdx.x) % 16;
  const CodeLimits limits = load_code_limits(p);
  Token token[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) token[i] = load_token(p, row + i);
  int32_t acc[4][4] = {};
  if (o.group_size == 0) {
    simt_accumulate(o, p, tile, m0, n0, 0, o.k, acc);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t n = column + 16 * j;
      const Channel channel = load_channel(p, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t sum[1] = {corrected(acc[i][j], token[i].zero_point, channel.w_sum)};
        if (p.out_type == DType::s32) {
          if (row + i < p.m && n < p.n) store_acc(sum, p, row + i, n);
          continue;
        }
        const float t = scaled(sum[0], channel.w_scale, token[i].x_scale, p.scale_product_first);
        simt_finish(fadd(t, channel.bias), p, limits, row + i, n);
      }
    }
    return;
  }
  float t[4][4] = {};
  for (int32_t g = 0; g < o.groups; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i) acc[i / 4][i % 4] = 0;
    const int32_t begin = g * o.group_size;
    simt_accumulate(o, p, tile, m0, n0, begin, begin + o.group_size, acc);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t n = column + 16 * j;
      if (n >= p.n) continue;
      const int64_t at = static_cast<int64_t>(n) * o.groups + g;
      const float w_scale = p.w_scale ? __ldg(p.w_scale + at) : 1.f;
      const int32_t w_sum = p.x_zero_point ? __ldg(p.w_sum + at) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        t[i][j] = fadd(t[i][j], fmul(__int2float_rn(corrected(acc[i][j], token[i].zero_point, w_sum)), w_scale));
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int32_t n = column + 16 * j;
    const float bias = p.bias && n < p.n ? __ldg(p.bias + n) : -0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) simt_finish(fadd(fmul(t[i][j], token[i].x_scale), bias), p, limits, row + i, n);
  }
}

}  // namespace

void run_simt(const GemmCall& call) {
  const GemmProblem& p = call.problem;
  const bool x_packed = is_packed(p.x) && p.x_packed;
  const SimtOperands o{static_cast<const uint8_t*>(call.operands.x),
                       ByteWeights(call),
                       p.ldx * stored_bits(p.x, x_packed) / 8,
                       static_cast<int32_t>(p.k),
                       static_cast<int32_t>(p.group_size),
                       p.group_size ? static_cast<int32_t>(p.k / p.group_size) : 1,
                       p.x == DType::u8,
                       x_packed};
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((p.m + 63) / 64), static_cast<unsigned>((p.n + 63) / 64));
  shape.block = dim3(SimtTile::kThreads);
  launch<gemm_simt_kernel>(call.name, shape, call.context, o, epilogue_params(call));
}

extern const Launcher gemm_simt_any;
const Launcher gemm_simt_any{&run_simt, &NoWorkspace::workspace};

}  // namespace pyquant::cuda

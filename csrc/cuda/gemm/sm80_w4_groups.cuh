// GEMM for mma.sync with group scales: int4 weights as in a checkpoint, 8-bit activations. The sum over groups is a
// float sum in ascending order, each product and addition rounded (docs/numerics.md 4), so K is not divided, and
// CUTLASS's kernels, which keep one accumulator, do not serve.
//   partition: a block owns tile_m x tile_n outputs, a warp 32 channels of all or some of its tokens. K comes by
//   cp.async through `Stages` shared buffers of 128 codes and is multiplied 32 codes at a time; the next 32 are read
//   from shared memory meanwhile. After every group a warp adds its product, scaled, to float registers.
//   codes: lane t of a quad takes codes 8t .. 8t + 8 of each 32, even ones first, of both operands, as a sum may be
//   taken in any order of k. Three instructions make a word of weights two words of 16 times the code, two reorder the
//   activations. 16-byte pieces of neighbouring rows change places in shared memory, so that no banks collide.
//   limits: rows of x and w on 16-byte boundaries, the group size a multiple of 32, K of the group size. Any M, N,
//   output (but s32) and residual.
#pragma once
#include "cuda/gemm/decode_math.cuh"
#include "cuda/gemm/decode_move.cuh"
#include "cuda/gemm/tiles80.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

// Passed by value to kernels.
struct GroupsOperands80 {
  const uint8_t *x, *w;
  int64_t ldx_bytes, ldw_bytes;
  const float* w_scale;  // [n, groups] or null
  const int32_t* w_sum;  // [n, groups], with a zero point
  const int32_t* x_zero_point;
  int32_t k, groups, group_codes;
  int32_t tiles_m, tiles_n;
};

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages_>
struct GroupsTraits80 {
  static constexpr int kTokens = kTileM, kChannels = kTileN, kWarpTokens = kWarpM, kStages = kStages_;
  static constexpr int kWarpsN = kTileN / kWarpN, kThreads = 32 * (kTileM / kWarpM) * kWarpsN;
  // Tall warps have up to 255 registers a thread, others half of that.
  static constexpr int kResident = kThreads < 256 ? (kWarpM > 32 ? 256 : 512) / kThreads : 1;
  static constexpr int kRows = kWarpM / 16, kColumns = kWarpN / 8;     // products of a warp: 16 tokens x 8 channels
  static constexpr int kStepCodes = kWarpK, kSteps = kTileK / kWarpK;  // of a stage
  static constexpr int kXPitch = kTileK, kWPitch = kTileK / 2;         // bytes of a row in shared memory
  static constexpr int kXBytes = kTileM * kXPitch, kStageBytes = kXBytes + kTileN * kWPitch;
  static constexpr int kSharedBytes = kStages * kStageBytes;  // plan/accept.cpp counts so
  // 16-byte copies: neighbouring threads take neighbouring pieces of a row, then the next rows.
  static constexpr int kXPieces = kXPitch / 16, kWPieces = kWPitch / 16;
  static constexpr int kXRows = kThreads / kXPieces, kWRows = kThreads / kWPieces;
  static_assert(kTileK == 128 && kWarpK == 32 && kWarpN == 32,
                "the places of codes in shared memory follow from these");
  static_assert(kTileM % kWarpM == 0 && kTileN % kWarpN == 0 && kWarpM % 16 == 0 && kStages >= 2);
  static_assert(kXRows % 4 == 0 && kWRows % 8 == 0, "rows that a thread copies have their pieces in the same places");
};

// Codes of 32 k as they lie in memory: two words of each of a lane's tokens, one of each of its channels.
template <class T>
struct GroupsCodes80 {
  uint32_t x[T::kRows][2][2], w[T::kColumns];
};

// 16 times the codes.
__device__ __forceinline__ void widened80(uint32_t word, int, uint32_t (&bytes)[2]) {
  bytes[0] = (word << 4) & 0xf0f0f0f0u;
  bytes[1] = word & 0xf0f0f0f0u;
}

// A lane's channel in a group.
struct GroupChannel80 {
  float scale = 1.f;
  int32_t w_sum = 0;
};

template <class T>
struct GroupsBlock80 {
  // An accumulator that starts with the bits of 1.5 * 2^19, whose unit in the last place is 1 / 16, is 1.5 * 2^19 + the
  // sum when read as a float, as long as the sum (16 times it in the accumulator) stays within 2^18: a conversion is
  // one exact subtraction. 256 codes are at most 256 * 128 * 8.
  static constexpr int32_t kRealCodes = 256;
  static constexpr float kRealStart = 786432.f;

  const GroupsOperands80& o;
  const EpilogueParams& p;
  const uint32_t shared;
  int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t g = lane / 4, t = lane % 4;
  int32_t m0, n0;                        // of the warp: first token, first channel
  int32_t row_x, row_w, rows_x, rows_w;  // of the tile: first ones that this thread copies; rows inside of M, N
  int32_t rest_x, rest_w;                // codes from its piece of the next stage to the end of K
  const uint8_t *next_x, *next_w;
  uint32_t copy_x, copy_w, read_x, read_w;    // in buffer 0
  uint32_t copy_buffer = 0, read_buffer = 0;  // of the stage that is copied next, of the stage that is read
  uint32_t turn_x = 32 * (g % 4), turn_w = 16 * (lane / 2 % 4);
  int32_t start;                          // of every accumulator
  float zero_point[T::kRows][2];          // of this lane's tokens
  int32_t acc[T::kRows][T::kColumns][4];  // 16 times the sums of the current group
  float sum[T::kRows][T::kColumns][4];

  static __device__ __forceinline__ void turn(uint32_t& buffer) {
    buffer += T::kStageBytes;
    if (buffer == T::kSharedBytes) buffer = 0;
  }

  // The tile of this block and the addresses of its threads.
  __device__ __forceinline__ void start_addresses() {
    int32_t m, n;
    tile_of_block80<T::kTokens, T::kChannels>(o.tiles_m, o.tiles_n, m, n);
    start_addresses_at(m, n);
  }

  // The same for the tile whose first token and channel are these.
  __device__ __forceinline__ void start_addresses_at(int32_t m, int32_t n) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    m0 = m, n0 = n;
    const int32_t piece_x = thread % T::kXPieces, piece_w = thread % T::kWPieces;
    row_x = thread / T::kXPieces, row_w = thread / T::kWPieces;
    rows_x = p.m - m0, rows_w = p.n - n0;
    rest_x = o.k - 16 * piece_x, rest_w = o.k - 32 * piece_w;
    next_x = o.x + (m0 + row_x) * o.ldx_bytes + 16 * piece_x;
    next_w = o.w + (n0 + row_w) * o.ldw_bytes + 16 * piece_w;
    copy_x = shared + row_x * T::kXPitch + 16 * (piece_x ^ (2 * (row_x % 4)));
    copy_w = shared + T::kXBytes + row_w * T::kWPitch + 16 * (piece_w ^ (row_w / 2 % 4));
    const int32_t row = warp / T::kWarpsN * T::kWarpTokens, column = warp % T::kWarpsN * 8 * T::kColumns;
    read_x = shared + (row + g) * T::kXPitch + 8 * t;
    read_w = shared + T::kXBytes + (column + lane) * T::kWPitch;
    m0 += row, n0 += column;
  }

  __device__ __forceinline__ void begin() {
    start = o.group_codes <= kRealCodes ? __float_as_int(kRealStart) : 0;
#pragma unroll
    for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) {
      acc[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = start;
      sum[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      const int64_t m = m0 + 8 * i + g;
      const bool there = o.x_zero_point != nullptr && m < p.m;
      zero_point[i / 2][i % 2] = there ? __int2float_rn(__ldg(o.x_zero_point + m * p.x_zero_point_step)) : 0.f;
    }
  }

  // Starts the copies of the next stage. Rows beyond M and N become zeros, so that every accumulator is defined.
  __device__ __forceinline__ void fetch() {
    const uint8_t *x = next_x, *w = next_w;
#pragma unroll
    for (int i = 0; i * T::kXRows < T::kTokens; ++i) {
      const int32_t row = row_x + i * T::kXRows;
      if (T::kTokens % T::kXRows == 0 || row < T::kTokens)
        copy_async(copy_x + copy_buffer + i * T::kXRows * T::kXPitch, x, rest_x > 0 && row < rows_x);
      advance(x, T::kXRows * o.ldx_bytes);
    }
#pragma unroll
    for (int i = 0; i * T::kWRows < T::kChannels; ++i) {
      const int32_t row = row_w + i * T::kWRows;
      if (T::kChannels % T::kWRows == 0 || row < T::kChannels)
        copy_async(copy_w + copy_buffer + i * T::kWRows * T::kWPitch, w, rest_w > 0 && row < rows_w);
      advance(w, T::kWRows * o.ldw_bytes);
    }
    commit_copies();
    next_x += T::kXPitch, next_w += T::kWPitch;
    rest_x -= T::kXPitch, rest_w -= T::kXPitch;
    turn(copy_buffer);
  }

  // To the next stage: it has arrived, and all threads have read the one before, whose buffer is free to be filled.
  __device__ __forceinline__ void enter_stage() {
    wait_for_copies<T::kStages - 2>();
    __syncthreads();
    fetch();
  }

  __device__ __forceinline__ void read(GroupsCodes80<T>& codes, int32_t step) const {
    const uint32_t x = read_x + read_buffer + ((32 * step) ^ turn_x);
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(codes.x[i / 2][i % 2][0]), "=r"(codes.x[i / 2][i % 2][1])
                   : "r"(x + 8 * i * T::kXPitch)
                   : "memory");
    }
    static_assert(T::kColumns == 4, "one instruction reads a row of 16 bytes for every lane");
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes.w[0]), "=r"(codes.w[1]), "=r"(codes.w[2]), "=r"(codes.w[3])
                 : "r"(read_w + read_buffer + ((16 * step) ^ turn_w))
                 : "memory");
  }

  // The codes behind those of `step`, which may be the next stage's; beyond K there are zeros.
  __device__ __forceinline__ void read_next(GroupsCodes80<T>& codes, int32_t& step) {
    if (++step == T::kSteps) {
      step = 0;
      turn(read_buffer);
      enter_stage();
    }
    read(codes, step);
  }

  // acc += x . w over 32 codes. widen(word, channel / 8, two words): a word of weights as bytes, codes of even k first;
  // `meanwhile` asks for the next ones when these are no longer needed.
  template <class Widen, class Meanwhile>
  __device__ __forceinline__ void multiply(const GroupsCodes80<T>& codes, Widen widen, Meanwhile meanwhile) {
    uint32_t a[T::kRows][4], b[T::kColumns][2];
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      const uint32_t (&word)[2] = codes.x[i / 2][i % 2];
      a[i / 2][i % 2] = __byte_perm(word[0], word[1], 0x6420);
      a[i / 2][2 + i % 2] = __byte_perm(word[0], word[1], 0x7531);
    }
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) widen(codes.w[j], j, b[j]);
    meanwhile();
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j)
        mma(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j][0], b[j][1], int8_t{});
    }
  }

  // Lane i has channel i of the warp; beyond N and the last group nothing is read.
  __device__ __forceinline__ GroupChannel80 load_channel_of(int32_t group) const {
    GroupChannel80 c;
    if (n0 + lane >= p.n || group >= o.groups) return c;
    const int64_t at = static_cast<int64_t>(n0 + lane) * o.groups + group;
    if (o.w_scale) c.scale = __ldg(o.w_scale + at);
    if (o.x_zero_point) c.w_sum = __ldg(o.w_sum + at);
    return c;
  }

  // sum += value_of(accumulator, token, w_sum) * scale, and the accumulators start again.
  template <class ValueOf>
  __device__ __forceinline__ void add_scaled(const GroupChannel80& own, bool corrects, ValueOf value_of) {
#pragma unroll
    for (int i = 0; i < 2 * T::kColumns; ++i) {
      const int32_t source = 8 * (i / 2) + 2 * t + i % 2;
      const float scale = __shfl_sync(0xffffffffu, own.scale, source);
      const int32_t w_sum = corrects ? __shfl_sync(0xffffffffu, own.w_sum, source) : 0;
#pragma unroll
      for (int r = 0; r < 2 * T::kRows; ++r) {
        const int at = 2 * (r % 2) + i % 2;
        int32_t& product = acc[r / 2][i / 2][at];
        float& total = sum[r / 2][i / 2][at];
        total = fadd(total, fmul(value_of(product, zero_point[r / 2][r % 2], w_sum), scale));
        product = start;
      }
    }
  }

  // A group is complete.
  __device__ __forceinline__ void close_group(const GroupChannel80& own) {
    const auto real = [](int32_t product) { return fsub(__int_as_float(product), kRealStart); };
    if (start != 0 && !o.x_zero_point) {
      add_scaled(own, false, [&](int32_t product, float, int32_t) { return real(product); });
    } else if (start != 0) {
      // Of three whole numbers: one rounding, as converting the corrected sum would round.
      add_scaled(own, true, [&](int32_t product, float zero_point, int32_t w_sum) {
        return ffma(-zero_point, __int2float_rn(w_sum), real(product));
      });
    } else {
      add_scaled(own, true, [](int32_t product, float zero_point, int32_t w_sum) {
        return real_of(corrected(product >> 4, __float2int_rn(zero_point), w_sum));
      });
    }
  }
};

// The tile of a block that has its addresses.
template <class T>
__device__ __forceinline__ void multiply_groups80(GroupsBlock80<T>& block) {
  const GroupsOperands80& o = block.o;
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) block.fetch();
  block.begin();
  GroupChannel80 channel = block.load_channel_of(0);
  int32_t step = 0, group = 0, left = o.group_codes;  // of the stage, of K; codes of the group
  GroupsCodes80<T> codes;
  block.enter_stage();
  block.read(codes, step);
#pragma unroll 1
  for (int32_t k = 0; k < o.k; k += T::kStepCodes) {
    block.multiply(codes, widened80, [&] { block.read_next(codes, step); });
    left -= T::kStepCodes;
    if (left == 0) {
      block.close_group(channel);
      channel = block.load_channel_of(++group);
      left = o.group_codes;
    }
  }
  wait_for_copies<0>();
  store_warp80(block.sum, block.p, block.m0, block.n0);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_groups80_kernel(const GroupsOperands80 o, const EpilogueParams p) {
  extern __shared__ __align__(128) uint8_t groups80_shared[];
  GroupsBlock80<T> block{o, p, shared_address(groups80_shared)};
  block.start_addresses();
  multiply_groups80(block);
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages>
struct GemmSm80W4Groups : NoWorkspace {
  using Traits = GroupsTraits80<kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages>;

  static GroupsOperands80 operands(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    GroupsOperands80 o{};
    o.x = static_cast<const uint8_t*>(call.operands.x);
    o.w = static_cast<const uint8_t*>(call.operands.w);
    o.ldx_bytes = p.ldx;
    o.ldw_bytes = p.ldw / 2;
    o.w_scale = call.operands.w_scale;
    o.w_sum = call.operands.w_sum;
    o.x_zero_point = p.has_zero_point ? call.operands.x_zero_point : nullptr;
    o.k = static_cast<int32_t>(p.k);
    o.group_codes = static_cast<int32_t>(p.group_size);
    o.groups = o.k / o.group_codes;
    o.tiles_m = static_cast<int32_t>((p.m + kTileM - 1) / kTileM);
    o.tiles_n = static_cast<int32_t>((p.n + kTileN - 1) / kTileN);
    return o;
  }

  static EpilogueParams epilogue(const GemmCall& call) {
    EpilogueParams epilogue = epilogue_params(call);  // of the scaled sum
    epilogue.w_scale = nullptr;
    epilogue.x_zero_point = nullptr;
    epilogue.plain = plain_out(epilogue, call.problem.out_align);
    return epilogue;
  }

  static void run(const GemmCall& call) {
    const GroupsOperands80 o = operands(call);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(o.tiles_m) * static_cast<unsigned>(o.tiles_n));
    shape.block = dim3(Traits::kThreads);
    shape.shared_bytes = Traits::kSharedBytes;
    launch<gemm_groups80_kernel<Traits>>(call.name, shape, call.context, o, epilogue(call));
  }
};

}  // namespace pyquant::cuda

// GEMM for mma.sync of int4 weights in the layout blocked128 (core/blocked128.h), 8-bit activations: a lane's 16 bytes
// of weights are operands of mma.sync as they lie, so that a register of them costs one operation and a shift for two,
// and x needs no other order than its own.
//   partition: a block owns tile_m x tile_n outputs, a warp 32 or 64 channels of all or some of its tokens. K comes by
//   cp.async through `Stages` shared buffers of 128 codes, weights as they lie in memory; 32 codes of x and 64 of w are
//   read from shared memory while those before them are multiplied. Pieces of 16 bytes of neighbouring rows of x change
//   places there, so that no banks collide. Schedule `splitk` divides K over blocks (plan/split_k.h); the last one to
//   draw a ticket adds up, as in splitk80.cuh.
//   The accumulators hold 16 times the sum, which the channels' scales or a shift take back.
//   limits: rows of x on 16-byte boundaries, K a multiple of 16. Any M, N, output and residual.
#pragma once
#include "core/blocked128.h"
#include "cuda/gemm/decode_math.cuh"
#include "cuda/gemm/decode_move.cuh"
#include "cuda/gemm/splitk80.cuh"
#include "cuda/gemm/tiles80.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

// Passed by value to kernels.
struct BlockedOperands80 {
  const uint8_t *x, *w;
  int64_t ldx_bytes;
  int32_t k, share_codes;  // share_codes: of K, of a block but the last
  int32_t tiles_m, tiles_n;
  int32_t* workspace;
  uint32_t sixteen;  // 16: what the compiler does not know it multiplies by, beside the unit that has all other work
};

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages_>
struct BlockedTraits80 {
  static constexpr int kTokens = kTileM, kChannels = kTileN, kWarpTokens = kWarpM, kStages = kStages_;
  static constexpr int kWarpsN = kTileN / kWarpN, kThreads = 32 * (kTileM / kWarpM) * kWarpsN;
  static constexpr int kRows = kWarpM / 16, kWide = kWarpN / 32;  // 16 tokens, 32 channels of a warp
  static constexpr int kSums = 16 * kRows * kWide;                // of a thread
  // Of 64 sums and less a thread has half of the registers.
  static constexpr int kResident = (kSums > 64 ? 256 : 512) / kThreads;
  static constexpr int kStepCodes = kTileK, kSteps = kTileK / 32;  // of a stage; of 32 codes
  static constexpr int kXPitch = kTileK;                           // bytes of a row in shared memory
  static constexpr int kXBytes = kTileM * kXPitch, kWBytes = kTileN * kTileK / 2, kStageBytes = kXBytes + kWBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;  // plan/accept.cpp counts so
  // 16-byte copies: neighbouring threads take neighbouring pieces of a row of x, then the next rows.
  static constexpr int kXPieces = kXPitch / 16, kXRows = kThreads / kXPieces;
  static constexpr int kXCopies = kTileM / kXRows, kWCopy = 16 * kThreads;
  static_assert(kTileK == kBlocked128Side && kWarpK == kTileK && (kWarpN == 32 || kWarpN == 64));
  static_assert(kTileN == 64 || kTileN == 128, "a tile lies inside of a row of blocks");
  static_assert(kTileM % kWarpM == 0 && kTileN % kWarpN == 0 && kWarpM % 16 == 0 && kStages >= 3);
  static_assert(kXRows % 8 == 0, "rows that a thread copies have their pieces in the same places");
  static_assert(kTileM % kXRows == 0 && kWBytes % kWCopy == 0);
};

template <class T>
struct BlockedBlock80 {
  const BlockedOperands80& o;
  const EpilogueParams& p;
  const uint32_t shared;
  int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t m0, n0;          // of the warp: first token, first channel
  int32_t rest_x, rest_w;  // codes from its piece of the next stage to the end of this block's K
  const uint8_t *next_x[T::kXCopies], *next_w;
  uint32_t copy_x, copy_w, read_x, read_w;    // in buffer 0
  uint32_t copy_buffer = 0, read_buffer = 0;  // of the stage that is copied next, of the stage that is read
  uint32_t turn_x;
  int32_t acc[T::kWide][T::kRows][4][4];  // 16 times the sums
  uint32_t x[2][T::kRows][4];             // 32 codes, those that are multiplied and the next
  uint4 w[2][2 * T::kWide];               // 64 codes of 16 channels each, likewise

  static __device__ __forceinline__ void turn(uint32_t& buffer) {
    buffer += T::kStageBytes;
    if (buffer == T::kSharedBytes) buffer = 0;
  }

  // The tile of this block and its share of K.
  __device__ __forceinline__ void start() {
    int32_t m, n;
    tile_of_block80<T::kTokens, T::kChannels>(o.tiles_m, o.tiles_n, m, n);
    start_at(m, n, static_cast<int32_t>(blockIdx.z) * o.share_codes);
  }

  // The tile whose first token and channel are these, from code `first` on.
  __device__ __forceinline__ void start_at(int32_t m, int32_t n, int32_t first) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x), piece = thread % T::kXPieces;
    rest_w = min(o.k - first, o.share_codes);
    rest_x = rest_w - 16 * piece;
    // Rows beyond M are the last one again: their sums are nobody's.
    const int32_t row_x = thread / T::kXPieces;
#pragma unroll
    for (int i = 0; i < T::kXCopies; ++i)
      next_x[i] = o.x + min(m + row_x + i * T::kXRows, p.m - 1) * o.ldx_bytes + first + 16 * piece;
    const int64_t blocks = (o.k + kBlocked128Side - 1) / kBlocked128Side;
    next_w = o.w + (n / kBlocked128Side * blocks + first / kBlocked128Side) * kBlocked128BlockBytes +
             n % kBlocked128Side * 64 + 16 * thread;
    copy_x = shared + row_x * T::kXPitch + 16 * (piece ^ row_x % 8);
    copy_w = shared + T::kXBytes + 16 * thread;
    const int32_t row = warp / T::kWarpsN * T::kWarpTokens, column = warp % T::kWarpsN * 32 * T::kWide;
    read_x = shared + (row + lane % 16) * T::kXPitch;
    turn_x = 16 * (lane / 16 ^ lane % 8);
    read_w = shared + T::kXBytes + column / 64 * 4096 + column % 64 / 16 * 512 + 16 * lane;
    place(m, n);
#pragma unroll
    for (int i = 0; i < T::kSums; ++i) acc[i / 16 / T::kRows][i / 16 % T::kRows][i / 4 % 4][i % 4] = 0;
  }

  // What the warp stores, of the tile whose first token and channel are these.
  __device__ __forceinline__ void place(int32_t m, int32_t n) {
    m0 = m + warp / T::kWarpsN * T::kWarpTokens;
    n0 = n + warp % T::kWarpsN * 32 * T::kWide;
  }

  // Starts the copies of the next stage. What lies beyond K becomes zeros.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < T::kXCopies; ++i) {
      copy_async(copy_x + copy_buffer + i * T::kXRows * T::kXPitch, next_x[i], rest_x > 0);
      next_x[i] += T::kStepCodes;
    }
#pragma unroll
    for (int i = 0; i < T::kWBytes; i += T::kWCopy) copy_async(copy_w + copy_buffer + i, next_w + i, rest_w > 0);
    commit_copies();
    next_w += kBlocked128BlockBytes;
    rest_x -= T::kStepCodes, rest_w -= T::kStepCodes;
    turn(copy_buffer);
  }

  // To the next stage: it has arrived, and all threads have read the one before, whose buffer is free to be filled.
  __device__ __forceinline__ void enter_stage() {
    wait_for_copies<T::kStages - 2>();
    __syncthreads();
    fetch();
  }

  __device__ __forceinline__ void read_x_of(int step) {
    const uint32_t from = read_x + read_buffer + ((32 * step) ^ turn_x);
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      uint32_t (&to)[4] = x[step % 2][i];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(from + 16 * i * T::kXPitch)
                   : "memory");
    }
  }
  __device__ __forceinline__ void read_w_of(int half) {
#pragma unroll
    for (int j = 0; j < 2 * T::kWide; ++j) w[half][j] = load_shared(read_w + read_buffer + 2048 * half + 512 * j);
  }

  // acc += x . w over step `step` of a stage.
  __device__ __forceinline__ void multiply(int step) {
#pragma unroll
    for (int j = 0; j < 2 * T::kWide; ++j) {
      uint32_t low[2], high[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(w[step / 2][j], 2 * (step % 2) + i);
        low[i] = word * o.sixteen & 0xf0f0f0f0u;
        high[i] = word & 0xf0f0f0f0u;
      }
#pragma unroll
      for (int i = 0; i < T::kRows; ++i) {
        const uint32_t (&a)[4] = x[step % 2][i];
        int32_t (&sums)[4][4] = acc[j / 2][i];
        mma(sums[j % 2 * 2], a[0], a[1], a[2], a[3], low[0], low[1], int8_t{});
        mma(sums[j % 2 * 2 + 1], a[0], a[1], a[2], a[3], high[0], high[1], int8_t{});
      }
    }
  }

  // The product of this block's K.
  __device__ __forceinline__ void multiply_all() {
    int32_t left = rest_w;
#pragma unroll
    for (int s = 0; s < T::kStages - 1; ++s) fetch();
    enter_stage();
    read_x_of(0);
    read_w_of(0);
#pragma unroll 1
    for (; left > 0; left -= T::kStepCodes) {
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {
        if (step + 1 == T::kSteps) {
          turn(read_buffer);
          enter_stage();
        }
        read_x_of((step + 1) % T::kSteps);
        if (step % 2 == 1) read_w_of((step / 2 + 1) % 2);
        multiply(step);
      }
    }
    wait_for_copies<0>();
  }

  __device__ __forceinline__ void store() {
    const auto sum_of = [&](int r, int j, int i) -> auto& { return acc[j / 4][r / 2][j % 4][2 * (r % 2) + i]; };
    if (p.plain != PlainOut::none && n0 + 32 * T::kWide <= p.n &&
        store_plain80<2 * T::kRows, T::kWide, 4>(p, m0, n0, sum_of))
      return;
#pragma unroll 1
    for (int wide = 0; wide < T::kWide; ++wide) {
#pragma unroll
      for (int i = 0; i < 16 * T::kRows; ++i) {
        int32_t& sum = acc[0][i / 16][i / 4 % 4][i % 4];
        sum >>= 4;  // exact: the low bits are 0
      }
      store_rows80(acc[0], p, m0, n0 + 32 * wide);
      if constexpr (T::kWide > 1) {
#pragma unroll
        for (int i = 0; i < 16 * T::kRows; ++i) acc[0][i / 16][i / 4 % 4][i % 4] = acc[1][i / 16][i / 4 % 4][i % 4];
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_blocked80_kernel(const BlockedOperands80 o, const EpilogueParams p) {
  extern __shared__ __align__(128) uint8_t blocked80_shared[];
  BlockedBlock80<T> block{o, p, shared_address(blocked80_shared)};
  block.start();
  block.multiply_all();
  if (gridDim.z > 1 && !add_shares80<T::kSums, T::kThreads>(&block.acc[0][0][0][0], o.workspace, blockIdx.x, gridDim.x))
    return;
  block.store();
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages>
struct GemmSm80W4Blocked {
  using Traits = BlockedTraits80<kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages>;
  using Shares = SplitK80<kTileM, kTileN, kTileK, Traits::kSums, Traits::kThreads>;

  static Workspace workspace(const GemmCall& call) { return Shares(call).workspace(); }

  // K undivided.
  static BlockedOperands80 operands(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    BlockedOperands80 o{};
    o.x = static_cast<const uint8_t*>(call.operands.x);
    o.w = static_cast<const uint8_t*>(call.operands.w);
    o.ldx_bytes = p.ldx;
    o.k = static_cast<int32_t>(p.k);
    o.share_codes = o.k;
    o.tiles_m = static_cast<int32_t>(ceil_div(p.m, kTileM));
    o.tiles_n = static_cast<int32_t>(ceil_div(p.n, kTileN));
    o.sixteen = 16;
    o.workspace = static_cast<int32_t*>(call.operands.workspace);
    return o;
  }

  static void run(const GemmCall& call) {
    const Shares shares(call);
    BlockedOperands80 o = operands(call);
    o.share_codes = static_cast<int32_t>(shares.codes);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(shares.tiles), 1, static_cast<unsigned>(shares.splits));
    shape.block = dim3(Traits::kThreads);
    shape.shared_bytes = Traits::kSharedBytes;
    launch<gemm_blocked80_kernel<Traits>>(call.name, shape, call.context, o, epilogue_params(call));
  }
};

}  // namespace pyquant::cuda

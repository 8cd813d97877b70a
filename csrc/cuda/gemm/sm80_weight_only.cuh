// GEMM for mma.sync of int4 or int8 weights as in a checkpoint and 16-bit activations: more tokens than the decode
// kernels take. Codes less their zero points are exact 16-bit floats; scales are multiplied with float32 sums, one
// group after another, so that weights are never rounded (docs/numerics.md 8). Where tiles are few, K is divided over
// blocks (csrc/plan/split_k.h), and the block that arrives last adds their sums in ascending order of K.
//   partition: a block owns tile_m x tile_n outputs, a warp 32 channels of all or some of its tokens. K comes by
//   cp.async through `Stages` shared buffers of 64 codes and is multiplied 32 codes at a time; the next 32 are read
//   from shared memory meanwhile.
//   codes: a lane takes 8 codes of each 32 of both operands, in any order of k: its words of weights become fragments
//   without a shuffle (decode_math.cuh). 16-byte pieces of neighbouring rows change places in shared memory, so that no
//   banks collide.
//   The experts of a mixture take the same block for a tile, whose rows of x lie where a table says
//   (sm80_weight_only_experts.cuh).
//   limits: rows of x and w on 16-byte boundaries, K whole pieces of 16 bytes of weights, group sizes multiples of 32.
//   Any M, N, output and residual.
#pragma once
#include "cuda/gemm/decode_math.cuh"
#include "cuda/gemm/decode_move.cuh"
#include "cuda/gemm/tiles80.cuh"
#include "cuda/launch.h"
#include "plan/split_k.h"

namespace pyquant::cuda {

// Passed by value to kernels.
struct WeightOnlyOperands80 {
  const uint8_t *x, *w;
  int64_t ldx_bytes, ldw_bytes;
  const float* w_scale;         // [n, groups] or null
  const int32_t* w_zero_point;  // likewise
  int32_t k, groups, group_codes;
  int32_t tiles_m, tiles_n;
  int32_t share_codes;    // of K, of a block but the last
  const int64_t* x_rows;  // of traits that choose: which row of x each row is, or null
  uint32_t* arrivals;     // [tile], cleared before the launch
  float4* partials;       // [tile][share][quarter of a thread's sums][thread]
};

// kChooses_: rows of x lie where WeightOnlyOperands80::x_rows says.
template <class Math_, int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages_,
          bool kChooses_ = false>
struct WeightOnlyTraits80 {
  using Math = Math_;
  static constexpr bool kNibbles = is_packed(Math::kW), kChooses = kChooses_;
  static constexpr int kTokens = kTileM, kChannels = kTileN, kWarpTokens = kWarpM, kStages = kStages_;
  static constexpr int kWarpsN = kTileN / kWarpN, kThreads = 32 * (kTileM / kWarpM) * kWarpsN;
  static constexpr int kRows = kWarpM / 16, kColumns = kWarpN / 8;  // products of a warp: 16 tokens x 8 channels
  // Tall warps have up to 255 registers a thread, others half of that.
  static constexpr int kResident = kThreads < 256 ? (kRows > 1 ? 256 : 512) / kThreads : 1;
  static constexpr int kStepCodes = kWarpK, kSteps = kTileK / kWarpK;  // of a stage
  static constexpr int kXPitch = 2 * kTileK,
                       kWPitch = kTileK * bits_of(Math::kW) / 8;  // bytes of a row in shared memory
  static constexpr int kXBytes = kTileM * kXPitch, kStageBytes = kXBytes + kTileN * kWPitch;
  static constexpr int kSharedBytes = kStages * kStageBytes;  // plan/accept.cpp counts so
  // 16-byte copies: neighbouring threads take neighbouring pieces of a row, then the next rows.
  static constexpr int kXPieces = kXPitch / 16, kWPieces = kWPitch / 16;
  static constexpr int kXRows = kThreads / kXPieces, kWRows = kThreads / kWPieces;
  static constexpr int kXCopies = (kTileM - 1) / kXRows + 1;  // of a thread
  static_assert(kTileK == 64 && kWarpK == 32 && kWarpN == 32, "the places of codes in shared memory follow from these");
  static_assert(kTileM % kWarpM == 0 && kTileN % kWarpN == 0 && kWarpM % 16 == 0 && kStages >= 2);
  static_assert(kXRows % 2 == 0 && kWRows % 8 == 0, "rows that a thread copies have their pieces in the same places");
};

// 32 codes of K as they lie in memory: eight of each of a lane's tokens, and of each of its channels.
template <class T>
struct WeightOnlyCodes80 {
  uint4 x[T::kRows][2];
  uint32_t w[T::kNibbles ? 1 : 2][T::kColumns];
};

// Lane i has channel i of the warp.
struct WeightOnlyChannel80 {
  float scale = 1.f;
  int32_t zero_point = 0;
};

template <class T>
struct WeightOnlyBlock80 {
  using Math = typename T::Math;
  using Offset = typename Math::Offset;

  const WeightOnlyOperands80& o;
  const EpilogueParams& p;
  const uint32_t shared;
  int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t g = lane / 4, t = lane % 4;
  int32_t m0, n0;                        // of the warp: first token, first channel
  int32_t row_x, row_w, rows_x, rows_w;  // of the tile: first ones that this thread copies; rows inside of M, N
  int32_t rest_x, rest_w;                // codes from its piece of the next stage to the end of K
  const uint8_t *next_x, *next_w;
  int32_t chosen[T::kChooses ? T::kXCopies : 1];  // rows of x, behind next_x
  uint32_t copy_x, copy_w, read_x, read_w;        // in buffer 0
  uint32_t copy_buffer = 0, read_buffer = 0;      // of the stage that is copied next, of the stage that is read
  uint32_t turn_x = 64 * (g % 2), turn_w;
  Offset offset[T::kColumns];           // of channels g, 8 + g, 16 + g and 24 + g of the warp
  float acc[T::kRows][T::kColumns][4];  // sums of the current group
  float sum[T::kRows][T::kColumns][4];

  // Keeps the compiler from holding the distances of all rows in registers, twice as many.
  static __device__ __forceinline__ int32_t opaque(int32_t row) {
    asm volatile("" : "+r"(row));
    return row;
  }

  static __device__ __forceinline__ void turn(uint32_t& buffer) {
    buffer += T::kStageBytes;
    if (buffer == T::kSharedBytes) buffer = 0;
  }

  // Where piece `piece` of row `row` of the weights lies in its row. int4: eight rows of one piece fall into all banks;
  // int8: four rows of two pieces.
  static __device__ __forceinline__ int32_t place_of_w(int32_t row, int32_t piece) {
    return piece ^ (T::kNibbles ? row / 4 % 2 : 2 * (row / 2 % 2));
  }

  // At a tile's first token and channel.
  __device__ __forceinline__ void start_addresses_at(int32_t first_token, int32_t first_channel) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    m0 = first_token, n0 = first_channel;
    const int32_t piece_x = thread % T::kXPieces, piece_w = thread % T::kWPieces;
    constexpr int32_t kCodes = 128 / bits_of(Math::kW);  // of a piece of weights
    row_x = thread / T::kXPieces, row_w = thread / T::kWPieces;
    rows_x = p.m - m0, rows_w = p.n - n0;
    rest_x = o.k - 8 * piece_x, rest_w = o.k - kCodes * piece_w;
    if constexpr (T::kChooses) {
      next_x = o.x + 16 * piece_x;
#pragma unroll
      for (int i = 0; i < T::kXCopies; ++i) {
        const int32_t row = row_x + i * T::kXRows;
        chosen[i] = row >= rows_x ? 0 : o.x_rows ? static_cast<int32_t>(__ldg(o.x_rows + m0 + row)) : m0 + row;
      }
    } else {
      next_x = o.x + (m0 + row_x) * o.ldx_bytes + 16 * piece_x;
    }
    next_w = o.w + (n0 + row_w) * o.ldw_bytes + 16 * piece_w;
    copy_x = shared + row_x * T::kXPitch + 16 * (piece_x ^ (4 * (row_x % 2)));
    copy_w = shared + T::kXBytes + row_w * T::kWPitch + 16 * place_of_w(row_w, piece_w);
    const int32_t row = warp / T::kWarpsN * T::kWarpTokens, column = warp % T::kWarpsN * 8 * T::kColumns;
    read_x = shared + (row + g) * T::kXPitch;
    // Rows are asked for by one lane each, or by a quad.
    const int32_t row_read = T::kNibbles ? lane : g;
    read_w = shared + T::kXBytes + (column + row_read) * T::kWPitch + (T::kNibbles ? 0 : 8 * t);
    turn_w = 16 * place_of_w(row_read, 0);
    m0 += row, n0 += column;
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) {
      acc[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0.f;
      sum[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0.f;
    }
  }

  // To this block's share of K.
  __device__ __forceinline__ void skip(int32_t codes) {
    next_x += int64_t{2} * codes, next_w += int64_t{codes} * bits_of(Math::kW) / 8;
    rest_x -= codes, rest_w -= codes;
  }

  // Starts the copies of the next stage. What lies beyond M, N and K becomes zeros: nothing is added, not even of NaN.
  __device__ __forceinline__ void fetch() {
    const uint8_t *x = next_x, *w = next_w;
#pragma unroll
    for (int i = 0; i * T::kXRows < T::kTokens; ++i) {
      const int32_t row = row_x + i * T::kXRows;
      if constexpr (T::kChooses) x = next_x + int64_t{opaque(chosen[i])} * static_cast<int32_t>(o.ldx_bytes);
      if (T::kTokens % T::kXRows == 0 || row < T::kTokens)
        copy_async(copy_x + copy_buffer + i * T::kXRows * T::kXPitch, x, rest_x > 0 && row < rows_x);
      if constexpr (!T::kChooses) advance(x, T::kXRows * o.ldx_bytes);
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
    rest_x -= T::kXPitch / 2, rest_w -= T::kXPitch / 2;
    turn(copy_buffer);
  }

  // To the next stage: it has arrived, and all threads have read the one before, whose buffer is free to be filled.
  __device__ __forceinline__ void enter_stage() {
    wait_for_copies<T::kStages - 2>();
    __syncthreads();
    fetch();
  }

  __device__ __forceinline__ void read(WeightOnlyCodes80<T>& codes, int32_t step) const {
    const uint32_t x = read_x + read_buffer + ((64 * step + 16 * t) ^ turn_x);
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) codes.x[i / 2][i % 2] = load_shared(x + 8 * i * T::kXPitch);
    const uint32_t w = read_w + read_buffer + ((T::kWPitch / T::kSteps * step) ^ turn_w);
    if constexpr (T::kNibbles) {
      static_assert(T::kColumns == 4, "one instruction reads a row of 16 bytes for every lane");
      uint32_t (&word)[T::kColumns] = codes.w[0];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                   : "r"(w)
                   : "memory");
    } else {
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(codes.w[0][j]), "=r"(codes.w[1][j])
                     : "r"(w + 8 * j * T::kWPitch)
                     : "memory");
      }
    }
  }

  // The codes behind those of `step`, which may be the next stage's; beyond K there are zeros.
  __device__ __forceinline__ void read_next(WeightOnlyCodes80<T>& codes, int32_t& step) {
    if (++step == T::kSteps) {
      step = 0;
      turn(read_buffer);
      enter_stage();
    }
    read(codes, step);
  }

  // acc += x . w over 32 codes; the next ones are asked for when these are no longer needed.
  __device__ __forceinline__ void multiply(WeightOnlyCodes80<T>& codes, int32_t& step) {
    uint32_t a[T::kRows][2][4], b[T::kColumns][4];
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) Math::activations(codes.x[i / 2][i % 2], a[i / 2][i % 2]);
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) {
      const uint4 words = make_uint4(codes.w[0][j], codes.w[T::kNibbles ? 0 : 1][j], 0, 0);
      Math::weights(words, 0, offset[j], b[j]);
    }
    read_next(codes, step);
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
#pragma unroll
      for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
        for (int j = 0; j < T::kColumns; ++j)
          mma(acc[i][j], a[i][0][h], a[i][1][h], a[i][0][h + 1], a[i][1][h + 1], b[j][h], b[j][h + 1],
              typename Math::X{});
      }
    }
  }

  // Beyond N and the last group nothing is read.
  __device__ __forceinline__ WeightOnlyChannel80 load_channel_of(int32_t group) const {
    WeightOnlyChannel80 c;
    if (n0 + lane >= p.n || group >= o.groups) return c;
    const int64_t at = static_cast<int64_t>(n0 + lane) * o.groups + group;
    if (o.w_scale) c.scale = __ldg(o.w_scale + at);
    if (o.w_zero_point) c.zero_point = __ldg(o.w_zero_point + at);
    return c;
  }

  __device__ __forceinline__ void take_offsets(const WeightOnlyChannel80& own) {
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j)
      offset[j] = Math::offset(o.w_zero_point ? __shfl_sync(0xffffffffu, own.zero_point, 8 * j + g) : 0);
  }

  // A group is complete: sum += acc * scale, and the accumulators start again.
  __device__ __forceinline__ void close_group(const WeightOnlyChannel80& own) {
#pragma unroll
    for (int i = 0; i < 2 * T::kColumns; ++i) {
      const float scale = __shfl_sync(0xffffffffu, own.scale, 8 * (i / 2) + 2 * t + i % 2);
#pragma unroll
      for (int r = 0; r < 2 * T::kRows; ++r) {
        float& product = acc[r / 2][i / 2][2 * (r % 2) + i % 2];
        float& total = sum[r / 2][i / 2][2 * (r % 2) + i % 2];
        total = ffma(product, scale, total);
        product = 0.f;
      }
    }
  }
};

// Lays the sums of this block's share down; of the block that comes last, true, and the sums of all.
template <class T>
__device__ __forceinline__ bool add_shares(WeightOnlyBlock80<T>& block) {
  constexpr int kQuarters = T::kRows * T::kColumns;
  const int64_t shares = gridDim.z;
  float4* tile = block.o.partials + blockIdx.x * shares * kQuarters * T::kThreads + threadIdx.x;
  float4* mine = tile + blockIdx.z * kQuarters * T::kThreads;
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const float (&s)[4] = block.sum[i / T::kColumns][i % T::kColumns];
    __stcg(mine + i * T::kThreads, make_float4(s[0], s[1], s[2], s[3]));
  }
  __threadfence();  // this thread's sums before the block's arrival
  __syncthreads();
  const bool last = threadIdx.x == 0 && atomicAdd(block.o.arrivals + blockIdx.x, 1u) == gridDim.z - 1;
  if (!__syncthreads_or(last)) return false;
  __threadfence();  // the others' arrivals before their sums
#pragma unroll 1
  for (int64_t share = 0; share < shares; ++share) {
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      float (&s)[4] = block.sum[i / T::kColumns][i % T::kColumns];
      const float4 v = __ldcg(tile + (share * kQuarters + i) * T::kThreads);
      const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) s[c] = share == 0 ? part[c] : fadd(s[c], part[c]);
    }
  }
  return true;
}

// The sums of a block over codes first to end of K, where its addresses are.
template <class T>
__device__ __forceinline__ void multiply_weight_only80(WeightOnlyBlock80<T>& block, int32_t first, int32_t end) {
  const WeightOnlyOperands80& o = block.o;
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) block.fetch();
  block.begin();
  int32_t step = 0, group = first / o.group_codes;     // of the stage; of K
  int32_t left = o.group_codes * (group + 1) - first;  // codes of the group
  WeightOnlyChannel80 channel = block.load_channel_of(group), next = block.load_channel_of(++group);
  block.take_offsets(channel);
  WeightOnlyCodes80<T> codes;
  block.enter_stage();
  block.read(codes, step);
#pragma unroll 1
  for (int32_t k = first; k < end; k += T::kStepCodes) {
    block.multiply(codes, step);
    left -= T::kStepCodes;
    if (left == 0 || k + T::kStepCodes >= end) {  // the end of a share may be the middle of a group
      block.close_group(channel);
      channel = next;
      block.take_offsets(channel);
      next = block.load_channel_of(++group);
      left = o.group_codes;
    }
  }
  wait_for_copies<0>();
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_weight_only80_kernel(const WeightOnlyOperands80 o, const EpilogueParams p) {
  extern __shared__ __align__(128) uint8_t weight_only80_shared[];
  WeightOnlyBlock80<T> block{o, p, shared_address(weight_only80_shared)};
  int32_t m0, n0;
  tile_of_block80<T::kTokens, T::kChannels>(o.tiles_m, o.tiles_n, m0, n0);
  block.start_addresses_at(m0, n0);
  const int32_t first = static_cast<int32_t>(blockIdx.z) * o.share_codes, end = min(o.k, first + o.share_codes);
  block.skip(first);
  multiply_weight_only80(block, first, end);
  if (gridDim.z > 1 && !add_shares(block)) return;
  store_warp80(block.sum, p, block.m0, block.n0);
}

// What blocks read, of the whole K.
template <class Math>
WeightOnlyOperands80 weight_only_operands80(const GemmCall& call) {
  const GemmProblem& p = call.problem;
  WeightOnlyOperands80 o{};
  o.x = static_cast<const uint8_t*>(call.operands.x);
  o.w = static_cast<const uint8_t*>(call.operands.w);
  o.ldx_bytes = 2 * p.ldx;
  o.ldw_bytes = p.ldw * bits_of(Math::kW) / 8;
  o.w_scale = call.operands.w_scale;
  o.w_zero_point = p.has_w_zero_point ? call.operands.w_zero_point : nullptr;
  o.k = static_cast<int32_t>(p.k);
  o.groups = p.group_size == 0 ? 1 : static_cast<int32_t>(p.k / p.group_size);
  o.group_codes = static_cast<int32_t>(p.group_size == 0 ? std::max<int64_t>(p.k + 31, 32) / 32 * 32 : p.group_size);
  return o;
}

// Of the scaled sum.
inline EpilogueParams weight_only_epilogue80(const GemmCall& call) {
  EpilogueParams epilogue = epilogue_params(call);
  epilogue.w_scale = nullptr;
  return epilogue;
}

template <template <class> class Math, int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK,
          int kStages>
struct GemmSm80WeightOnly {
  // How a launch divides K, and what it needs for that.
  struct Shares {
    int64_t tiles, count, codes;

    explicit Shares(const GemmCall& call) {
      const GemmProblem& p = call.problem;
      tiles = ceil_div(p.m, kTileM) * ceil_div(p.n, kTileN);
      count = k_splits(p.m, p.n, p.k, kTileM, kTileN, kTileK, call.device.sm_count);
      codes = ceil_div(ceil_div(p.k, kTileK), count) * kTileK;
    }
    int64_t arrival_bytes() const { return ceil_div(tiles * 4, 256) * 256; }
    Workspace workspace() const {
      if (count == 1) return {};
      return {arrival_bytes() + tiles * count * kTileM * kTileN * 4, 0, arrival_bytes()};
    }
  };

  static Workspace workspace(const GemmCall& call) { return Shares(call).workspace(); }

  template <class Float>
  static void run_as(const GemmCall& call) {
    using Traits = WeightOnlyTraits80<Math<Float>, kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages>;
    const GemmProblem& p = call.problem;
    WeightOnlyOperands80 o = weight_only_operands80<typename Traits::Math>(call);
    const Shares shares(call);
    o.share_codes = static_cast<int32_t>(std::max<int64_t>(shares.codes, 1));
    if (shares.count > 1) {
      o.arrivals = static_cast<uint32_t*>(call.operands.workspace);
      o.partials = reinterpret_cast<float4*>(static_cast<uint8_t*>(call.operands.workspace) + shares.arrival_bytes());
    }
    o.tiles_m = static_cast<int32_t>((p.m + kTileM - 1) / kTileM);
    o.tiles_n = static_cast<int32_t>((p.n + kTileN - 1) / kTileN);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(shares.tiles), 1, static_cast<unsigned>(shares.count));
    shape.block = dim3(Traits::kThreads);
    shape.shared_bytes = Traits::kSharedBytes;
    launch<gemm_weight_only80_kernel<Traits>>(call.name, shape, call.context, o, weight_only_epilogue80(call));
  }

  static void run(const GemmCall& call) {
    call.problem.x == DType::f16 ? run_as<__half>(call) : run_as<__nv_bfloat16>(call);
  }
};

}  // namespace pyquant::cuda

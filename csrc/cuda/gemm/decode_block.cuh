// One block of a decode kernel (decode.cuh): what its warps load, where it lies in shared memory, and the main loop's
// multiplications. Sums of warps and blocks: decode_sums.cuh.
#pragma once
#include <algorithm>

#include "core/decode_split.h"
#include "cuda/gemm/decode_math.cuh"
#include "cuda/gemm/decode_move.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace pyquant::cuda {

// Passed by value to kernels.
struct DecodeOperands {
  const uint8_t *x, *w;
  int64_t ldx_bytes, ldw_bytes;
  const float* w_scale;         // with group scales: [n, groups]
  const int32_t* w_sum;         // likewise, null without a zero point
  const int32_t* w_zero_point;  // [n] or [n, groups], or null
  int32_t k, groups;            // groups: entries of a channel in the arrays above
  int32_t unit_codes;           // what a warp takes at a time: a step, or a scale group larger than a step
  int32_t unit_steps;
  int32_t unit_groups;  // scale groups in a unit: 1, or more that share a step
  int32_t group_codes;  // size of a scale group
  int32_t tiles_m;      // tiles of tokens
  int32_t steps;        // of every warp, those beyond K included
  int32_t ahead;        // codes from a warp's last step of a unit to its next unit
  void* partials;       // [tile][split][token][channel] sums of blocks that share K
  uint32_t* arrivals;   // [tile], cleared before the launch
};

template <class Math_, int kTileN, int kTileM, int kStages_, bool kGrouped_, bool kCluster_>
struct DecodeTraits {
  using Math = Math_;
  using Acc = typename Math::Acc;
  static constexpr bool kGrouped = kGrouped_, kCluster = kCluster_;
  static constexpr bool kOrdered = kGrouped && std::is_same_v<Acc, int32_t>;
  using Sum = std::conditional_t<kOrdered, float, Acc>;  // what blocks and warps add
  // Blocks that a multiprocessor shall hold (csrc/plan/cost.cpp counts on it). Fragments of more than 16 tokens, or of
  // 16 of 16 bits, do not fit into half of its registers.
  static constexpr int kResident = kTileM > 16 || (is_float(Math::kX) && kTileM > 8) ? 1 : 2;
  // Scales take the place of a stage.
  static constexpr int kStages = kGrouped && kResident > 1 ? kStages_ - 1 : kStages_, kWarps = kDecodeWarps,
                       kThreads = 32 * kWarps;
  static constexpr int kChannels = kTileN, kTokens = kTileM, kRows = kTileN / 16, kColumns = kTileM / 8;
  static constexpr int kXBits = bits_of(Math::kX), kWBits = bits_of(Math::kW);
  static constexpr int kStep = 4 * Math::kCodes;                 // codes that a quad takes at a time
  static constexpr int kUnits = Math::kCodes * kXBits / 8 / 16;  // 16-byte units of a token's x per lane
  static constexpr bool kBlocked = Math::kBlocked;               // weights lie as core/blocked128.h says
  // A token's x in shared memory. Blocked weights ask for four separate words: the padding moves tokens to other banks.
  static constexpr int kTokenBytes = 64 * kUnits + (kBlocked ? 16 : 0);
  static constexpr int kSlotBytes = kTokens * kTokenBytes;  // x of one warp and stage
  static constexpr int kStageBytes = kWarps * kSlotBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPitch = kChannels + 4;  // 32 lanes of an accumulator register hit 32 banks
  static constexpr int kSumsBytes = kWarps * kTokens * kPitch * 4;
  static constexpr int kPairs = (kTokens * kChannels / 2 + kThreads - 1) / kThreads;  // outputs of a thread, by twos

  // Where the sum of a token and a channel lies: `which` is a warp, or a scale group of a round.
  static __device__ __forceinline__ int32_t place_of_sum(int32_t which, int32_t token, int32_t column) {
    return (which * kTokens + token) * kPitch + column;
  }

  // Output pair `i` of this thread: token and first channel, within the tile. Beyond the tile: token = kTokens.
  static __device__ __forceinline__ void pair(int i, int32_t& token, int32_t& column) {
    const int32_t index = static_cast<int32_t>(threadIdx.x) + kThreads * i;
    token = index / (kChannels / 2);
    column = 2 * (index % (kChannels / 2));
  }

  static_assert(kBlocked || kGrouped || kRingBytes == decode_ring_bytes(kStages, kTokens, kStep, kXBits));
  static_assert(kTokens <= 16 || (!kOrdered && kSumsBytes <= kRingBytes), "plan/accept.cpp counts the ring alone");

  static int shared_bytes(int unit_groups) {
    return kOrdered ? kRingBytes + unit_groups * kSumsBytes : std::max(kRingBytes, kSumsBytes);
  }
};

// A lane's weights of one step: rows g and g + 8 of every 16 channels, and what belongs to their scale group.
template <class T>
struct DecodeStage {
  uint4 w[T::kRows][2];
  float scale[T::kRows][2];
  int32_t group_code[T::kRows][2];  // w_sum (integers) or w_zero_point (floats)
};

template <class T>
struct DecodeBlock {
  using Math = typename T::Math;
  using Acc = typename T::Acc;
  using Sum = typename T::Sum;

  const DecodeOperands& o;
  const EpilogueParams& p;
  uint8_t* shared;
  int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t g = lane / 4, t = lane % 4;
  // Blocks of the same channels are neighbours, so that the second one finds the weights in L2.
  int32_t m0 = static_cast<int32_t>(blockIdx.x) % o.tiles_m * T::kTokens;
  int32_t n0 = static_cast<int32_t>(blockIdx.x) / o.tiles_m * T::kChannels;
  int32_t x_token = m0 + lane / (4 * T::kUnits), x_at = lane % (4 * T::kUnits);  // what this lane copies
  // The next load: codes from its first one to the end of K (0 beyond), step of the unit, addresses.
  int32_t rest, step = 0;
  int64_t scale_at;  // of channel n0 + g in the arrays of group scales
  const uint8_t *next_w, *next_x;
  uint32_t copy_to, read_from;  // in stage 0 of this warp's ring
  Acc acc[T::kRows][T::kColumns][4];
  float total[T::kRows][T::kColumns][4];  // group scales of floats: scaled sums
  float ordered[T::kPairs][2];            // group scales of integers: the outputs of this thread
  typename Math::Offset offset[T::kRows][2];
  int32_t zero_point[T::kColumns][2];  // of this lane's tokens

  __device__ __forceinline__ int32_t channel(int r, int half) const { return n0 + 16 * r + 8 * half + g; }

  // Of a token of the tile: there is none.
  __device__ __forceinline__ bool beyond(int32_t token) const { return token >= T::kTokens || m0 + token >= p.m; }

  // 16-byte units of a token's activations change places so that eight lanes read all banks.
  static __device__ __forceinline__ int32_t turn_of(int32_t token, int32_t quad_lane) {
    return T::kUnits == 1 ? 0 : T::kUnits == 2 ? token & 1 : (token & 1) + 2 * (quad_lane >> 1);
  }
  static __device__ __forceinline__ int32_t place(int32_t token, int32_t quad_lane, int32_t u) {
    return 16 * ((token * 4 + quad_lane) * T::kUnits + (u ^ turn_of(token, quad_lane)));
  }

  // The addresses of this warp's first loads.
  __device__ __forceinline__ void start_addresses() {
    const int64_t unit = static_cast<int64_t>(blockIdx.z) * T::kWarps + warp;
    const int64_t k = min(unit * o.unit_codes, static_cast<int64_t>(o.k));
    rest = o.k - static_cast<int32_t>(k);
    if constexpr (T::kBlocked) {
      const int64_t blocks = (o.k + 127) / 128;
      next_w = o.w + (n0 / 128 * blocks + k / 128) * 8192 + n0 / 64 % 2 * 4096 + n0 / 16 % 4 * 512 + lane * 16;
    } else {
      next_w = o.w + (n0 + g) * o.ldw_bytes + (k + t * Math::kCodes) * T::kWBits / 8;
    }
    next_x = o.x + x_token * o.ldx_bytes + k * T::kXBits / 8 + 16 * x_at;
    // Lane t of a quad holds codes of one group only: of its own.
    scale_at = static_cast<int64_t>(n0 + g) * o.groups + unit * o.unit_groups;
    if constexpr (!T::kBlocked) scale_at += t * o.unit_groups >> 2;
    const uint32_t ring = shared_address(shared) + warp * T::kSlotBytes;
    if constexpr (T::kBlocked) {
      copy_to = ring + lane / (4 * T::kUnits) * T::kTokenBytes + 16 * x_at;
      read_from = ring + g * T::kTokenBytes + 4 * t;
    } else {
      copy_to = ring + place(lane / (4 * T::kUnits), x_at / T::kUnits, x_at % T::kUnits);
      read_from = ring + place(g, t, 0);
    }
  }

  // Asks L2 for the first weights, before the predecessor in the stream has ended: L2 is coherent, registers are not.
  __device__ __forceinline__ void prefetch() const {
    if ((T::kBlocked ? 0 : t * Math::kCodes) >= rest) return;
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      if (T::kBlocked)
        prefetch_l2(next_w + i / 2 * 512 + i % 2 * 2048);
      else if (channel(i / 2, i % 2) < p.n)
        prefetch_l2(next_w + 8 * i * o.ldw_bytes);
    }
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) {
      acc[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0;
      total[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2 * T::kPairs; ++i) ordered[i / 2][i % 2] = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      const int32_t n = channel(i / 2, i % 2);
      const bool corrected = !T::kGrouped && o.w_zero_point != nullptr && n < p.n;
      offset[i / 2][i % 2] = Math::offset(corrected ? __ldg(o.w_zero_point + n) : 0);
    }
#pragma unroll
    for (int i = 0; i < 2 * T::kColumns; ++i)
      zero_point[i / 2][i % 2] = T::kOrdered ? load_token(p, m0 + 8 * (i / 2) + 2 * t + i % 2).zero_point : 0;
  }

  // Starts the loads of the next step of this warp; past the end of K everything is zero.
  __device__ __forceinline__ void load(DecodeStage<T>& s, int stage) {
    const int32_t codes = T::kGrouped ? min(rest, o.unit_codes - step * T::kStep) : rest;
    // The lane's own codes; of blocked weights every lane has some of each 16, and the second scale of the step if t
    // > 1.
    const int32_t own = T::kBlocked ? t / 2 * 64 : t * Math::kCodes;
    const bool mine = own < codes;
    const uint8_t* w = next_w;
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      if constexpr (T::kBlocked) {
        s.w[i / 2][i % 2] = load_streamed(w + i / 2 * 512 + i % 2 * 2048, rest > 0);
      } else {
        s.w[i / 2][i % 2] = load_streamed(w, mine && channel(i / 2, i % 2) < p.n);
        advance(w, 8 * o.ldw_bytes);
      }
    }
    if constexpr (T::kGrouped) {
      const int32_t* group_codes = T::kOrdered ? o.w_sum : o.w_zero_point;
      const int64_t of_step = scale_at + (T::kBlocked && step * T::kStep + own >= o.group_codes ? 1 : 0);
#pragma unroll
      for (int i = 0; i < 2 * T::kRows; ++i) {
        const bool there = mine && channel(i / 2, i % 2) < p.n;
        const int64_t at = of_step + 8 * i * o.groups;
        s.scale[i / 2][i % 2] = there && o.w_scale != nullptr ? __ldg(o.w_scale + at) : 1.f;
        s.group_code[i / 2][i % 2] = there && group_codes != nullptr ? __ldg(group_codes + at) : 0;
      }
    }
    constexpr int kPerCopy = 128 / T::kXBits, kTokensApart = 8 / T::kUnits;  // codes; tokens that 32 lanes copy
    const bool copied = x_at * kPerCopy < codes;
    const uint8_t* x = next_x;
#pragma unroll
    for (int i = 0; i < T::kTokens / kTokensApart; ++i) {
      copy_async(copy_to + stage * T::kStageBytes + i * kTokensApart * T::kTokenBytes, x,
                 copied && x_token + i * kTokensApart < p.m);
      advance(x, kTokensApart * o.ldx_bytes);
    }
    commit_copies();
    int32_t ahead = o.ahead;
    if constexpr (T::kGrouped) {
      if (++step < o.unit_steps) {
        ahead = T::kStep;
      } else {
        step = 0;
        scale_at += static_cast<int32_t>(gridDim.z) * T::kWarps * o.unit_groups;
      }
    }
    rest = max(rest, ahead) - ahead;
    next_w += T::kBlocked ? static_cast<int64_t>(ahead) * 64 : static_cast<int64_t>(ahead) * T::kWBits / 8;
    next_x += static_cast<int64_t>(ahead) * T::kXBits / 8;
  }

  // acc += weights x activations of unit `u` of a step; lanes that are not in it add nothing.
  __device__ __forceinline__ void multiply(const DecodeStage<T>& s, int stage, int u, bool in) {
    uint32_t b[T::kColumns][4];
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) {
      if constexpr (T::kBlocked) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          b[j][i] = load_shared_word(read_from + stage * T::kStageBytes + 8 * j * T::kTokenBytes + 64 * u + 16 * i);
      } else {
        Math::activations(load_shared((read_from ^ (16 * u)) + stage * T::kStageBytes + 8 * j * T::kTokenBytes), b[j]);
        if constexpr (T::kGrouped) {
#pragma unroll
          for (int i = 0; i < 4; ++i) b[j][i] = in ? b[j][i] : 0;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      uint32_t low[4], high[4];
      if constexpr (T::kBlocked) {
        Math::weights(s.w[r][u], low, high);
      } else if constexpr (T::kGrouped && !T::kOrdered) {
        Math::weights(s.w[r][0], u, Math::offset(s.group_code[r][0]), low);
        Math::weights(s.w[r][1], u, Math::offset(s.group_code[r][1]), high);
      } else {
        Math::weights(s.w[r][0], u, offset[r][0], low);
        Math::weights(s.w[r][1], u, offset[r][1], high);
      }
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j) {
        mma(acc[r][j], low[0], high[0], low[1], high[1], b[j][0], b[j][1], typename Math::X{});
        mma(acc[r][j], low[2], high[2], low[3], high[3], b[j][2], b[j][3], typename Math::X{});
      }
    }
  }

  __device__ __forceinline__ void multiply_step(const DecodeStage<T>& s, int stage) {
#pragma unroll
    for (int u = 0; u < T::kUnits; ++u) multiply(s, stage, u, true);
  }

  // A step of a unit with group scales; `complete`: its last one. Groups that end in it are closed.
  __device__ __forceinline__ void multiply_groups(DecodeStage<T>& s, int stage, bool complete, int32_t& left,
                                                  int32_t& part) {
    if constexpr (T::kBlocked) {
#pragma unroll
      for (int u = 0; u < T::kUnits; ++u) {
        multiply(s, stage, u, true);
        left -= 64;
        if (left == 0) {
          close_group(s, part++, 2 * u);
          left = o.group_codes;
        }
      }
      if (complete) part = 0;
    } else {
      for (int32_t group = 0; group < o.unit_groups; ++group) {
#pragma unroll
        for (int i = 0; i < 2 * T::kRows; ++i) keep_packed(s.w[i / 2][i % 2]);
#pragma unroll
        for (int u = 0; u < T::kUnits; ++u) multiply(s, stage, u, (t * o.unit_groups >> 2) == group);
        if (complete) close_group(s, group, 4 / o.unit_groups * group);
      }
    }
  }

  // The sums of scale group `part` of the unit are complete; lane `quad_lane` of a quad has its scales.
  __device__ __forceinline__ void close_group(const DecodeStage<T>& s, int32_t part, int32_t quad_lane) {
    const int32_t source = (lane & ~3) | quad_lane;
    float* products = reinterpret_cast<float*>(shared + T::kRingBytes);
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      const int r = i / 2, half = i % 2;
      const float scale = __shfl_sync(0xffffffffu, s.scale[r][half], source);
      const int32_t w_sum = T::kOrdered ? __shfl_sync(0xffffffffu, s.group_code[r][half], source) : 0;
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Acc& sum = acc[r][j][2 * half + c];
          if constexpr (T::kOrdered) {
            const int32_t exact = corrected(sum >> Math::kAccShift, zero_point[j][c], w_sum);
            products[T::place_of_sum(warp * o.unit_groups + part, 8 * j + 2 * t + c, 16 * r + 8 * half + g)] =
                fmul(real_of(exact), scale);
          } else {
            total[r][j][2 * half + c] = fmaf(sum, scale, total[r][j][2 * half + c]);
          }
          sum = 0;
        }
      }
    }
  }
};

}  // namespace pyquant::cuda

// One block of a decode kernel (decode.cuh): what its warps load and the main loop's multiplications. Sums of warps and
// blocks: decode_sums.cuh.
#pragma once
#include "cuda/gemm/decode_move.cuh"
#include "cuda/gemm/decode_traits.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace pyquant::cuda {

// A lane's weights of one step: rows g and g + 8 of every 16 channels, and what belongs to their scale group.
template <class T>
struct DecodeStage {
  uint4 w[T::kRows][2] = {};
  float scale[T::kRows][2];
  int32_t group_code[T::kRows][2];  // w_sum (integers) or w_zero_point (floats)
  // Natural weights: of channels g, g + 8, g + 16, g + 24, a byte each; blocked ones: for every 16 channels those of g
  // and g + 8 in both halves of the codes.
  uint32_t step[2];
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
  int32_t depth = warp / T::kSideWarps;  // this warp's part of K
  // The blocks of a cluster finish a part of its outputs each; elsewhere one block finishes all of them.
  DecodeShare share =
      T::kCluster ? DecodeShare{static_cast<int32_t>(gridDim.z), static_cast<int32_t>(blockIdx.z)} : DecodeShare{};
  int32_t g = lane / 4, t = lane % 4;
  // Blocks of the same channels are neighbours, so that the second one finds the weights in L2.
  int32_t m0 = static_cast<int32_t>(blockIdx.x) % o.tiles_m * T::kTokens;
  int32_t n0 = static_cast<int32_t>(blockIdx.x) / o.tiles_m * T::kChannels;
  int32_t side = warp % T::kSideWarps * kDecodeWarpChannels;  // this warp's first channel, within the tile
  // What this thread copies of a step's activations: 16 bytes of this token of the tile and of others, kTokensApart
  // apart.
  int32_t x_token = static_cast<int32_t>(threadIdx.x) % T::kSharers / (4 * T::kUnits);
  int32_t x_at = static_cast<int32_t>(threadIdx.x) % (4 * T::kUnits);
  // The next load: codes from its first one to the end of K (0 beyond), step of the unit, addresses.
  int32_t rest, step = 0;
  int64_t scale_at;  // of channel(0, 0) in the arrays of group scales
  int32_t to_steps;  // bytes from this lane's blocked weights to its steps
  const uint8_t *next_w, *next_x;
  uint32_t copy_to, read_from;  // in stage 0 of the ring of this part of K
  Acc acc[T::kRows][T::kColumns][4];
  float total[T::kRows][T::kColumns][4];  // group scales of floats: scaled sums
  typename Math::Offset offset[T::kRows][2];
  int32_t zero_point[T::kColumns][2];  // of this lane's tokens

  __device__ __forceinline__ int32_t channel(int r, int half) const { return n0 + side + 16 * r + 8 * half + g; }

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
    const int64_t unit = static_cast<int64_t>(blockIdx.z) * T::kDepthWarps + depth;
    const int64_t k = min(unit * o.unit_codes, static_cast<int64_t>(o.k));
    const int32_t n = n0 + side;
    rest = o.k - static_cast<int32_t>(k);
    if constexpr (T::kBlocked) {
      const int64_t blocks = (o.k + 127) / 128;
      next_w = o.w + (n / 128 * blocks + k / 128) * T::kBlockBytes + n / 64 % 2 * 4096 + n / 16 % 4 * 512 + lane * 16;
      to_steps = kBlocked128BlockBytes + n / 64 % 2 * 128 + n / 16 % 4 * 32 + g * 4 -
                 (n / 64 % 2 * 4096 + n / 16 % 4 * 512 + lane * 16);
    } else {
      next_w = o.w + (n + g) * o.ldw_bytes + (k + t * Math::kCodes) * T::kWBits / 8;
    }
    next_x = o.x + (m0 + x_token) * o.ldx_bytes + k * T::kXBits / 8 + 16 * x_at;
    // Where groups share a step, lane t of a quad holds codes of one of them only, its own.
    scale_at = static_cast<int64_t>(n + g) * o.groups + unit * o.unit_groups;
    if constexpr (T::kParts) scale_at += t * o.unit_groups >> 2;
    const uint32_t ring = shared_address(shared) + depth * T::kSlotBytes;
    if constexpr (T::kBlocked) {
      copy_to = ring + x_token * T::kTokenBytes + 16 * x_at;
      read_from = ring + g * T::kTokenBytes + 4 * t;
    } else {
      copy_to = ring + place(x_token, x_at / T::kUnits, x_at % T::kUnits);
      read_from = ring + place(g, t, 0);
    }
  }

  // Codes from step `at` of a unit to this warp's next step.
  __device__ __forceinline__ int32_t ahead_of(int32_t at) const {
    return T::kGrouped && at + 1 < o.unit_steps ? T::kStep : o.ahead;
  }

  // What so many codes, whole steps, are in a row of weights, or in a row of blocks.
  static __device__ __forceinline__ int64_t bytes_ahead(int32_t codes) {
    return T::kBlocked ? static_cast<int64_t>(codes) * (T::kBlockBytes / 128)
                       : static_cast<int64_t>(codes) * T::kWBits / 8;
  }

  // Asks L2 for the weights of the first steps, before the predecessor in the stream has ended: L2 is coherent,
  // registers are not.
  __device__ __forceinline__ void prefetch() const {
    const uint8_t* w = next_w;
    int32_t left = rest, at = 0;
#pragma unroll 1
    for (int s = 0; s < T::kStages && (T::kBlocked ? 0 : t * Math::kCodes) < left; ++s) {
#pragma unroll
      for (int i = 0; i < 2 * T::kRows; ++i) {
        if (T::kBlocked)
          prefetch_l2(w + i / 2 * 512 + i % 2 * 2048);
        else if (channel(i / 2, i % 2) < p.n)
          prefetch_l2(w + 8 * i * o.ldw_bytes);
      }
      const int32_t ahead = ahead_of(at);
      at = at + 1 < o.unit_steps ? at + 1 : 0;
      left = max(left, ahead) - ahead;
      w += bytes_ahead(ahead);
    }
  }

  // The activations of a step have come for every warp that shares them, and none reads those of the step before.
  __device__ __forceinline__ void meet() const {
    if constexpr (T::kSideWarps == 1)
      __syncwarp();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(1 + depth), "n"(T::kSharers) : "memory");
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) {
      acc[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0;
      total[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0.f;
    }
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

  // Starts the loads of the next step of this warp. Past the end of K activations are zero; weights are then those of
  // an earlier step (at first zeros), as of channels beyond N, whose sums nobody reads: clearing them takes as long as
  // loading them.
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
        load_streamed<T::kAhead>(s.w[i / 2][i % 2], w + i / 2 * 512 + i % 2 * 2048, rest > 0);
      } else {
        load_streamed<T::kAhead>(s.w[i / 2][i % 2], w, mine && channel(i / 2, i % 2) < p.n);
        advance(w, 8 * o.ldw_bytes);
      }
    }
    if constexpr (Math::kSteps) load_steps(s, mine);
    if constexpr (T::kGrouped) {
      const int32_t* group_codes = T::kOrdered ? o.w_sum : o.w_zero_point;
      const int64_t of_step = scale_at + (T::kBlocked && step * T::kStep + own >= o.group_codes ? 1 : 0);
#pragma unroll
      for (int i = 0; i < 2 * T::kRows; ++i) {
        // Whole groups: every lane needs the scale, also one beyond the group's codes.
        const bool there = (T::kParts || T::kBlocked ? mine : rest > 0) && channel(i / 2, i % 2) < p.n;
        const int64_t at = of_step + 8 * i * o.groups;
        s.scale[i / 2][i % 2] = there && o.w_scale != nullptr ? __ldg(o.w_scale + at) : 1.f;
        s.group_code[i / 2][i % 2] = there && group_codes != nullptr ? __ldg(group_codes + at) : 0;
      }
    }
    constexpr int kPerCopy = 128 / T::kXBits;  // codes
    const bool copied = x_at * kPerCopy < codes;
    const uint8_t* x = next_x;
#pragma unroll
    for (int i = 0; i < (T::kTokens + T::kTokensApart - 1) / T::kTokensApart; ++i) {
      const int32_t token = x_token + i * T::kTokensApart;
      if (T::kTokensApart <= T::kTokens || token < T::kTokens)  // the same for a whole warp
        copy_async(copy_to + stage * T::kStageBytes + i * T::kTokensApart * T::kTokenBytes, x,
                   copied && m0 + token < p.m);
      advance(x, T::kTokensApart * o.ldx_bytes);
    }
    commit_copies();
    const int32_t ahead = ahead_of(step);
    if constexpr (T::kGrouped) {
      if (++step == o.unit_steps) {
        step = 0;
        scale_at += static_cast<int32_t>(gridDim.z) * T::kDepthWarps * o.unit_groups;
      }
    }
    rest = max(rest, ahead) - ahead;
    next_w += bytes_ahead(ahead);
    next_x += static_cast<int64_t>(ahead) * T::kXBits / 8;
  }

  // The steps of the weights that are loaded; where those are left as they were, these may be anything.
  __device__ __forceinline__ void load_steps(DecodeStage<T>& s, bool mine) const {
    s.step[0] = s.step[1] = 0;
    if constexpr (T::kBlocked) {
#pragma unroll
      for (int r = 0; r < T::kRows; ++r)
        if (rest > 0) s.step[r] = __ldg(reinterpret_cast<const uint32_t*>(next_w + to_steps) + 8 * r);
    } else {
      // Pieces of 32 codes, of which the lane has the t-th of four: piece / (pieces that share a step).
      const uint32_t piece = static_cast<uint32_t>(o.k - rest) / 32 + t;
      const uint8_t* row = o.w_step + static_cast<int64_t>(__umulhi(2 * piece + 1, o.step_share)) * o.step_row;
      if (mine && n0 + side < p.n) s.step[0] = __ldg(reinterpret_cast<const uint32_t*>(row + n0 + side) + g);
    }
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
        if constexpr (T::kParts) {
#pragma unroll
          for (int i = 0; i < 4; ++i) b[j][i] = in ? b[j][i] : 0;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      uint32_t low[4], high[4];
      if constexpr (T::kBlocked && Math::kSteps) {
        Math::weights(s.w[r][u], step_of(s.step[r], 2 * u), step_of(s.step[r], 2 * u + 1), low, high);
      } else if constexpr (T::kBlocked) {
        Math::weights(s.w[r][u], low, high);
      } else if constexpr (Math::kSteps) {
        Math::weights(s.w[r][0], u, step_of(s.step[0], 2 * r), low);
        Math::weights(s.w[r][1], u, step_of(s.step[0], 2 * r + 1), high);
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
    if constexpr (!T::kOrdered) {
#pragma unroll
      for (int i = 0; i < 2 * T::kRows; ++i) offset[i / 2][i % 2] = Math::offset(s.group_code[i / 2][i % 2]);
    }
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
    } else if constexpr (T::kParts) {
      for (int32_t group = 0; group < o.unit_groups; ++group) {
#pragma unroll
        for (int i = 0; i < 2 * T::kRows; ++i) keep_packed(s.w[i / 2][i % 2]);
#pragma unroll
        for (int u = 0; u < T::kUnits; ++u) multiply(s, stage, u, (t * o.unit_groups >> 2) == group);
        close_group(s, group, 4 / o.unit_groups * group);
      }
    } else {
      multiply_step(s, stage);
      if (complete) close_group(s, 0, 0);
    }
  }

  // The sums of scale group `part` of the unit are complete; lane `quad_lane` of a quad has its scales.
  __device__ __forceinline__ void close_group(const DecodeStage<T>& s, int32_t part, int32_t quad_lane) {
    const int32_t source = (lane & ~3) | quad_lane;
    float* products = reinterpret_cast<float*>(shared + T::kRingBytes);
#pragma unroll
    for (int i = 0; i < 2 * T::kRows; ++i) {
      const int r = i / 2, half = i % 2;
      // Of whole groups every lane has the scale itself.
      float scale = s.scale[r][half];
      int32_t w_sum = T::kOrdered ? s.group_code[r][half] : 0;
      if constexpr (T::kBlocked || T::kParts) {
        scale = __shfl_sync(0xffffffffu, scale, source);
        if constexpr (T::kOrdered) w_sum = __shfl_sync(0xffffffffu, w_sum, source);
      }
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Acc& sum = acc[r][j][2 * half + c];
          if constexpr (T::kOrdered) {
            const int32_t exact = corrected(sum >> Math::kAccShift, zero_point[j][c], w_sum);
            products[T::place_of_sum(depth * o.unit_groups + part, 8 * j + 2 * t + c, side + 16 * r + 8 * half + g)] =
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

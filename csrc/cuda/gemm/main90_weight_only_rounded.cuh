// Main loop for Hopper over integer weights as in a checkpoint, under 16-bit activations, for many tokens: it
// multiplies the weights as a framework's product of dequantised ones does, rounded to the type of the activations, and
// the tensor cores add up all of K.
//   Scaled sums (main90_weight_only_registers.cuh) need every product's registers twice, or end each group with a wait.
//   Here a weight is scaled before it is multiplied, so that nothing waits for a product but the registers and buffers
//   of the one before it, and a tile may have as many tokens as registers hold sums.
//   A lane loads the two codes that the tensor cores want of it at a time, a byte of int4 or two of int8: no exchange,
//   and no bank is asked twice. Both become floats where they lie in the word, one operation each, less a power of two,
//   the code's bias and the zero point, which is exact; then times the scale (docs/numerics.md 2.3), then 16 bits.
//   A scale a channel is multiplied with the sum instead: those weights are exact.
#pragma once
#include "cuda/gemm/main90_fragments.cuh"
#include "cuda/gemm/order.cuh"

namespace pyquant::cuda {

// 64 bytes of a channel: 128 codes of int4, 64 of int8.
template <class Math, int Tokens, int Cluster>
using RoundedCopies90 = WeightOnlyCopies90<Math, Tokens, 512 / bits_of(Math::kW), 64, Cluster>;

template <class Math, int Tokens, int Cluster>
struct RoundedTiles90 : FragmentTiles90<RoundedCopies90<Math, Tokens, Cluster>> {
  // Activations as rounds of the main loop, one after another, as they lie in memory.
  static constexpr int kRound = 64;
  using LayoutRounds = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<typename RoundedTiles90::X>{},
      cute::make_shape(cute::Int<Tokens>{}, cute::Int<kRound>{},
                       cute::Int<RoundedTiles90::kDepth / kRound * RoundedTiles90::kStages>{})));
};

// Of a word with two neighbouring codes, the first one lowest: each as a float of the unit 1.
template <int Bits>
struct CodePair {
  static constexpr uint32_t kBias = 1u << (Bits - 1);
  static constexpr uint32_t kMask = (1u << Bits) - 1;
  static constexpr uint32_t kLow = 0x4b000000u, kHigh = kLow - (Bits << 23);  // 2^23, 2^(23 - Bits)

  // What is to be taken off the floats of a channel's codes.
  struct Offset {
    float low, high;
  };
  static __device__ __forceinline__ Offset offset(int32_t zero_point) {
    const uint32_t code = kBias + static_cast<uint32_t>(zero_point);
    return {__uint_as_float(kLow + code), __uint_as_float(kHigh + (code << Bits))};
  }

  // (word & mask) ^ base, which sets the power of two and turns the code's sign bit.
  static __device__ __forceinline__ float low(uint32_t word, const Offset& offset) {
    return less(word, kMask, kLow ^ kBias, offset.low);
  }
  static __device__ __forceinline__ float high(uint32_t word, const Offset& offset) {
    return less(word, kMask << Bits, kHigh ^ kBias << Bits, offset.high);
  }

 private:
  static __device__ __forceinline__ float less(uint32_t word, uint32_t mask, uint32_t base, float offset) {
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(word), "r"(mask), "r"(base));
    return fadd(__uint_as_float(bits), -offset);
  }
};

__device__ __forceinline__ uint32_t rounded_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t rounded_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// One of two warpgroups, for 64 channels.
template <class Tiles, class Params_ = WeightOnlyParams90<Tiles>>
class MainRounded90 : public MainFragments90<Tiles, Params_> {
  using Base = MainFragments90<Tiles, Params_>;
  static constexpr bool kNibbles = is_packed(Tiles::Math::kW);
  using Pair = CodePair<bits_of(Tiles::Math::kW)>;
  using typename Base::Groups;
  static constexpr int kCodes = 32, kRound = Tiles::kRound;  // of a fragment, of two
  static constexpr int kPieces = kNibbles ? 1 : 2;           // of 16 bytes that have a fragment's codes
  using Fragment = typename Base::template Fragment<kCodes>;
  using Base::groups_of, Base::kDepth, Base::p_, Base::pipeline_, Base::release, Base::state_;

 public:
  using typename Base::Barriers, typename Base::Params, typename Base::Storage, typename Base::Sum;

  CUTLASS_DEVICE MainRounded90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                               Barriers& barriers, int thread)
      : Base(params, storage, pipeline, barriers, thread) {
    // Of this lane's two codes in the first piece of 16 bytes of its first channel; pieces trade places by row.
    const int row = thread / 32 * 16 + thread % 32 / 4;
    address_ = cute::cast_smem_ptr_to_uint(storage.w.data()) + row * Tiles::kRowBytes + row / 2 % 4 * 16 +
               thread % 4 * (kNibbles ? 1 : 2);
  }

  // The sums over `count` steps, from step `first` on, of the tile that starts at channel row0.
  CUTLASS_DEVICE void run(Sum& sum, int32_t row0, int32_t first, int32_t count) {
    cute::fill(sum, 0.f);
    if (count <= 0) return;
    const int32_t group = first * kDepth / p_.group_codes;
    Groups groups = groups_of(row0, group);
    if (p_.groups == 1)
      multiply<false>(sum, groups, 0, count);
    else
      multiply<true>(sum, groups, ((group + 1) * p_.group_codes - first * kDepth) / kCodes, count);
  }

 private:
  // What the codes of a group become weights with, of channels g and g + 8.
  struct Factors {
    float scale[2];
    typename Pair::Offset offset[2];

    CUTLASS_DEVICE explicit Factors(const GroupFactors& group)
        : scale{group.scale[0], group.scale[1]}, offset{Pair::offset(group.term[0]), Pair::offset(group.term[1])} {}
  };

  // Scaled: in groups. `left`: fragments of the first one. One fragment is widened while the other is multiplied; a
  // round of the loop is both, of longer ones the compiler has all products wait.
  template <bool Scaled>
  CUTLASS_DEVICE void multiply(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    constexpr int kRounds = kDepth / kRound;  // of a step
    Fragment even, odd;
    int32_t taken = 0;
    Factors factors(groups.take(taken++));
    int round = 0;
    bool is_first = true;
    const auto part = [&](Fragment& w, int half) {
      if constexpr (Scaled) {
        if (left == 0) {
          factors = Factors(groups.take(taken++));
          left = p_.group_codes / kCodes;
        }
        --left;
      }
      widen<Scaled>(w, factors, round, half);
      this->template start<kCodes, typename Tiles::LayoutRounds>(w, sum, kRounds * state_.index() + round, half,
                                                                 cute::GMMA::ScaleOut::One);
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(sum);
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t rounds = count * kRounds; rounds > 0; --rounds) {
      if (round == 0) {
        pipeline_.consumer_wait(state_);
        keep_order();
      }
      part(even, 0);
      if (round == 0 && !is_first) release();  // the step before this one is multiplied
      is_first = false;
      part(odd, 1);
      if (++round == kRounds) {
        round = 0;
        ++state_;
      }
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(sum);
    release();
    if constexpr (!Scaled) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = fmul(sum(i), factors.scale[i / 2 % 2]);
    }
  }

  // A fragment of the step in front.
  template <bool Scaled>
  CUTLASS_DEVICE void widen(Fragment& fragment, const Factors& factors, int round, int half) const {
    using Float = typename Tiles::Math::X;
    auto out = cute::recast<uint32_t>(fragment);
    const uint32_t first = (address_ + state_.index() * Tiles::kWBytes) ^ round * 2 * kPieces * 16;
    constexpr int kBytes = bits_of(Tiles::Math::kW);  // of the eight codes that four lanes share
    uint32_t word[8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      // Eights i / 2 of the fragment's four, in pieces of 16 bytes; channels g and g + 8.
      const int byte = i / 2 * kBytes, piece = half * kPieces + byte / 16;
      word[i] = load_pair((first ^ piece * 16) + byte % 16 + i % 2 * 8 * Tiles::kRowBytes);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      float low = Pair::low(word[i], factors.offset[i % 2]), high = Pair::high(word[i], factors.offset[i % 2]);
      if constexpr (Scaled) {
        low = fmul(low, factors.scale[i % 2]);
        high = fmul(high, factors.scale[i % 2]);
      }
      out(i) = rounded_pair(low, high, Float{});
    }
  }

  static CUTLASS_DEVICE uint32_t load_pair(uint32_t address) {
    uint32_t word;
    if constexpr (kNibbles)
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    else
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }

  uint32_t address_;
};

}  // namespace pyquant::cuda

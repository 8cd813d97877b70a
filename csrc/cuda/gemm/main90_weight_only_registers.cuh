// Main loop for Hopper over int4 weights as in a checkpoint, under 16-bit activations, whose warps widen the weights in
// their own registers, from where the tensor cores take them.
//   A channel's step of 256 codes is 128 bytes, which are fetched at once, and a cluster's blocks fetch activations
//   together. Beside the loop that widens into shared memory (main90_weight_only.cuh) no weight is written there and
//   read again, and L2 gives half of the activations; a step costs each warp an exchange between lanes instead.
//   Eight neighbouring codes lie in one lane of a quad, where the tensor cores want two of them in each of the four:
//   first the even codes of two channels, eight rows apart, are put into one word and the odd ones into another; then
//   the quad exchanges bytes of both words, two at a time, so that of either word each lane has a byte of every lane.
//   What it holds then are the pairs of a fragment, a nibble apart.
#pragma once
#include "cuda/gemm/main90_fragments.cuh"

namespace pyquant::cuda {

template <class Math, int Tokens, int Cluster>
using RegisterCopies90 = WeightOnlyCopies90<Math, Tokens, 256, 128, Cluster>;

template <class Math, int Tokens, int Cluster>
struct RegisterTiles90 : FragmentTiles90<RegisterCopies90<Math, Tokens, Cluster>> {
  static_assert(is_packed(Math::kW), "a lane exchanges nibbles");
  // Beyond 64 tokens registers allow no fragments of more than 64 codes, beyond 96 no second product.
  static constexpr bool kTwoProducts = Tokens <= 96;
  static constexpr int kCodes = Tokens <= 64 ? 128 : 64;  // of a fragment, at most
};

// One of two warpgroups, for 64 channels.
template <class Tiles>
class MainRegisters90 : public MainFragments90<Tiles> {
  using Base = MainFragments90<Tiles>;
  using Math = typename Tiles::Math;
  using Offset = typename Math::Offset;
  using typename Base::Groups;
  template <int Codes>
  using Fragment = typename Base::template Fragment<Codes>;
  using Base::groups_of, Base::kDepth, Base::p_, Base::pipeline_, Base::release, Base::state_;

 public:
  using typename Base::Barriers, typename Base::Params, typename Base::Storage, typename Base::Sum;

  CUTLASS_DEVICE MainRegisters90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                                 Barriers& barriers, int thread)
      : Base(params, storage, pipeline, barriers, thread), exchange_(thread % 4) {
    // The row of a lane's address for ldmatrix, whose pieces of 16 bytes trade places by row: lanes 16 to 31 have the
    // piece behind that of lanes 0 to 15.
    const int row = thread / 32 * 16 + thread % 16, piece = thread % 32 / 16;
    address_ = cute::cast_smem_ptr_to_uint(storage.w.data()) + row * Tiles::kRowBytes + (piece ^ row % 8) * 16;
  }

  // The sums over `count` steps, from step `first` on, of the tile that starts at channel row0.
  CUTLASS_DEVICE void run(Sum& sum, int32_t row0, int32_t first, int32_t count) {
    cute::fill(sum, 0.f);
    if (count <= 0) return;
    const int32_t group = first * kDepth / p_.group_codes;
    Groups groups = groups_of(row0, group);
    if (p_.group_codes == 32)
      multiply<32, 1>(sum, groups, 1, count);
    else if (p_.group_codes == 64)
      multiply<64, 1>(sum, groups, 1, count);
    else
      multiply<Tiles::kCodes, 128 / Tiles::kCodes>(
          sum, groups, (group + 1) * (p_.group_codes / 128) - first * (kDepth / 128), count);
  }

 private:
  // Bytes of words, by a lane of a quad: what of two words the lane beside it is sent and what stays; what of these two
  // goes to the lane two further and what stays.
  struct Exchange {
    uint32_t send, keep, away, stay;
    bool is_upper;

    CUTLASS_DEVICE explicit Exchange(int lane)
        : send(lane % 2 ? 0x6420 : 0x7531),
          keep(lane % 2 ? 0x7531 : 0x6420),
          away((lane % 2 ? 0x2604 : 0x6240) ^ (lane < 2 ? 0x1111 : 0)),
          stay((lane % 2 ? 0x2604 : 0x6240) ^ (lane < 2 ? 0 : 0x1111)),
          is_upper(lane >= 2) {}
  };

  // What a product is multiplied by once it is done.
  struct Factors {
    float scale[2] = {};
  };

  // Products of `Each` fragments of `Codes` codes. `left`: products of the first group. A round of the loop is two
  // products; none is under way from one to the next, as the compiler may move what is carried on.
  template <int Codes, int Each>
  CUTLASS_DEVICE void multiply(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    constexpr int kRound = 2 * Each, kRounds = kDepth / Codes / kRound;  // fragments of one; those of a step
    constexpr bool kAhead = Tiles::kTwoProducts;
    Fragment<Codes> fragments[2];
    Sum products[kAhead ? 2 : 1];
    Factors factors[2];
    Offset offsets[2];
    int32_t taken = 0;
    GroupFactors group{};
    // Widens fragment `i` of a round, which is number `at` of the step in front; takes the group of a product with its
    // first one.
    const auto widen_next = [&](int i, int at) {
      if (i % Each == 0) {
        if (taken == 0 || left == 0) {
          group = groups.take(taken++);
          if (taken > 1) left = Codes * Each < 128 ? 1 : p_.group_codes / 128;
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) offsets[h] = Math::offset(group.term[h]);
        }
        --left;
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) factors[i / Each].scale[h] = group.scale[h];
      }
      widen<Codes>(fragments[i % 2], offsets, at, i % 2);
    };
    if constexpr (kAhead) cute::fill(products[1], 0.f);  // it is added before there is one
    pipeline_.consumer_wait(state_);
    widen_next(0, 0);
    int round = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t rounds = count * kRounds; rounds > 0; --rounds) {
      const int stage = state_.index(), first = kRounds == 1 ? 0 : round * kRound;
      const bool ends_step = kRounds == 1 || round + 1 == kRounds;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRound; ++i) {
        Sum& product = products[kAhead ? i / Each : 0];
        this->template start<Codes, typename Tiles::LayoutX>(
            fragments[i % 2], product, stage, first + i,
            i % Each == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One);
        cute::warpgroup_wait<1>();  // the fragment before this one is free
        if (kAhead && i % Each == 0) add(products[i / Each ^ 1], sum, factors[i / Each ^ 1]);
        if (i + 1 < kRound) {
          widen_next(i + 1, first + i + 1);
        } else if (!ends_step) {
          widen_next(0, first + kRound);
        } else if (rounds > 1) {
          ++state_;
          pipeline_.consumer_wait(state_);
          widen_next(0, 0);
        }
        if (!kAhead && (i + 1) % Each == 0) {
          cute::warpgroup_wait<0>();
          add(product, sum, factors[i / Each]);
        }
      }
      cute::warpgroup_wait<0>();
      if (ends_step) release();
      round = ends_step ? 0 : round + 1;
    }
    ++state_;
    if constexpr (kAhead) add(products[1], sum, factors[1]);
  }

  // Fragment `at` of the step in front; odd: at % 2.
  template <int Codes>
  CUTLASS_DEVICE void widen(Fragment<Codes>& fragment, const Offset (&offsets)[2], int at, int odd) const {
    auto out = cute::recast<uint32_t>(fragment);
    constexpr int kPieces = Codes / 32;
    const uint32_t step = address_ + state_.index() * Tiles::kWBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kPieces; piece += 2) {
      // Two at once; of a fragment of one the other is nobody's.
      const int first = at * kPieces + piece;
      uint32_t word[4];
      load_pieces(step ^ (first / 2 * 32), word);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < (kPieces == 1 ? 1 : 2); ++j) {
        const int which = kPieces == 1 ? odd : j;
        uint32_t low, high;
        exchange(word[2 * which], word[2 * which + 1], low, high);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 4; ++r) {
          out(8 * (piece + j) + r) = Math::pair(low >> (4 * r), offsets[r % 2]);
          out(8 * (piece + j) + 4 + r) = Math::pair(high >> (4 * r), offsets[r % 2]);
        }
      }
    }
  }

  // Eight codes of channels g and g + 8 in each of two neighbouring pieces of 32.
  CUTLASS_DEVICE static void load_pieces(uint32_t address, uint32_t (&word)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address));
  }

  // a, b: eight codes of channels g and g + 8. low: of the codes of lanes 0 and 1 of the quad this lane's pairs, from
  // the lowest nibble on those of g, of g + 8, and of the next lane the same, even codes in the lower half, odd ones in
  // the upper; high: of lanes 2 and 3.
  CUTLASS_DEVICE void exchange(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) const {
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    const uint32_t even = (a & kLow) | (b << 4 & ~kLow), odd = (a >> 4 & kLow) | (b & ~kLow);
    const uint32_t kept = __byte_perm(even, odd, exchange_.keep);
    const uint32_t got = __shfl_xor_sync(0xffffffffu, __byte_perm(even, odd, exchange_.send), 1);
    const uint32_t stays = __byte_perm(kept, got, exchange_.stay);
    const uint32_t comes = __shfl_xor_sync(0xffffffffu, __byte_perm(kept, got, exchange_.away), 2);
    low = exchange_.is_upper ? comes : stays;
    high = exchange_.is_upper ? stays : comes;
  }

  static CUTLASS_DEVICE void add(Sum& product, Sum& sum, const Factors& factors) {
    cute::warpgroup_fence_operand(product);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = ffma(product(i), factors.scale[i / 2 % 2], sum(i));
  }

  const Exchange exchange_;
  uint32_t address_;  // of a lane's row in the first buffer of weights
};

}  // namespace pyquant::cuda

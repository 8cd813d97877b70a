// Which numbers of a row a thread holds at a time, and the steps of the Hadamard transform between them
// (docs/numerics.md 15). The signs S of the columns cost nothing: each is -1 to the number of neighbouring pairs of
// ones among the bits of a column, and the step of one of two such bits adds or subtracts as the other one says.
#pragma once
#include <cstdint>
#include <utility>

#include "core/arith.h"

namespace pyquant::cuda {

// use(0), use(1) ... use(Count - 1), each number a constant.
template <class Use, int... Index>
__device__ __forceinline__ void each_constant(Use use, std::integer_sequence<int, Index...>) {
  (use(std::integral_constant<int, Index>()), ...);
}
template <int Count, class Use>
__device__ __forceinline__ void each_constant(Use use) {
  each_constant(use, std::make_integer_sequence<int, Count>());
}

// Pieces of Width neighbours whose columns differ in some bits; Bits: those, from the highest. A step between pieces
// has the distance 2^bit.
template <int Width, int... Bits>
struct Held {
  static constexpr int kWidth = Width, kSteps = sizeof...(Bits), kCount = 1 << kSteps;
  static constexpr int kTaken = (0 | ... | (1 << Bits)) | (Width - 1);

  static constexpr int bit(int step) {
    constexpr int kBits[] = {Bits..., -1};
    return kBits[step];
  }
  static constexpr bool between_pieces(int bit) { return bit >= 0 && (kTaken & ~(Width - 1)) >> bit & 1; }
  static constexpr bool within(int bit) { return bit >= 0 && Width >> bit > 1; }
  // From the first piece to piece e.
  static constexpr int column(int e) {
    int result = 0;
    for (int step = 0; step < kSteps; ++step) result |= (e >> (kSteps - 1 - step) & 1) << bit(step);
    return result;
  }

  // The bits that tell the threads' items apart: runs of neighbouring ones, the last without an end.
  struct Run {
    int from, at, count;  // `count` bits of the item's number, `from` on, are bits `at` on of its column
  };
  static constexpr Run run(int index) {
    int from = 0, at = 0;
    while (true) {
      while (kTaken >> at & 1) ++at;
      int count = 0;
      while (at + count < 31 && !(kTaken >> (at + count) & 1)) ++count;
      if (index-- == 0) return {from, at, count};
      from += count, at += count;
    }
  }
  static constexpr bool is_last(int index) { return kTaken >> run(index).at == 0; }
  static constexpr int runs() {
    int count = 1;
    while (!is_last(count - 1)) ++count;
    return count;
  }
  static __device__ __forceinline__ int first_of(uint32_t item) {
    uint32_t result = 0;
    each_constant<runs()>([&](auto index) {
      constexpr Run kRun = run(index);
      constexpr uint32_t kMask = is_last(index) ? 0xffffffffu : (1u << kRun.count) - 1;
      result |= (item >> kRun.from & kMask) << kRun.at;
    });
    return static_cast<int>(result);
  }
  // Whether the item of the next turn of a block of whole warps lies at the same place of what repeats itself: then it
  // is threads * kCount * kWidth columns further.
  static constexpr bool kEven = run(runs() - 1).from <= 5;

  // Which bit of the column besides the step's own says whether its second number changes sign: the one below; the bit
  // 7 has been asked with the bit 6 before.
  static constexpr int below(int step) { return bit(step) == 7 ? -1 : bit(step) - 1; }
  // Of pieces e, at element c, where the bit is one of the thread's own.
  static constexpr bool negates(int step, int e, int c) {
    const int other = below(step);
    return between_pieces(other) ? e >> (kSteps - 2 - step) & 1 : within(other) && (c >> other & 1);
  }
  // Otherwise it is a bit of the item's first column.
  static constexpr bool asks(int step) {
    return (below(step) >= 0 && !between_pieces(below(step)) && !within(below(step))) || bit(step) == 6;
  }
};

// A thread's items, by the column at which each begins. Rows are whole blocks, and hold whole items.
template <class H>
struct Items {
  uint32_t item = threadIdx.x;
  int first = H::first_of(threadIdx.x);
  __device__ __forceinline__ void next() {
    if constexpr (H::kEven) {
      first += static_cast<int>(blockDim.x) * (H::kCount * H::kWidth);
    } else {
      item += blockDim.x;
      first = H::first_of(item);
    }
  }
};

// +1 or -1 for each step that asks, of the item that begins at a column; log2: of the block.
template <class H>
struct StepSigns {
  float sign[H::kSteps > 0 ? H::kSteps : 1];
  __device__ __forceinline__ StepSigns(int first, int log2) {
#pragma unroll
    for (int step = 0; step < H::kSteps; ++step) {
      if (!H::asks(step)) continue;
      const int other = H::below(step);
      uint32_t odd = 0;
      if (!H::between_pieces(other)) odd = static_cast<uint32_t>(first) >> other;
      if (H::bit(step) == 6 && log2 > 7) odd ^= static_cast<uint32_t>(first) >> 7;
      sign[step] = __uint_as_float(0x3f800000u | odd << 31);
    }
  }
};

__device__ __forceinline__ void butterfly(float& a, float& b, bool negated) {
  const float sum = fadd(a, b), difference = fsub(a, b);
  a = negated ? difference : sum;
  b = negated ? sum : difference;
}

template <class H>
__device__ __forceinline__ void butterflies(float (&v)[H::kCount][H::kWidth], const StepSigns<H>& signs) {
#pragma unroll
  for (int step = 0; step < H::kSteps; ++step) {
    const int far = 1 << (H::kSteps - 1 - step);
#pragma unroll
    for (int e = 0; e < H::kCount; ++e) {
      if (e & far) continue;
#pragma unroll
      for (int c = 0; c < H::kWidth; ++c) {
        float &a = v[e][c], &b = v[e | far][c];
        const bool negated = H::negates(step, e, c);
        if (H::asks(step)) {  // the product with +-1 is exact: these are the rounded sum and difference
          const float sum = ffma(b, signs.sign[step], a), difference = ffma(b, -signs.sign[step], a);
          a = negated ? difference : sum;
          b = negated ? sum : difference;
        } else {
          butterfly(a, b, negated);
        }
      }
    }
  }
}

}  // namespace pyquant::cuda

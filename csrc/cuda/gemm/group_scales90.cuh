// What a group of K brings to the two channels of a thread, for the main loops of Hopper that scale group by group.
#pragma once
#include <cstdint>

#include "core/arith.h"
#include "cuda/gemm/transpose.cuh"

namespace pyquant::cuda {

// Both [n, groups]; either may be null: scales of 1, terms of 0. The term: of integer activations the sum of a group's
// codes, which their zero point is multiplied with; of floats the zero point of the weights.
struct GroupTables {
  const float* scale;
  const int32_t* term;
  int32_t n, groups;
};

// Of channels g and g + 8.
struct GroupFactors {
  float scale[2];
  int32_t term[2];
  bool shifts;  // see GroupScales
};

// For the channels of a thread, fetched far ahead: the lanes of a quad have the same two channels, so each keeps one of
// four groups, and four more are under way. Sixteenths: scales are for accumulators that hold 16 times a sum, but where
// `shifts` is set for the sums.
template <bool Sixteenths>
class GroupScales {
 public:
  // first: the group of all that this one counts as 0.
  __device__ __forceinline__ GroupScales(const GroupTables& tables, int32_t channel, int32_t first = 0)
      : t_(tables), last_(t_.groups - first - 1), lane_(static_cast<int32_t>(threadIdx.x) % 4) {
#pragma unroll
    for (int h = 0; h < 2; ++h) at_[h] = static_cast<int64_t>(min(channel + 8 * h, t_.n - 1)) * t_.groups + first;
    load(own_[0], 0);
    load(own_[1], 4);
    scale_down(own_[0]);
  }

  // Groups are asked for in ascending order, each once.
  __device__ __forceinline__ GroupFactors take(int32_t group) {
    GroupFactors f{{}, {}, shifts_};
    const int32_t source = group & 3;
    const bool second = (group & 4) != 0;
    lanes_are_together();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      f.scale[h] = __shfl_sync(0xffffffffu, second ? own_[1].scale[h] : own_[0].scale[h], source, 4);
      f.term[h] = t_.term ? __shfl_sync(0xffffffffu, second ? own_[1].term[h] : own_[0].term[h], source, 4) : 0;
    }
    if (source == 3) {
      if (second) {
        load(own_[1], group + 5);
        scale_down(own_[0]);
      } else {
        load(own_[0], group + 5);
        scale_down(own_[1]);
      }
    }
    return f;
  }

 private:
  struct Own {
    float scale[2] = {1.f, 1.f};
    int32_t term[2] = {0, 0};
  };

  // No lane asks whether it has a channel or a group: those beyond have the last one's factors, which nobody reads.
  __device__ __forceinline__ void load(Own& own, int32_t first) const {
    const int32_t group = min(first + lane_, last_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (t_.scale) load_in_place(own.scale[h], t_.scale + at_[h] + group);
      if (t_.term) load_in_place(own.term[h], t_.term + at_[h] + group);
    }
  }

  // As __ldg, into the register that holds the number from now on: where the compiler loads into another one, it moves
  // the number soon after, which waits for what was fetched far ahead. So the two parts take turns, too.
  static __device__ __forceinline__ void load_in_place(float& to, const float* from) {
    asm("ld.global.nc.f32 %0, [%1];" : "+f"(to) : "l"(from));
  }
  static __device__ __forceinline__ void load_in_place(int32_t& to, const int32_t* from) {
    asm("ld.global.nc.b32 %0, [%1];" : "+r"(to) : "l"(from));
  }

  // The product of 16 times a sum and a sixteenth of a scale is rounded as that of both, unless the sixteenth is below
  // what float32 holds exactly.
  __device__ __forceinline__ void scale_down(Own& own) {
    if constexpr (!Sixteenths) return;
    const float down[2] = {fmul(own.scale[0], 0.0625f), fmul(own.scale[1], 0.0625f)};
    const bool loses = fmul(down[0], 16.f) != own.scale[0] || fmul(down[1], 16.f) != own.scale[1];
    shifts_ = __any_sync(0xffffffffu, loses) != 0;
    if (shifts_) return;
    own.scale[0] = down[0];
    own.scale[1] = down[1];
  }

  const GroupTables t_;
  int64_t at_[2];
  int32_t last_, lane_;  // last_: group of those counted from the first
  bool shifts_ = false;
  Own own_[2];  // of four groups each, which take turns
};

}  // namespace pyquant::cuda

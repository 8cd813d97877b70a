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
      : t_(tables),
        at_(static_cast<int64_t>(channel) * t_.groups + first),
        count_(t_.groups - first),
        lane_(static_cast<int32_t>(threadIdx.x) % 4) {
    inside_[0] = channel < t_.n;
    inside_[1] = channel + 8 < t_.n;
    now_ = load(0);
    next_ = load(4);
    scale_down();
  }

  // Groups are asked for in ascending order, each once.
  __device__ __forceinline__ GroupFactors take(int32_t group) {
    GroupFactors f{{}, {}, shifts_};
    const int32_t source = group % 4;
    lanes_are_together();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      f.scale[h] = __shfl_sync(0xffffffffu, now_.scale[h], source, 4);
      f.term[h] = t_.term ? __shfl_sync(0xffffffffu, now_.term[h], source, 4) : 0;
    }
    if (source == 3) {
      now_ = next_;
      next_ = load(group + 5);
      scale_down();
    }
    return f;
  }

 private:
  struct Own {
    float scale[2] = {1.f, 1.f};
    int32_t term[2] = {0, 0};
  };

  __device__ __forceinline__ Own load(int32_t first) const {
    Own own;
    const int32_t group = first + lane_;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!inside_[h] || group >= count_) continue;
      const int64_t at = at_ + h * 8 * static_cast<int64_t>(t_.groups) + group;
      if (t_.scale) own.scale[h] = __ldg(t_.scale + at);
      if (t_.term) own.term[h] = __ldg(t_.term + at);
    }
    return own;
  }

  // The product of 16 times a sum and a sixteenth of a scale is rounded as that of both, unless the sixteenth is below
  // what float32 holds exactly.
  __device__ __forceinline__ void scale_down() {
    if constexpr (!Sixteenths) return;
    const float down[2] = {fmul(now_.scale[0], 0.0625f), fmul(now_.scale[1], 0.0625f)};
    const bool loses = fmul(down[0], 16.f) != now_.scale[0] || fmul(down[1], 16.f) != now_.scale[1];
    shifts_ = __any_sync(0xffffffffu, loses) != 0;
    if (shifts_) return;
    now_.scale[0] = down[0];
    now_.scale[1] = down[1];
  }

  const GroupTables t_;
  int64_t at_;
  int32_t count_, lane_;
  bool inside_[2], shifts_ = false;
  Own now_, next_;
};

}  // namespace pyquant::cuda

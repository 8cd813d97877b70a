// The 'rows' layouts of a packed Linear: padded rows of codes (or their blocks) in 256-byte aligned sections. Twin of
// pyquant/ops/rows_layout.py (tests/ops/test_spec.py compares the two through torch.ops.pyquant._packed_bytes).
#pragma once
#include <cstdint>

#include "core/blocked128.h"
#include "core/linear.h"
#include "core/steps.h"

namespace pyquant {

struct RowsLayout {
  int64_t n_pad = 0, k_pad = 0;
  int64_t groups = 1;                                                            // scales and sums of a channel
  int64_t w_step = 0, w_scale = 0, w_sum = 0, bias = 0, scalars = 0, total = 0;  // byte offsets
};

// Codes in a row of codes that is written for the kernels, weights and activations alike: whole 16-byte pieces even at
// two codes a byte.
constexpr int64_t padded_row(int64_t k) { return (k + 31) / 32 * 32; }

inline RowsLayout rows_layout(const LinearSpec& s) {
  const auto up = [](int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; };
  RowsLayout at;
  at.n_pad = up(s.n, 16);
  at.k_pad = padded_row(s.k);
  const int64_t groups = s.group_size ? s.k / s.group_size : 1;
  at.groups = s.two_level ? 1 : groups;
  const bool blocked = s.layout == Layout::rows_blocked128;  // blocks of 128 x 128 int4 codes (and their steps)
  at.w_step = up(blocked ? blocked128_bytes(s.n, s.k, s.two_level) : at.n_pad * columns_of(s.w->type, at.k_pad), 256);
  at.w_scale = at.w_step + (s.two_level && !blocked ? up(step_row(s.n) * groups, 256) : 0);
  at.w_sum = at.w_scale + up(4 * at.n_pad * at.groups, 256);
  at.bias = at.w_sum + up(4 * at.n_pad * at.groups, 256);
  at.scalars = at.bias + (s.has_bias ? up(4 * at.n_pad, 256) : 0);
  at.total = at.scalars + 256;
  return at;
}

}  // namespace pyquant

#include "plan/accept.h"

#include <algorithm>
#include <initializer_list>

#include "core/bounds.h"

namespace pyquant {

namespace {

constexpr uint32_t kResidualTypes = type_bit(DType::f16) | type_bit(DType::bf16) | type_bit(DType::f32);
constexpr int64_t kAlignment = 16;
// Kernels count rows, columns and k in int32 and round up to a tile.
constexpr int64_t kSizeLimit = kInt32Max - 1024;
// CUDA's limit of gridDim.y, times the narrowest tile.
constexpr int64_t kColumnLimit = int64_t{65535} * 64;

bool in_set(uint32_t set, DType type) { return (set & type_bit(type)) != 0; }

Refusal refuse(Reason reason, int64_t wanted, int64_t got) { return {reason, wanted, got}; }

Refusal accept_sizes(const GemmProblem& p) {
  for (const int64_t size : {p.m, p.k})
    if (size > kSizeLimit) return refuse(Reason::size_limit, kSizeLimit, size);
  if (p.n > kColumnLimit) return refuse(Reason::size_limit, kColumnLimit, p.n);
  const int64_t bound = k_bound(p), depth = p.group_size ? std::min(p.group_size, p.k) : p.k;
  if (depth > bound) return refuse(Reason::k_bound, bound, depth);
  return {};
}

// What TMA (sm90) and 16-byte cp.async (sm80) ask of memory. K = 0 loads nothing.
Refusal accept_alignment(const Row& row, const GemmProblem& p) {
  if (p.k == 0) return {};
  if (p.x_align < kAlignment) return refuse(Reason::x_alignment, kAlignment, p.x_align);
  if (p.w_align < kAlignment) return refuse(Reason::w_alignment, kAlignment, p.w_align);
  if (row.family == Family::sm80 && p.k % kAlignment != 0) return refuse(Reason::k_multiple, kAlignment, p.k);
  if (row.family == Family::sm90 && p.out_align < kAlignment)
    return refuse(Reason::out_alignment, kAlignment, p.out_align);
  return {};
}

}  // namespace

int64_t k_bound(const GemmProblem& p) {
  const int64_t x_low = p.x == DType::u8 ? 0 : (p.x == DType::s4 ? -8 : -128);
  const int64_t x_high = p.x == DType::u8 ? 255 : (p.x == DType::s4 ? 7 : 127);
  const int64_t w_max = p.w == DType::s4 ? 8 : 128;
  const int64_t plain = k_max(std::max(-x_low, x_high), w_max);
  return p.has_zero_point ? std::min(plain, k_max_affine(x_low, x_high, w_max)) : plain;
}

Refusal accept(const Row& row, const GemmProblem& p, bool has_residual, const DeviceInfo& device) {
  if (device.sm < row.sm_min) return refuse(Reason::wrong_device, row.sm_min, device.sm);
  if (device.sm >= row.sm_end) return refuse(Reason::wrong_device_above, row.sm_end, device.sm);
  if (!in_set(row.x, p.x)) return refuse(Reason::type_pair, row.x, static_cast<int64_t>(p.x));
  if (!in_set(row.w, p.w)) return refuse(Reason::type_pair, row.w, static_cast<int64_t>(p.w));
  if (!in_set(row.outs, p.out)) return refuse(Reason::out_type, row.outs, static_cast<int64_t>(p.out));
  if (has_residual && !in_set(kResidualTypes, p.residual))
    return refuse(Reason::residual_type, kResidualTypes, static_cast<int64_t>(p.residual));
  const bool grouped = p.group_size != 0;
  if (grouped && (row.family != Family::simt || p.out == DType::s32))
    return refuse(Reason::group_size, 0, p.group_size);
  if (grouped && p.k % p.group_size != 0) return refuse(Reason::k_multiple, p.group_size, p.k);
  const Refusal sizes = accept_sizes(p);
  if (!sizes.ok() || row.family == Family::simt) return sizes;
  return accept_alignment(row, p);
}

}  // namespace pyquant

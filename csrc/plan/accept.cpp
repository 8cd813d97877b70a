#include "plan/accept.h"

#include <algorithm>
#include <initializer_list>

#include "core/bounds.h"
#include "core/decode_split.h"
#include "plan/split_k.h"

namespace pyquant {

namespace {

constexpr uint32_t kResidualTypes = type_bit(DType::f16) | type_bit(DType::bf16) | type_bit(DType::f32);
// Kernels count the places of codes in images by 16, in 32 bits.
constexpr int64_t kImageLimit = int64_t{16} << 31;
// Kernels count rows, columns and k in int32 and round up to a tile.
constexpr int64_t kSizeLimit = kInt32Max - 1024;
// CUDA's limit of gridDim.y, times the narrowest tile.
constexpr int64_t kColumnLimit = int64_t{65535} * 64;

bool in_set(uint32_t set, DType type) { return (set & type_bit(type)) != 0; }

// Bits of a code in shared memory: of the widest type that the family takes.
int64_t widest_bits(uint32_t types, bool a_byte_each) {
  int64_t bits = 0;
  for (const DType type : kTypes)
    if (in_set(types, type)) bits = std::max<int64_t>(bits, stored_bits(type, !a_byte_each));
  return bits;
}

Refusal refuse(Reason reason, int64_t wanted, int64_t got) { return {reason, wanted, got}; }

Refusal accept_sizes(const FamilyFacts& f, const GemmProblem& p) {
  for (const int64_t size : {p.m, p.k})
    if (size > kSizeLimit) return refuse(Reason::size_limit, kSizeLimit, size);
  if (p.experts > kSizeLimit) return refuse(Reason::size_limit, kSizeLimit, p.experts);
  if (p.k < f.k_least) return refuse(Reason::k_least, f.k_least, p.k);
  if (p.n > kColumnLimit) return refuse(Reason::size_limit, kColumnLimit, p.n);
  if (f.m_max != 0 && p.m > f.m_max) return refuse(Reason::m_limit, f.m_max, p.m);
  const int64_t bound = k_bound(p) / f.acc_scale, depth = p.group_size ? std::min(p.group_size, p.k) : p.k;
  if (depth > bound) return refuse(Reason::k_bound, bound, depth);
  return {};
}

Refusal accept_types(const FamilyFacts& f, const GemmProblem& p, bool has_residual) {
  if (!in_set(f.x, p.x)) return refuse(Reason::type_pair, f.x, static_cast<int64_t>(p.x));
  if (!in_set(f.w, p.w)) return refuse(Reason::type_pair, f.w, static_cast<int64_t>(p.w));
  if (!in_set(f.outs, p.out)) return refuse(Reason::out_type, f.outs, static_cast<int64_t>(p.out));
  if (has_residual && !in_set(kResidualTypes, p.residual))
    return refuse(Reason::residual_type, kResidualTypes, static_cast<int64_t>(p.residual));
  if (is_packed(p.x) && f.x_packing != Packing::either && p.x_packed != (f.x_packing == Packing::nibbles))
    return refuse(Reason::x_packing, f.x_packing == Packing::nibbles, p.x_packed);
  if ((f.w_layouts & layout_bit(p.w_layout)) == 0 || (p.w_layout != WeightLayout::natural && p.w != DType::s4))
    return refuse(Reason::w_layout, f.w_layouts, static_cast<int64_t>(p.w_layout));
  if (p.has_zero_point && !f.zero_point) return refuse(Reason::zero_point, 0, 1);
  if (p.has_w_zero_point && !f.w_zero_point) return refuse(Reason::w_zero_point, 0, 1);
  return {};
}

Refusal accept_groups(const FamilyFacts& f, const GemmProblem& p) {
  if (p.group_size == 0) return f.groups_only ? refuse(Reason::groups_only, f.group_multiple, 0) : Refusal{};
  if (f.group_multiple == 0 || p.out == DType::s32) return refuse(Reason::group_size, 0, p.group_size);
  if (p.group_size % f.group_multiple != 0) return refuse(Reason::group_size, f.group_multiple, p.group_size);
  if (p.group_size > f.group_step / 2 && f.group_step != 0 && p.group_size % f.group_step != 0)
    return refuse(Reason::group_size, f.group_step, p.group_size);
  if (p.k % p.group_size != 0) return refuse(Reason::k_multiple, p.group_size, p.k);
  return {};
}

// Steps of 4-bit codes, under one scale a channel.
Refusal accept_steps(const FamilyFacts& f, const GemmProblem& p) {
  if (p.step_size == 0) return f.steps_only ? refuse(Reason::steps_only, f.step_multiple, 0) : Refusal{};
  if (f.step_multiple == 0 || p.w != DType::s4) return refuse(Reason::step_size, 0, p.step_size);
  if (p.group_size != 0) return refuse(Reason::group_size, 0, p.group_size);
  if (p.step_size % f.step_multiple != 0) return refuse(Reason::step_size, f.step_multiple, p.step_size);
  if (p.k % p.step_size != 0) return refuse(Reason::k_multiple, p.step_size, p.k);
  return {};
}

Refusal accept_experts(const FamilyFacts& f, const GemmProblem& p) {
  if (p.exact_weights && f.rounds_weights) return refuse(Reason::exact_weights, 0, 1);
  if ((p.experts > 0) != f.experts_only) return refuse(Reason::experts, f.experts_only, p.experts);
  return p.chooses_rows && !f.chooses_rows ? refuse(Reason::chosen_rows, 0, 1) : Refusal{};
}

int64_t image_codes(const GemmProblem& p) {
  return ceil_div(p.m, p.image.out_height * p.image.out_width) * p.image.image_step;
}

Refusal accept_image(const FamilyFacts& f, const GemmProblem& p) {
  const int64_t channels = p.image.channels;
  if (f.channel_multiple == 0) return channels == 0 ? Refusal{} : refuse(Reason::image, 0, channels);
  if (channels == 0 || channels % f.channel_multiple != 0) return refuse(Reason::image, f.channel_multiple, channels);
  return image_codes(p) > kImageLimit ? refuse(Reason::size_limit, kImageLimit, image_codes(p)) : Refusal{};
}

// Rows of mma.sync run on chips whose shared memory differs (sm_80 163 KiB, sm_86 and sm_89 99); other rows fit all of
// theirs.
Refusal accept_device(const Row& row, const DeviceInfo& device) {
  const FamilyFacts& f = row.facts();
  if (device.sm < f.sm_min) return refuse(Reason::wrong_device, f.sm_min, device.sm);
  if (device.sm >= f.sm_end) return refuse(Reason::wrong_device_above, f.sm_end, device.sm);
  const bool differs = f.engine == Engine::mma || f.engine == Engine::decode;
  if (differs && device.shared_bytes != 0 && shared_bytes(row) > device.shared_bytes)
    return refuse(Reason::shared_memory, shared_bytes(row), device.shared_bytes);
  return {};
}

// What TMA and 16-byte cp.async ask of memory. K = 0 loads nothing.
Refusal accept_memory(const FamilyFacts& f, const GemmProblem& p) {
  if (p.k == 0) return {};
  if (p.x_align < f.x_align) return refuse(Reason::x_alignment, f.x_align, p.x_align);
  if (p.w_align < f.w_align) return refuse(Reason::w_alignment, f.w_align, p.w_align);
  if (p.k % f.k_multiple != 0) return refuse(Reason::k_multiple, f.k_multiple, p.k);
  if (p.out_align < f.out_align) return refuse(Reason::out_alignment, f.out_align, p.out_align);
  return {};
}

}  // namespace

int64_t shared_bytes(const Row& row) {
  const FamilyFacts& f = row.facts();
  if (f.engine == Engine::decode) {
    const int64_t ring = decode_ring_bytes(row.stages, row.tile_n, row.tile_m, row.tile_k, widest_bits(f.x, true));
    return std::max<int64_t>(ring, decode_sums_bytes(row.tile_n, row.tile_m));
  }
  const int64_t bits =
      row.tile_m * widest_bits(f.x, f.x_packing != Packing::nibbles) + row.tile_n * widest_bits(f.w, false);
  return bits * row.tile_k * row.stages / 8;
}

int64_t k_bound(const GemmProblem& p) {
  const CodeType *x = find_code_type(p.x), *w = find_code_type(p.w);
  if (!x || !w) return kSizeLimit;
  const int64_t largest = p.step_size ? kStepProductMax : w->largest(), plain = k_max(x->largest(), largest);
  return p.has_zero_point ? std::min(plain, k_max_affine(x->qmin, x->qmax, largest)) : plain;
}

Refusal accept(const Row& row, const GemmProblem& p, bool has_residual, const DeviceInfo& device) {
  const FamilyFacts& f = row.facts();
  Refusal refusal = accept_device(row, device);
  if (refusal.ok()) refusal = accept_types(f, p, has_residual);
  if (refusal.ok()) refusal = accept_experts(f, p);
  if (refusal.ok()) refusal = accept_image(f, p);
  if (refusal.ok()) refusal = accept_groups(f, p);
  if (refusal.ok()) refusal = accept_steps(f, p);
  if (refusal.ok()) refusal = accept_sizes(f, p);
  if (refusal.ok()) refusal = accept_memory(f, p);
  return refusal;
}

}  // namespace pyquant

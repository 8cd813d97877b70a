#include "plan/choice.h"

#include <cstring>
#include <memory>

#include "plan/cost.h"
#include "plan/layer.h"
#include "plan/select.h"
#include "plan/tuned.h"

namespace pyquant {

namespace {

constexpr size_t kSlots =
    size_t{1} << 10;  // a slot per hash: a model has some dozens of problems, and a collision costs a select

// All that select() looks at. Row strides count through the alignments only.
struct Key {
  uint64_t words[19];
  bool operator==(const Key& other) const { return std::memcmp(words, other.words, sizeof(words)) == 0; }
};

template <class Value>
struct Slot {
  Key key{};
  uint64_t generation = ~uint64_t{0};  // of the measured tables; never equal at first
  Value value{};
};

Key key_of(const GemmProblem& p, bool has_residual, const DeviceInfo& d, const Row* row = nullptr) {
  const auto at = [](auto value, int bit) { return static_cast<uint64_t>(value) << bit; };
  const uint64_t flags = at(p.x, 0) | at(p.w, 4) | at(p.out, 8) | at(has_residual ? p.residual : DType::f32, 12) |
                         at(p.x_align, 16) | at(p.w_align, 22) | at(p.out_align, 28) | at(p.residual_align, 34) |
                         at(p.x_packed, 40) | at(p.per_token_scale, 41) | at(p.per_token_zero_point, 42) |
                         at(p.has_zero_point, 43) | at(p.has_w_zero_point, 44) | at(has_residual, 45) |
                         at(p.w_layout, 46) | at(p.chooses_rows, 47) | at(p.exact_weights, 48) |
                         at(d.halves_float_sums, 50);
  const auto word = [](int64_t value) { return static_cast<uint64_t>(value); };
  return {{word(p.m), word(p.n), word(p.k), word(p.group_size), word(p.step_size), word(p.experts),
           word(p.image.channels), word(p.image.out_height), word(p.image.out_width), word(p.image.image_step), flags,
           word(d.sm), word(d.sm_count), word(d.shared_bytes), word(d.l2_bytes), word(d.dram_gbps), word(d.clock_mhz),
           d.gpu, reinterpret_cast<uintptr_t>(row)}};
}

size_t hash_of(const Key& key) {
  // A factor for each word, so that the products do not wait for one another.
  uint64_t h = 0, factor = 0x9e3779b97f4a7c15u;
  for (const uint64_t word : key.words) h += (word ^ word >> 32) * factor, factor += 0x3c6ef372fe94f82au;
  return (h ^ h >> 29) * 0xbf58476d1ce4e5b9u >> 54;  // the highest bits of a product depend on all of it
}

// What `decide` says of a problem, asked once.
template <class Value, class Decide>
Value remembered(const Key& key, Decide decide) {
  thread_local const std::unique_ptr<Slot<Value>[]> slots = std::make_unique<Slot<Value>[]>(kSlots);
  Slot<Value>& slot = slots[hash_of(key)];
  const uint64_t generation = tuned_generation();
  if (slot.generation != generation || !(slot.key == key)) slot = {key, generation, decide()};
  return slot.value;
}

}  // namespace

const Row* choose(const GemmProblem& problem, bool has_residual, const DeviceInfo& device) {
  return remembered<const Row*>(key_of(problem, has_residual, device),
                                [&] { return select(problem, has_residual, device).row; });
}

bool framework_is_quicker(const Row& row, const GemmProblem& problem, const DeviceInfo& device) {
  return remembered<bool>(key_of(problem, false, device, &row),
                          [&] { return dequantised_us(problem, device) < cost_us(row, problem, device); });
}

}  // namespace pyquant

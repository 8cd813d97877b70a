// What each family of GEMM kernels takes: the only place that says it. accept(), the kernel table, the cost model and
// the tests' random problems are readings of these facts. A family shares one C++ template (csrc/cuda/gemm) and is
// instantiated by the rows of cmake/kernels.cmake.
#pragma once
#include <cstdint>

#include "core/blocked128.h"
#include "core/dtype.h"
#include "core/problem.h"

namespace pyquant {

// Which unit multiplies.
enum class Engine : int32_t { byte_wise, mma, wgmma, decode };
// Layouts of int4 activations in memory.
enum class Packing : int32_t { bytes, nibbles, either };

struct FamilyFacts {
  const char* name = "";
  Engine engine = Engine::byte_wise;
  uint32_t x = 0, w = 0, outs = 0;     // accepted types, bit per DType
  int32_t sm_min = 80, sm_end = 1000;  // runs where sm_min <= sm < sm_end
  int32_t x_align = 16, w_align = 16;  // bytes that rows of codes start on
  int32_t out_align = 1;
  int32_t k_multiple = 1;
  int32_t k_least = 0;
  int32_t m_max = 0;           // 0: any M
  int32_t group_multiple = 0;  // of the group size; 0: no group scales
  int32_t group_step = 0;      // sizes beyond half of it are multiples of it
  bool groups_only = false;    // takes problems with group scales only
  int32_t step_multiple = 0;   // of the codes that share a step; 0: no steps
  bool steps_only = false;     // takes weights with steps only
  int32_t channel_multiple =
      0;                      // of images whose rows are read through a window, the only x that it takes; 0: a matrix
  bool experts_only = false;  // takes the weights of many experts only; others take one matrix
  bool chooses_rows = false;  // of x, as a table says; others take them in order
  bool zero_point = true;     // of activations
  bool w_zero_point = false;
  Packing x_packing = Packing::bytes;
  uint32_t w_layouts = layout_bit(WeightLayout::natural);
  bool rounds_weights = false;  // to the type of x, as a framework's product of dequantised weights has them
  int32_t acc_scale = 1;        // the accumulator holds this multiple of the sum: it divides the bound of K
};

constexpr uint32_t kAllOuts = type_bit(DType::f16) | type_bit(DType::bf16) | type_bit(DType::f32) |
                              type_bit(DType::s32) | type_bit(DType::s8) | type_bit(DType::s4);
constexpr uint32_t kRealOuts = kAllOuts & ~type_bit(DType::s32);  // of float accumulators

// In the order of this list. A name here is a function of namespace `families` and a word of cmake/kernels.cmake.
#define PYQUANT_FAMILIES(X)     \
  X(simt)                       \
  X(sm80_s8s8)                  \
  X(sm80_u8s8)                  \
  X(sm80_s8s4)                  \
  X(sm80_s8s4_blocked)          \
  X(sm80_s8s4_groups)           \
  X(sm80_s8s4_steps)            \
  X(sm80_s4s4)                  \
  X(sm80_s8s8_experts)          \
  X(sm80_s8s4_experts)          \
  X(sm80_s8s4_blocked_experts)  \
  X(sm80_s8s4_groups_experts)   \
  X(sm80_s8s8_conv)             \
  X(sm80_f16)                   \
  X(sm80_bf16)                  \
  X(sm80_w8a16)                 \
  X(sm80_w4a16)                 \
  X(sm80_w8a16_experts)         \
  X(sm80_w4a16_experts)         \
  X(sm90_s8s8)                  \
  X(sm90_s8s8_experts)          \
  X(sm90_f16)                   \
  X(sm90_bf16)                  \
  X(sm90_s8s4)                  \
  X(sm90_s8s4_blocked)          \
  X(sm90_s8s4_blocked_experts)  \
  X(sm90_s8s4_groups)           \
  X(sm90_s8s4_groups_experts)   \
  X(sm90_s8s4_steps)            \
  X(sm90_s8s4_steps_experts)    \
  X(sm90_w8a16)                 \
  X(sm90_w4a16)                 \
  X(sm90_w8a16_rounded)         \
  X(sm90_w4a16_rounded)         \
  X(sm90_w8a16_rounded_experts) \
  X(sm90_w4a16_rounded_experts) \
  X(decode_s8s8)                \
  X(decode_s8s4)                \
  X(decode_s8s4_wide)           \
  X(decode_s8s4_blocked)        \
  X(decode_s8s4_steps)          \
  X(decode_w8a16)               \
  X(decode_w4a16)               \
  X(sm90_decode_s8s8)           \
  X(sm90_decode_s8s4)           \
  X(sm90_decode_s8s4_blocked)   \
  X(sm90_decode_s8s4_steps)     \
  X(sm90_decode_w8a16)          \
  X(sm90_decode_w4a16)

enum class Family : int32_t {
#define PYQUANT_FAMILY(NAME) NAME,
  PYQUANT_FAMILIES(PYQUANT_FAMILY)
#undef PYQUANT_FAMILY
};

namespace families {

// Common ground of the mma.sync families of CUTLASS 2.x: cp.async moves 16 bytes, whose codes are predicated as one.
constexpr FamilyFacts multistage(const char* name, DType x, DType w) {
  FamilyFacts f;
  f.name = name;
  f.engine = Engine::mma;
  f.x = type_bit(x);
  f.w = type_bit(w);
  f.outs = is_float(x) ? kRealOuts : kAllOuts;
  f.zero_point = !is_float(x);
  f.k_multiple = 128 / bits_of(bits_of(x) < bits_of(w) ? x : w);
  return f;
}

// Common ground of the wgmma families: TMA wants rows of codes on 16-byte boundaries and fills every tail.
constexpr FamilyFacts hopper(const char* name, DType x, DType w) {
  FamilyFacts f = multistage(name, x, w);
  f.engine = Engine::wgmma;
  f.sm_min = 90;
  f.sm_end = 91;
  f.k_multiple = 1;
  return f;
}

// Every problem, byte by byte.
constexpr FamilyFacts simt() {
  FamilyFacts f;
  f.name = "simt";
  f.x = type_bit(DType::s8) | type_bit(DType::u8) | type_bit(DType::s4);
  f.w = type_bit(DType::s8) | type_bit(DType::s4);
  f.outs = kAllOuts;
  f.x_align = f.w_align = 1;
  f.group_multiple = f.step_multiple = 1;
  f.x_packing = Packing::either;
  return f;
}

constexpr FamilyFacts sm80_s8s8() { return multistage("sm80_s8s8", DType::s8, DType::s8); }

constexpr FamilyFacts sm80_u8s8() { return multistage("sm80_u8s8", DType::u8, DType::s8); }

// Weights widen to bytes in registers.
constexpr FamilyFacts sm80_s8s4() {
  FamilyFacts f = multistage("sm80_s8s4", DType::s8, DType::s4);
  f.x |= type_bit(DType::s4);  // one per byte: s8 codes of a narrow range
  return f;
}

// Blocks of weights are whole, whatever K is; only the activations' 16-byte copies ask for something.
constexpr FamilyFacts with_blocks(FamilyFacts f, const char* name, int32_t group_multiple) {
  f.name = name;
  f.w_layouts = layout_bit(WeightLayout::blocked128);
  f.k_multiple = 16;
  f.group_multiple = group_multiple;
  return f;
}

// The same from weights packed for it: bytes of 16 times the code cost the fewest instructions.
constexpr FamilyFacts sm80_s8s4_blocked() {
  FamilyFacts f = with_blocks(sm80_s8s4(), "sm80_s8s4_blocked", 0);
  f.acc_scale = 16;
  return f;
}

// Group scales, which leave K whole; bytes of 16 times the weight's code. The group size says what K is a multiple of.
constexpr FamilyFacts sm80_s8s4_groups() {
  FamilyFacts f = sm80_s8s4();
  f.name = "sm80_s8s4_groups";
  f.outs = kRealOuts;
  f.k_multiple = 1;
  f.group_multiple = 32;
  f.groups_only = true;
  f.acc_scale = 16;
  return f;
}

// Steps, which are multiplied with the codes: the sum itself. How many codes share one says what K is a multiple of.
constexpr FamilyFacts with_steps(FamilyFacts f, const char* name, int32_t multiple) {
  f.name = name;
  f.acc_scale = 1;
  f.group_multiple = 0;
  f.step_multiple = multiple;
  f.steps_only = true;
  return f;
}

constexpr FamilyFacts sm80_s8s4_steps() {
  FamilyFacts f = with_steps(sm80_s8s4(), "sm80_s8s4_steps", 32);
  f.k_multiple = 1;
  return f;
}

// Later chips only emulate the 4-bit product, so that there is no code for them.
constexpr FamilyFacts sm80_s4s4() {
  FamilyFacts f = multistage("sm80_s4s4", DType::s4, DType::s4);
  f.sm_end = 90;
  f.x_packing = Packing::nibbles;
  return f;
}

// The experts of a mixture in one launch, whose results are floats.
constexpr FamilyFacts with_experts(FamilyFacts f, const char* name) {
  f.name = name;
  f.outs = type_bit(DType::f16) | type_bit(DType::bf16) | type_bit(DType::f32);
  f.experts_only = true;
  return f;
}

constexpr FamilyFacts sm80_s8s8_experts() { return with_experts(sm80_s8s8(), "sm80_s8s8_experts"); }
constexpr FamilyFacts sm80_s8s4_experts() { return with_experts(sm80_s8s4(), "sm80_s8s4_experts"); }

constexpr FamilyFacts sm80_s8s4_blocked_experts() {
  return with_experts(sm80_s8s4_blocked(), "sm80_s8s4_blocked_experts");
}

constexpr FamilyFacts sm80_s8s4_groups_experts() {
  return with_experts(sm80_s8s4_groups(), "sm80_s8s4_groups_experts");
}

// The rows of x lie in images, of which 16 bytes are copied at a time: they are channels of one pixel.
constexpr FamilyFacts sm80_s8s8_conv() {
  FamilyFacts f = sm80_s8s8();
  f.name = "sm80_s8s8_conv";
  f.channel_multiple = 16;
  return f;
}

constexpr FamilyFacts sm80_f16() { return multistage("sm80_f16", DType::f16, DType::f16); }
constexpr FamilyFacts sm80_bf16() { return multistage("sm80_bf16", DType::bf16, DType::bf16); }

// Integer weights under 16-bit activations, widened in registers: whole 16-byte pieces of weights, both kinds of
// floats.
constexpr FamilyFacts weight_only(const char* name, DType w) {
  FamilyFacts f = multistage(name, DType::f16, w);
  f.x |= type_bit(DType::bf16);
  f.w_zero_point = true;
  f.group_multiple = 32;
  return f;
}

constexpr FamilyFacts sm80_w8a16() { return weight_only("sm80_w8a16", DType::s8); }
constexpr FamilyFacts sm80_w4a16() { return weight_only("sm80_w4a16", DType::s4); }
// A row of x is copied for every expert that chose it: where it lies is asked once.
constexpr FamilyFacts with_chosen_rows(FamilyFacts f) {
  f.chooses_rows = true;
  return f;
}
constexpr FamilyFacts sm80_w8a16_experts() {
  return with_chosen_rows(with_experts(sm80_w8a16(), "sm80_w8a16_experts"));
}
constexpr FamilyFacts sm80_w4a16_experts() {
  return with_chosen_rows(with_experts(sm80_w4a16(), "sm80_w4a16_experts"));
}

constexpr FamilyFacts sm90_s8s8() { return hopper("sm90_s8s8", DType::s8, DType::s8); }

// The experts of a mixture by wgmma, whose main loops know no product of nothing.
constexpr FamilyFacts hopper_experts(FamilyFacts f, const char* name) {
  f = with_experts(f, name);
  f.k_least = 1;
  return f;
}

constexpr FamilyFacts sm90_s8s8_experts() { return hopper_experts(sm90_s8s8(), "sm90_s8s8_experts"); }
constexpr FamilyFacts sm90_f16() { return hopper("sm90_f16", DType::f16, DType::f16); }
constexpr FamilyFacts sm90_bf16() { return hopper("sm90_bf16", DType::bf16, DType::bf16); }

// int4 weights, widened to s8 in registers. int4 activations, one per byte, are s8 codes of a narrow range.
constexpr FamilyFacts sm90_s8s4() {
  FamilyFacts f = hopper("sm90_s8s4", DType::s8, DType::s4);
  f.x |= type_bit(DType::s4);
  return f;
}

// The same from weights packed for it: bytes of 16 times the code cost the fewest instructions.
constexpr FamilyFacts sm90_s8s4_blocked() {
  FamilyFacts f = sm90_s8s4();
  f.name = "sm90_s8s4_blocked";
  f.w_layouts = layout_bit(WeightLayout::blocked128);
  f.acc_scale = 16;
  return f;
}

constexpr FamilyFacts sm90_s8s4_blocked_experts() {
  return hopper_experts(sm90_s8s4_blocked(), "sm90_s8s4_blocked_experts");
}

// Group scales: the bound of K holds for a group.
constexpr FamilyFacts sm90_s8s4_groups() {
  FamilyFacts f = sm90_s8s4_blocked();
  f.name = "sm90_s8s4_groups";
  f.outs = kRealOuts;
  f.group_multiple = 64;
  f.groups_only = true;
  return f;
}

constexpr FamilyFacts sm90_s8s4_groups_experts() {
  return hopper_experts(sm90_s8s4_groups(), "sm90_s8s4_groups_experts");
}

// Codes times steps are bytes, as they are: the sum itself. A block has a step for 64 codes of a channel.
constexpr FamilyFacts sm90_s8s4_steps() {
  return with_steps(sm90_s8s4_blocked(), "sm90_s8s4_steps", kBlocked128StepCodes);
}

constexpr FamilyFacts sm90_s8s4_steps_experts() { return hopper_experts(sm90_s8s4_steps(), "sm90_s8s4_steps_experts"); }

// Integer weights as in a checkpoint under 16-bit activations. A step of K is a group, or several, or a part of one.
constexpr FamilyFacts hopper_weight_only(const char* name, DType w) {
  FamilyFacts f = weight_only(name, w);
  f.engine = Engine::wgmma;
  f.sm_min = 90;
  f.sm_end = 91;
  f.k_multiple = 1;
  f.group_step = 128;
  return f;
}

constexpr FamilyFacts sm90_w8a16() { return hopper_weight_only("sm90_w8a16", DType::s8); }
constexpr FamilyFacts sm90_w4a16() { return hopper_weight_only("sm90_w4a16", DType::s4); }

// Scaled and rounded before they are multiplied, 32 codes at a time.
constexpr FamilyFacts with_rounded_weights(FamilyFacts f, const char* name) {
  f.name = name;
  f.group_step = 0;
  f.rounds_weights = true;
  return f;
}

constexpr FamilyFacts sm90_w8a16_rounded() { return with_rounded_weights(sm90_w8a16(), "sm90_w8a16_rounded"); }
constexpr FamilyFacts sm90_w4a16_rounded() { return with_rounded_weights(sm90_w4a16(), "sm90_w4a16_rounded"); }

constexpr FamilyFacts sm90_w8a16_rounded_experts() {
  return hopper_experts(sm90_w8a16_rounded(), "sm90_w8a16_rounded_experts");
}
constexpr FamilyFacts sm90_w4a16_rounded_experts() {
  return hopper_experts(sm90_w4a16_rounded(), "sm90_w4a16_rounded_experts");
}

// Shared by the kernels for few tokens: 16-byte loads of rows of weights, so K is a whole number of loads.
constexpr FamilyFacts decode(const char* name, DType x, DType w) {
  FamilyFacts f = multistage(name, x, w);
  f.engine = Engine::decode;
  f.k_multiple = 128 / bits_of(w);
  if (is_float(x)) {
    f.m_max = 128;  // several tiles of tokens, as far as the cost model was looked at
    f.x = type_bit(DType::f16) | type_bit(DType::bf16);
    f.w_zero_point = true;
    f.group_multiple = 32;
  }
  return f;
}

// The same with clusters. Group scales of integers are added in order by one block, which gains nothing here.
constexpr FamilyFacts hopper_decode(const char* name, DType x, DType w) {
  FamilyFacts f = decode(name, x, w);
  if (is_float(x)) f.m_max = 32;  // beyond, those without clusters
  f.sm_min = 90;
  f.sm_end = 91;
  return f;
}

// A nibble is multiplied as its code times 16. Activations of 4 bits are stored one per byte.
constexpr FamilyFacts with_int4(FamilyFacts f) {
  f.x |= type_bit(DType::s4);
  f.acc_scale = 16;
  return f;
}

constexpr FamilyFacts decode_s8s8() { return decode("decode_s8s8", DType::s8, DType::s8); }
constexpr FamilyFacts decode_s8s4() {
  FamilyFacts f = with_int4(decode("decode_s8s4", DType::s8, DType::s4));
  f.group_multiple = 64;
  return f;
}
// Tiles of more than 16 tokens: shared memory has no room for their scaled sums of groups.
constexpr FamilyFacts decode_s8s4_wide() { return with_int4(decode("decode_s8s4_wide", DType::s8, DType::s4)); }
constexpr FamilyFacts decode_w8a16() { return decode("decode_w8a16", DType::f16, DType::s8); }
constexpr FamilyFacts decode_w4a16() { return decode("decode_w4a16", DType::f16, DType::s4); }
constexpr FamilyFacts sm90_decode_s8s8() { return hopper_decode("sm90_decode_s8s8", DType::s8, DType::s8); }
constexpr FamilyFacts sm90_decode_s8s4() { return with_int4(hopper_decode("sm90_decode_s8s4", DType::s8, DType::s4)); }
// Weights with group scales are blocked for Hopper alone.
constexpr FamilyFacts decode_s8s4_blocked() { return with_blocks(decode_s8s4_wide(), "decode_s8s4_blocked", 0); }
constexpr FamilyFacts sm90_decode_s8s4_blocked() {
  return with_blocks(sm90_decode_s8s4(), "sm90_decode_s8s4_blocked", 64);
}
constexpr FamilyFacts decode_s8s4_steps() { return with_steps(decode_s8s4_wide(), "decode_s8s4_steps", 32); }
constexpr FamilyFacts sm90_decode_s8s4_steps() {
  return with_steps(sm90_decode_s8s4_blocked(), "sm90_decode_s8s4_steps", kBlocked128StepCodes);
}
constexpr FamilyFacts sm90_decode_w8a16() { return hopper_decode("sm90_decode_w8a16", DType::f16, DType::s8); }
constexpr FamilyFacts sm90_decode_w4a16() { return hopper_decode("sm90_decode_w4a16", DType::f16, DType::s4); }

}  // namespace families

constexpr FamilyFacts kFamilyFacts[] = {
#define PYQUANT_FAMILY(NAME) families::NAME(),
    PYQUANT_FAMILIES(PYQUANT_FAMILY)
#undef PYQUANT_FAMILY
};

constexpr const FamilyFacts& facts_of(Family family) { return kFamilyFacts[static_cast<int32_t>(family)]; }

}  // namespace pyquant

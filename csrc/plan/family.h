// What each family of GEMM kernels takes: the only place that says it. accept(), the kernel table, the cost model and
// the tests' random problems are readings of these facts. A family shares one C++ template (csrc/cuda/gemm) and is
// instantiated by the rows of cmake/kernels.cmake.
#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/problem.h"

namespace pyquant {

// Which unit multiplies.
enum class Engine : int32_t { byte_wise, mma, wgmma, decode };
// How int4 activations may lie in memory.
enum class Packing : int32_t { bytes, nibbles, either };

struct FamilyFacts {
  const char* name = "";
  Engine engine = Engine::byte_wise;
  uint32_t x = 0, w = 0, outs = 0;     // accepted types, bit per DType
  int32_t sm_min = 80, sm_end = 1000;  // runs where sm_min <= sm < sm_end
  int32_t x_align = 16, w_align = 16;  // bytes that rows of codes start on
  int32_t out_align = 1;
  int32_t k_multiple = 1;
  int32_t m_max = 0;           // 0: any M
  int32_t group_multiple = 0;  // of the group size; 0: no group scales
  bool groups_only = false;    // takes problems with group scales only
  bool zero_point = true;      // of activations
  bool w_zero_point = false;
  Packing x_packing = Packing::bytes;
  uint32_t w_layouts = layout_bit(WeightLayout::natural);
  int32_t acc_scale = 1;  // the accumulator holds this multiple of the sum: it divides the bound of K
};

constexpr uint32_t kAllOuts = type_bit(DType::f16) | type_bit(DType::bf16) | type_bit(DType::f32) |
                              type_bit(DType::s32) | type_bit(DType::s8) | type_bit(DType::s4);
constexpr uint32_t kRealOuts = kAllOuts & ~type_bit(DType::s32);  // of float accumulators

// In the order of this list. A name here is a function of namespace `families` and a word of cmake/kernels.cmake.
#define PYQUANT_FAMILIES(X) \
  X(simt)                   \
  X(sm80_s8s8)              \
  X(sm90_s8s8)

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
  f.group_multiple = 1;
  f.x_packing = Packing::either;
  return f;
}

constexpr FamilyFacts sm80_s8s8() { return multistage("sm80_s8s8", DType::s8, DType::s8); }

constexpr FamilyFacts sm90_s8s8() { return hopper("sm90_s8s8", DType::s8, DType::s8); }

}  // namespace families

constexpr FamilyFacts kFamilyFacts[] = {
#define PYQUANT_FAMILY(NAME) families::NAME(),
    PYQUANT_FAMILIES(PYQUANT_FAMILY)
#undef PYQUANT_FAMILY
};

constexpr const FamilyFacts& facts_of(Family family) { return kFamilyFacts[static_cast<int32_t>(family)]; }

}  // namespace pyquant

// The table of GEMM kernels: one row per instance, read from the generated kernels.inc (source: cmake/kernels.cmake).
// Selection, kernel_table(), launch tables and tests are all readings of it.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace pyquant {

enum class Family : int32_t { simt = 0, sm80 = 1, sm90 = 2 };

constexpr uint32_t type_bit(DType t) { return 1u << static_cast<int32_t>(t); }
constexpr uint32_t kAnyOut =
    type_bit(DType::f16) | type_bit(DType::bf16) | type_bit(DType::f32) | type_bit(DType::s32) | type_bit(DType::s8);
// x codes and weight codes that the byte-wise family widens itself.
constexpr uint32_t kByteCodes = type_bit(DType::s8) | type_bit(DType::u8) | type_bit(DType::s4);
constexpr uint32_t kSignedCodes = type_bit(DType::s8) | type_bit(DType::s4);

struct Row {
  const char* name;
  Family family;
  uint32_t x, w, outs;  // accepted types, bit per DType
  int32_t tile_m, tile_n, tile_k;
  int32_t cluster_m, cluster_n;
  const char* schedule;    // simt, multistage, pingpong, cooperative
  int32_t sm_min, sm_end;  // runs where sm_min <= sm < sm_end
  bool compiled;           // has machine code in this build
};

const Row* rows();
int row_count();
const Row* find_row(const char* name);  // null when there is none

constexpr const char* name_of(Family family) {
  switch (family) {
    case Family::sm80: return "sm80";
    case Family::sm90: return "sm90";
    default: return "simt";
  }
}

}  // namespace pyquant

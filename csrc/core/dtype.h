// Element types of operands and results: the C++ twin of pyquant/core/dtypes.py (a test compares the two tables).
#pragma once
#include <cstdint>

namespace pyquant {

enum class DType : int32_t { s4 = 0, s8 = 1, u8 = 2, s32 = 3, f16 = 4, bf16 = 5, f32 = 6 };

constexpr int bits_of(DType t) {
  switch (t) {
    case DType::s4: return 4;
    case DType::s8:
    case DType::u8: return 8;
    case DType::f16:
    case DType::bf16: return 16;
    default: return 32;
  }
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::s4: return "s4";
    case DType::s8: return "s8";
    case DType::u8: return "u8";
    case DType::s32: return "s32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    default: return "f32";
  }
}

// One bit per type, for sets of types.
constexpr uint32_t type_bit(DType t) { return 1u << static_cast<int32_t>(t); }

constexpr bool is_float(DType t) { return t == DType::f16 || t == DType::bf16 || t == DType::f32; }

// How many elements of a tensor share one scale. rows: one per row of the last dimension, which is
// per_token for activations [M, K] and per_channel for weights [N, K].
enum class Granularity : int32_t { tensor = 0, rows = 1, groups = 2 };

}  // namespace pyquant

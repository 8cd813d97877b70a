// Element types of operands and results, the code types among them with all their facts, and the products that kernels
// multiply: the C++ twin of pyquant/core/dtypes.py (tests/core/test_core.py compares the two).
#pragma once
#include <cstdint>
#include <stdexcept>

namespace pyquant {

enum class DType : int32_t { s4 = 0, s8 = 1, u8 = 2, s32 = 3, f16 = 4, bf16 = 5, f32 = 6 };

inline constexpr DType kTypes[] = {DType::s4, DType::s8, DType::u8, DType::s32, DType::f16, DType::bf16, DType::f32};

// One integer code type. What depends on the type of codes reads it here and compares no number of bits.
struct CodeType {
  DType type;
  const char* name;
  int32_t bits;        // of one code
  int32_t qmin, qmax;  // every code that there is; specs may use fewer
  int32_t per_byte;    // codes in a byte of a packed row, the first one in its low bits

  constexpr bool is_signed() const { return qmin < 0; }
  constexpr bool is_packed() const { return per_byte > 1; }
  // The largest absolute code, which bounds K (docs/numerics.md 3); less any zero point of the type: span().
  constexpr int64_t largest() const { return -qmin > qmax ? -int64_t{qmin} : int64_t{qmax}; }
  constexpr int64_t span() const { return int64_t{qmax} - qmin; }
  constexpr bool holds(int64_t low, int64_t high) const { return qmin <= low && high <= qmax; }
};

inline constexpr CodeType kCodeTypes[] = {
    {DType::s4, "s4", 4, -8, 7, 2},
    {DType::s8, "s8", 8, -128, 127, 1},
    {DType::u8, "u8", 8, 0, 255, 1},
};

inline constexpr int32_t kCodeTypeCount = sizeof kCodeTypes / sizeof *kCodeTypes;

// Its place in kCodeTypes; -1: not a type of codes. A number, because the null checks of g++'s UBSan (as of 12) make a
// pointer into the table no constant expression.
constexpr int32_t code_index(DType t) {
  for (int32_t i = 0; i < kCodeTypeCount; ++i)
    if (kCodeTypes[i].type == t) return i;
  return -1;
}

// Null: not a type of codes.
constexpr const CodeType* find_code_type(DType t) {
  const int32_t i = code_index(t);
  return i < 0 ? nullptr : &kCodeTypes[i];
}

// Precondition: a type of codes.
constexpr const CodeType& code_type(DType t) {
  const int32_t i = code_index(t);
  return i < 0 ? throw std::invalid_argument("not a type of codes") : kCodeTypes[i];
}

// The packed type that holds codes from qmin to qmax; null: they take a byte each.
constexpr const CodeType* packed_type(int64_t qmin, int64_t qmax) {
  for (const CodeType& code : kCodeTypes)
    if (code.is_packed() && code.holds(qmin, qmax)) return &code;
  return nullptr;
}

// Products of activations and weights, a gemm_<x><w> each. s8 activations may come as u8 codes too.
#define PYQUANT_PRODUCTS(X) \
  X(s8, s8)                 \
  X(s8, s4)                 \
  X(s4, s4)

struct Product {
  DType x, w;
};

inline constexpr Product kProducts[] = {
#define PYQUANT_PRODUCT(X, W) {DType::X, DType::W},
    PYQUANT_PRODUCTS(PYQUANT_PRODUCT)
#undef PYQUANT_PRODUCT
};

// The type of weights whose codes have so many bits; null: no product has such weights.
constexpr const CodeType* weight_type(int64_t bits) {
  for (const Product& product : kProducts)
    if (code_type(product.w).bits == bits) return &code_type(product.w);
  return nullptr;
}

// Bits of an element in memory, where packed codes share a byte.
constexpr int32_t bits_of(DType t) {
  switch (t) {
    case DType::f16:
    case DType::bf16: return 16;
    case DType::s32:
    case DType::f32: return 32;
    default: return 8 / code_type(t).per_byte;
  }
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::s32: return "s32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f32: return "f32";
    default: return code_type(t).name;
  }
}

// One bit per type, for sets of types.
constexpr uint32_t type_bit(DType t) { return 1u << static_cast<int32_t>(t); }

constexpr bool is_float(DType t) { return t == DType::f16 || t == DType::bf16 || t == DType::f32; }

// ---- Rows in memory, of any type. Strides count elements.

constexpr int32_t per_byte(DType t) {
  const int32_t i = code_index(t);
  return i < 0 ? 1 : kCodeTypes[i].per_byte;
}
constexpr bool is_packed(DType t) { return per_byte(t) > 1; }
// bits_of, or of codes that take a byte each though their type is packed.
constexpr int32_t stored_bits(DType t, bool packed) { return is_packed(t) && !packed ? 8 : bits_of(t); }
// Of an element that takes whole bytes.
constexpr int64_t bytes_of(DType t) { return bits_of(t) / 8; }
// Elements of the tensor that holds a row of k: bytes where codes share them.
constexpr int64_t columns_of(DType t, int64_t k) { return (k + per_byte(t) - 1) / per_byte(t); }
// k rounded up to whole bytes.
constexpr int64_t whole_bytes(DType t, int64_t k) { return columns_of(t, k) * per_byte(t); }

// How many elements of a tensor share one scale. rows: one per row of the last dimension, which is
// per_token for activations [M, K] and per_channel for weights [N, K].
enum class Granularity : int32_t { tensor = 0, rows = 1, groups = 2 };

}  // namespace pyquant

// Formatted text, errors, and the names of types.
#include "ptx/module.h"
#include <cstdarg>
#include <cstdio>

namespace ptxsim {

const Fp8Tables g_fp8;

std::string strf(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  va_list ap2;
  va_copy(ap2, ap);
  int n = vsnprintf(nullptr, 0, fmt, ap);
  va_end(ap);
  std::string s((size_t)n, 0);
  vsnprintf(s.data(), (size_t)n + 1, fmt, ap2);
  va_end(ap2);
  return s;
}
void fail(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  char buf[4096];
  vsnprintf(buf, sizeof buf, fmt, ap);
  va_end(ap);
  throw SimError(buf);
}

static const struct {
  const char* n;
  Ty t;
  int bits;
} kTypes[] = {
    {"pred", Ty::PRED, 1},  {"b8", Ty::B8, 8},          {"b16", Ty::B16, 16},       {"b32", Ty::B32, 32},
    {"b64", Ty::B64, 64},   {"b128", Ty::B128, 128},    {"u8", Ty::U8, 8},          {"u16", Ty::U16, 16},
    {"u32", Ty::U32, 32},   {"u64", Ty::U64, 64},       {"s8", Ty::S8, 8},          {"s16", Ty::S16, 16},
    {"s32", Ty::S32, 32},   {"s64", Ty::S64, 64},       {"f16", Ty::F16, 16},       {"f16x2", Ty::F16X2, 32},
    {"bf16", Ty::BF16, 16}, {"bf16x2", Ty::BF16X2, 32}, {"f32", Ty::F32, 32},       {"f64", Ty::F64, 64},
    {"tf32", Ty::TF32, 32}, {"u16x2", Ty::U16X2, 32},   {"s16x2", Ty::S16X2, 32},   {"f32x2", Ty::F32X2, 64},
    {"e4m3", Ty::E4M3, 8},  {"e5m2", Ty::E5M2, 8},      {"e4m3x2", Ty::E4M3X2, 16}, {"e5m2x2", Ty::E5M2X2, 16},
    {"s4", Ty::S4, 4},      {"u4", Ty::U4, 4},          {"b1", Ty::B1, 1},
};
int tyBits(Ty t) {
  for (auto& e : kTypes)
    if (e.t == t) return e.bits;
  return 0;
}
const char* tyName(Ty t) {
  for (auto& e : kTypes)
    if (e.t == t) return e.n;
  return "?";
}
bool tyParse(std::string_view s, Ty& t) {
  for (auto& e : kTypes)
    if (s == e.n) {
      t = e.t;
      return true;
    }
  return false;
}
bool tyFloat(Ty t) {
  return t == Ty::F16 || t == Ty::BF16 || t == Ty::F32 || t == Ty::F64 || t == Ty::F16X2 || t == Ty::BF16X2 ||
         t == Ty::F32X2;
}
bool tySigned(Ty t) { return t == Ty::S8 || t == Ty::S16 || t == Ty::S32 || t == Ty::S64 || t == Ty::S4; }

}  // namespace ptxsim

// Registers as handlers see them: 32 lanes of a slot, sources and destinations by type.
#pragma once
#include "machine/warp.h"

namespace ptxsim {

inline const u32* srcw(const Warp& w, s32 o) { return (o >= 0 ? w.regs : w.kp) + (o & 0x7fffffff); }
template <class T>
struct CellOf {
  using type = u32;
};
template <>
struct CellOf<u64> {
  using type = u64;
};
template <>
struct CellOf<s64> {
  using type = u64;
};
template <>
struct CellOf<double> {
  using type = u64;
};
template <class T>
using cell_t = typename CellOf<T>::type;
template <class T>
inline const cell_t<T>* src(const Warp& w, s32 o) {
  return (const cell_t<T>*)srcw(w, o);
}
template <class T>
inline cell_t<T>* dst(Warp& w, s32 o) {
  return (cell_t<T>*)(w.regs + o);
}
template <class T>
inline T get(cell_t<T> c) {
  if constexpr (std::is_same_v<T, float>)
    return bitsf(c);
  else if constexpr (std::is_same_v<T, double>)
    return bitsd(c);
  else
    return (T)c;
}
template <class T>
inline cell_t<T> put(T v) {
  if constexpr (std::is_same_v<T, float>)
    return fbits(v);
  else if constexpr (std::is_same_v<T, double>)
    return dbits(v);
  else if constexpr (sizeof(T) <= 4)
    return (u32)(std::make_unsigned_t<T>)v;
  else
    return (u64)v;
}
inline int ffs32(u32 m) { return __builtin_ctz(m); }
#define FOR_LANES(i, m) for (u32 _m = (m), i = 0; _m && (i = (u32)__builtin_ctz(_m), true); _m &= _m - 1)

}  // namespace ptxsim

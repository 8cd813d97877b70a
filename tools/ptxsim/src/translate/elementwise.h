// Handlers that apply a function to every lane, and their translation.
#pragma once
#include "translate/translator.h"

namespace ptxsim {

template <class T>
struct Tag {
  using type = T;
};
template <class T, class F>
void h1(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<T>(w, I.a);
  auto* d = dst<T>(w, I.d);
  if (m == ~0u) {
#pragma GCC ivdep
    for (int i = 0; i < 32; ++i) d[i] = put<T>((T)f(get<T>(a[i])));
  } else
    FOR_LANES(i, m) d[i] = put<T>((T)f(get<T>(a[i])));
}
template <class T, class F>
void h2(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<T>(w, I.a);
  auto* b = src<T>(w, I.b);
  auto* d = dst<T>(w, I.d);
  if (m == ~0u) {
#pragma GCC ivdep
    for (int i = 0; i < 32; ++i) d[i] = put<T>((T)f(get<T>(a[i]), get<T>(b[i])));
  } else
    FOR_LANES(i, m) d[i] = put<T>((T)f(get<T>(a[i]), get<T>(b[i])));
}
template <class T, class F>
void h3(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<T>(w, I.a);
  auto* b = src<T>(w, I.b);
  auto* c = src<T>(w, I.c);
  auto* d = dst<T>(w, I.d);
  if (m == ~0u) {
#pragma GCC ivdep
    for (int i = 0; i < 32; ++i) d[i] = put<T>((T)f(get<T>(a[i]), get<T>(b[i]), get<T>(c[i])));
  } else
    FOR_LANES(i, m) d[i] = put<T>((T)f(get<T>(a[i]), get<T>(b[i]), get<T>(c[i])));
}
// mixed types: D f(A), D f(A,B), D f(A,B,C)
template <class R, class A, class F>
void g1(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<A>(w, I.a);
  auto* d = dst<R>(w, I.d);
  if (m == ~0u) {
#pragma GCC ivdep
    for (int i = 0; i < 32; ++i) d[i] = put<R>((R)f(get<A>(a[i])));
  } else
    FOR_LANES(i, m) d[i] = put<R>((R)f(get<A>(a[i])));
}
template <class R, class A, class B, class F>
void g2(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<A>(w, I.a);
  auto* b = src<B>(w, I.b);
  auto* d = dst<R>(w, I.d);
  if (m == ~0u) {
#pragma GCC ivdep
    for (int i = 0; i < 32; ++i) d[i] = put<R>((R)f(get<A>(a[i]), get<B>(b[i])));
  } else
    FOR_LANES(i, m) d[i] = put<R>((R)f(get<A>(a[i]), get<B>(b[i])));
}
template <class R, class A, class B, class C, class F>
void g3(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<A>(w, I.a);
  auto* b = src<B>(w, I.b);
  auto* c = src<C>(w, I.c);
  auto* d = dst<R>(w, I.d);
  if (m == ~0u) {
#pragma GCC ivdep
    for (int i = 0; i < 32; ++i) d[i] = put<R>((R)f(get<A>(a[i]), get<B>(b[i]), get<C>(c[i])));
  } else
    FOR_LANES(i, m) d[i] = put<R>((R)f(get<A>(a[i]), get<B>(b[i]), get<C>(c[i])));
}
// slow forms with access to the instruction (flags)
template <class T, class F>
void hs1(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<T>(w, I.a);
  auto* d = dst<T>(w, I.d);
  FOR_LANES(i, m) d[i] = put<T>((T)f(I, get<T>(a[i])));
}
template <class T, class F>
void hs2(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<T>(w, I.a);
  auto* b = src<T>(w, I.b);
  auto* d = dst<T>(w, I.d);
  FOR_LANES(i, m) d[i] = put<T>((T)f(I, get<T>(a[i]), get<T>(b[i])));
}
template <class T, class F>
void hs3(Warp& w, const Inst& I, u32 m) {
  F f;
  auto* a = src<T>(w, I.a);
  auto* b = src<T>(w, I.b);
  auto* c = src<T>(w, I.c);
  auto* d = dst<T>(w, I.d);
  FOR_LANES(i, m) d[i] = put<T>((T)f(I, get<T>(a[i]), get<T>(b[i]), get<T>(c[i])));
}
template <class T, class F>
Inst& emit1(Tr& t, Ty ty, F, Cls c = C_INT) {
  s32 a = t.S(1, ty);
  s32 d = t.D(0, ty);
  Inst& I = t.out(h1<T, F>, c);
  I.a = a;
  I.d = d;
  return I;
}
template <class T, class F>
Inst& emit2(Tr& t, Ty ty, F, Cls c = C_INT) {
  s32 a = t.S(1, ty), b = t.S(2, ty);
  s32 d = t.D(0, ty);
  Inst& I = t.out(h2<T, F>, c);
  I.a = a;
  I.b = b;
  I.d = d;
  return I;
}
template <class T, class F>
Inst& emit3(Tr& t, Ty ty, F, Cls cl = C_INT) {
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty);
  s32 d = t.D(0, ty);
  Inst& I = t.out(h3<T, F>, cl);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  return I;
}
template <class T, class F>
Inst& emitS1(Tr& t, Ty ty, F, Cls c = C_INT) {
  s32 a = t.S(1, ty);
  s32 d = t.D(0, ty);
  Inst& I = t.out(hs1<T, F>, c);
  I.a = a;
  I.d = d;
  return I;
}
template <class T, class F>
Inst& emitS2(Tr& t, Ty ty, F, Cls c = C_INT) {
  s32 a = t.S(1, ty), b = t.S(2, ty);
  s32 d = t.D(0, ty);
  Inst& I = t.out(hs2<T, F>, c);
  I.a = a;
  I.b = b;
  I.d = d;
  return I;
}
template <class T, class F>
Inst& emitS3(Tr& t, Ty ty, F, Cls cl = C_INT) {
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty);
  s32 d = t.D(0, ty);
  Inst& I = t.out(hs3<T, F>, cl);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  return I;
}

// dispatch on integer types
template <class F>
void intTy(Tr& t, Ty ty, F f) {
  switch (ty) {
    case Ty::U8: f(Tag<u8>{}); return;
    case Ty::S8: f(Tag<s8>{}); return;
    case Ty::U16:
    case Ty::B16: f(Tag<u16>{}); return;
    case Ty::S16: f(Tag<s16>{}); return;
    case Ty::U32:
    case Ty::B32: f(Tag<u32>{}); return;
    case Ty::S32: f(Tag<s32>{}); return;
    case Ty::U64:
    case Ty::B64: f(Tag<u64>{}); return;
    case Ty::S64: f(Tag<s64>{}); return;
    default: t.err(std::string("unsupported type .") + tyName(ty));
  }
}

}  // namespace ptxsim

// Translation of one kernel into bytecode.
#pragma once
#include "sim.h"
#include <algorithm>
#include <set>

namespace ptxsim {
struct Tr;
using EmitFn = void (*)(Tr&);
std::unordered_map<std::string, EmitFn>& opTable();
void registerAlu();
void registerMem();
void registerSync();
void registerTensor();

struct Tr {
  Program& P;
  std::vector<PInst> list;  // flattened, inlined
  std::vector<Ty> regTy;
  std::vector<int> labelPos;   // label -> list index
  std::vector<s32> slot;       // reg -> word slot or predicate index
  std::vector<u32> instStart;  // list index -> bytecode index
  std::vector<std::vector<int>> tables;
  std::unordered_map<Var*, u64> sharedAddr;
  std::map<std::pair<u64, int>, s32> kcache;
  std::vector<int> wgReg;  // reg -> wgmma id
  const PInst* in = nullptr;
  std::vector<char> used;
  explicit Tr(Program& p) : P(p) {}

  [[noreturn]] void err(const std::string& s);
  bool has(const char* m) {
    bool r = false;
    for (size_t i = 1; i < in->mods.size(); ++i)
      if (in->mods[i] == m) {
        used[i] = 1;
        r = true;
      }
    return r;
  }
  bool hasAny(std::initializer_list<const char*> l) {
    bool r = false;
    for (auto m : l) r |= has(m);
    return r;
  }
  void ignore(std::initializer_list<const char*> l) {
    for (auto m : l) has(m);
  }
  std::string mod(size_t i) {
    if (i < in->mods.size()) {
      used[i] = 1;
      return in->mods[i];
    }
    return "";
  }
  // all type modifiers in order
  std::vector<Ty> types() {
    std::vector<Ty> r;
    for (size_t i = 1; i < in->mods.size(); ++i) {
      Ty t;
      if (tyParse(in->mods[i], t)) {
        used[i] = 1;
        r.push_back(t);
      }
    }
    return r;
  }
  Ty type() {
    auto t = types();
    if (t.empty()) err("missing type");
    return t.back();
  }
  size_t nops() const { return in->ops.size(); }
  const Operand& op(size_t i) {
    if (i >= in->ops.size()) err("too few operands");
    return in->ops[i];
  }
  Ty opTy(const Operand& o) {
    if (o.k != Operand::REG) return Ty::NONE;
    return regTy[o.reg];
  }
  s32 konst(u64 v, int bytes);    // broadcast constant slot
  s32 S(const Operand& o, Ty t);  // source slot as type t (width from t)
  s32 S(size_t i, Ty t) { return S(op(i), t); }
  s32 D(const Operand& o, int bytes);  // destination slot; bytes = cell size 4 or 8
  s32 D(size_t i, int bytes) { return D(op(i), bytes); }
  s32 D(size_t i, Ty t) { return D(op(i), tyBits(t) > 32 ? 8 : 4); }
  s32 pred(const Operand& o, bool& neg);
  s32 predD(const Operand& o);
  Inst& out(Handler h, Cls c);
  void addr(Inst& I, const Operand& o);  // fills a (base slot), imm
  const s32* aux(std::vector<s32> v) {
    P.aux.push_back(std::move(v));
    return P.aux.back().data();
  }
  int cellBytes(const Operand& o) { return tyBits(regTy[o.reg]) > 32 ? 8 : 4; }
  void run();

 private:
  void expand(Function& f, int depth, std::unordered_map<Var*, u64>& pmap, int retLabel,
              std::vector<std::string>& stack);
  void allocRegs();
  u32 localTop = 0, staticTop = kSmemBase;
};

// ---- template helpers for element-wise handlers ----------------------------------------------
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

// Comparisons and selections.
#include "instructions/comparison.h"
#include "instructions/rounding.h"
#include "translate/elementwise.h"

namespace ptxsim {

// ---- comparisons ----
static int parseCmp(Tr& t, Ty& ty) {
  static const struct {
    const char* n;
    int c;
    bool uns;
  } k[] = {{"eq", EQ, 0},   {"ne", NE, 0},   {"lt", LT, 0},   {"le", LE, 0},   {"gt", GT, 0},   {"ge", GE, 0},
           {"lo", LT, 1},   {"ls", LE, 1},   {"hi", GT, 1},   {"hs", GE, 1},   {"equ", EQU, 0}, {"neu", NEU, 0},
           {"ltu", LTU, 0}, {"leu", LEU, 0}, {"gtu", GTU, 0}, {"geu", GEU, 0}, {"num", NUM, 0}, {"nan", NAN_, 0}};
  std::string m = t.mod(1);
  for (auto& e : k)
    if (m == e.n) {
      if (e.uns && ty == Ty::S32) ty = Ty::U32;
      return e.c;
    }
  t.err("unknown comparison " + m);
}
// fl: bits 0-1 combine (0 none 1 and 2 or 3 xor), bit 2: negate c, bit 3: has q, bit 4: ftz
static inline void setpStore(Warp& w, const Inst& I, u32 m, u32 r) {
  u32 q = ~r;
  if (I.fl & 3) {
    u32 c = w.preds[I.c] ^ (I.fl & 4 ? ~0u : 0);
    switch (I.fl & 3) {
      case 1:
        r &= c;
        q &= c;
        break;
      case 2:
        r |= c;
        q |= c;
        break;
      case 3:
        r ^= c;
        q ^= c;
        break;
    }
  }
  if (I.fl & 8) w.preds[I.e] = (w.preds[I.e] & ~m) | (q & m);
  w.preds[I.d] = (w.preds[I.d] & ~m) | (r & m);
}
template <class T, int C>
static void hsetp(Warp& w, const Inst& I, u32 m) {
  auto* a = src<T>(w, I.a);
  auto* b = src<T>(w, I.b);
  u32 r = 0;
  for (int i = 0; i < 32; ++i) {
    T x = get<T>(a[i]), y = get<T>(b[i]);
    if constexpr (std::is_same_v<T, float>)
      if (I.fl & 16) {
        x = ftzf(x);
        y = ftzf(y);
      }
    r |= (u32)cmpF<T>(C, x, y) << i;
  }
  setpStore(w, I, m, r);
}
template <class H>
static void hsetpH(Warp& w, const Inst& I, u32 m) {
  auto* a = src<u32>(w, I.a);
  auto* b = src<u32>(w, I.b);
  u32 r = 0;
  FOR_LANES(i, m) r |= (u32)cmpF<float>((int)I.imm, H::up((u16)a[i]), H::up((u16)b[i])) << i;
  setpStore(w, I, m, r);
}
template <class H>
static void hsetpH2(Warp& w, const Inst& I, u32 m) {
  auto* a = src<u32>(w, I.a);
  auto* b = src<u32>(w, I.b);
  u32 r = 0, q = 0;
  FOR_LANES(i, m) {
    r |= (u32)cmpF<float>((int)I.imm, H::up((u16)a[i]), H::up((u16)b[i])) << i;
    q |= (u32)cmpF<float>((int)I.imm, H::up((u16)(a[i] >> 16)), H::up((u16)(b[i] >> 16))) << i;
  }
  if (I.fl & 3) {
    u32 c = w.preds[I.c] ^ (I.fl & 4 ? ~0u : 0);
    auto cb = [&](u32 x) { return (I.fl & 3) == 1 ? x & c : (I.fl & 3) == 2 ? x | c : x ^ c; };
    r = cb(r);
    q = cb(q);
  }
  w.preds[I.d] = (w.preds[I.d] & ~m) | (r & m);
  w.preds[I.e] = (w.preds[I.e] & ~m) | (q & m);
}
template <class T>
static Handler pickCmp(int c) {
  static const Handler h[] = {hsetp<T, EQ>,  hsetp<T, NE>,  hsetp<T, LT>,  hsetp<T, LE>,  hsetp<T, GT>,
                              hsetp<T, GE>,  hsetp<T, EQU>, hsetp<T, NEU>, hsetp<T, LTU>, hsetp<T, LEU>,
                              hsetp<T, GTU>, hsetp<T, GEU>, hsetp<T, NUM>, hsetp<T, NAN_>};
  return h[c];
}
OP(setp) {
  Ty ty = t.type();
  int c = parseCmp(t, ty);
  u32 fl = 0;
  if (t.has("and"))
    fl = 1;
  else if (t.has("or"))
    fl = 2;
  else if (t.has("xor"))
    fl = 3;
  if (t.has("ftz")) fl |= 16;
  s32 a = t.S(1, ty), b = t.S(2, ty), cc = 0;
  if (fl & 3) {
    bool n;
    cc = t.pred(t.op(3), n);
    if (n) fl |= 4;
  }
  const Operand& d0 = t.op(0);
  s32 d, e = 2;
  if (d0.k == Operand::PAIR) {
    d = t.predD(d0.v[0]);
    e = t.predD(d0.v[1]);
    fl |= 8;
  } else
    d = t.predD(d0);
  Handler h;
  switch (ty) {
    case Ty::F32: h = pickCmp<float>(c); break;
    case Ty::F64: h = pickCmp<double>(c); break;
    case Ty::F16: h = hsetpH<HF>; break;
    case Ty::BF16: h = hsetpH<BF>; break;
    case Ty::F16X2: h = hsetpH2<HF>; break;
    case Ty::BF16X2: h = hsetpH2<BF>; break;
    case Ty::U16:
    case Ty::B16: h = pickCmp<u16>(c); break;
    case Ty::S16: h = pickCmp<s16>(c); break;
    case Ty::U32:
    case Ty::B32: h = pickCmp<u32>(c); break;
    case Ty::S32: h = pickCmp<s32>(c); break;
    case Ty::U64:
    case Ty::B64: h = pickCmp<u64>(c); break;
    case Ty::S64: h = pickCmp<s64>(c); break;
    default: t.err("setp type");
  }
  Inst& I = t.out(h, ty == Ty::F32 || ty == Ty::F64 ? C_FLOAT : tyFloat(ty) ? C_HALF : C_INT);
  I.a = a;
  I.b = b;
  I.c = cc;
  I.d = d;
  I.e = e;
  I.fl = fl;
  I.imm = c;
}
OP(set) {  // set.cmp[.bool][.ftz].dtype.stype d, a, b[, c]
  auto tys = t.types();
  if (tys.size() != 2) t.err("set types");
  Ty dt = tys[0], ty = tys[1];
  int c = parseCmp(t, ty);
  t.ignore({"ftz"});
  u32 fl = 0;
  if (t.has("and"))
    fl = 1;
  else if (t.has("or"))
    fl = 2;
  else if (t.has("xor"))
    fl = 3;
  s32 a = t.S(1, ty), b = t.S(2, ty), d = t.D(0, dt), cc = 0;
  if (fl) {
    bool n;
    cc = t.pred(t.op(3), n);
    if (n) fl |= 4;
  }
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      auto comb = [&](bool r) {
        if (I.fl & 3) {
          bool c = (w.preds[I.c] >> i & 1) ^ !!(I.fl & 4);
          r = (I.fl & 3) == 1 ? r && c : (I.fl & 3) == 2 ? r || c : r != c;
        }
        return r;
      };
      bool r = false;
      int C = (int)I.imm;
      u32 x = 0, y = 0;
      u64 X = 0, Y = 0;
      Ty st = (Ty)I.t2;
      if (tyBits(st) == 64) {
        X = src<u64>(w, I.a)[i];
        Y = src<u64>(w, I.b)[i];
      } else {
        x = srcw(w, I.a)[i];
        y = srcw(w, I.b)[i];
      }
      u32* d = w.regs + I.d;
      if (st == Ty::F16X2 || st == Ty::BF16X2) {
        u32 o = 0;
        for (int k = 0; k < 2; ++k) {
          u16 p = (u16)(x >> 16 * k), q = (u16)(y >> 16 * k);
          bool b = comb(st == Ty::F16X2 ? cmpF<float>(C, h2f(p), h2f(q)) : cmpF<float>(C, b2f(p), b2f(q)));
          u32 val = (Ty)I.t == Ty::F16X2    ? (b ? 0x3c00 : 0)
                    : (Ty)I.t == Ty::BF16X2 ? (b ? 0x3f80 : 0)
                                            : (b ? 0xffff : 0);
          o |= val << 16 * k;
        }
        d[i] = o;
        continue;
      }
      switch (st) {
        case Ty::F32: r = cmpF<float>(C, bitsf(x), bitsf(y)); break;
        case Ty::F64: r = cmpF<double>(C, bitsd(X), bitsd(Y)); break;
        case Ty::F16: r = cmpF<float>(C, h2f((u16)x), h2f((u16)y)); break;
        case Ty::BF16: r = cmpF<float>(C, b2f((u16)x), b2f((u16)y)); break;
        case Ty::S32: r = cmpF<s32>(C, (s32)x, (s32)y); break;
        case Ty::S16: r = cmpF<s16>(C, (s16)x, (s16)y); break;
        case Ty::S64: r = cmpF<s64>(C, (s64)X, (s64)Y); break;
        case Ty::U64:
        case Ty::B64: r = cmpF<u64>(C, X, Y); break;
        case Ty::U16:
        case Ty::B16: r = cmpF<u16>(C, (u16)x, (u16)y); break;
        default: r = cmpF<u32>(C, x, y);
      }
      r = comb(r);
      switch ((Ty)I.t) {
        case Ty::F32: d[i] = r ? 0x3f800000u : 0; break;
        case Ty::F16: d[i] = r ? 0x3c00 : 0; break;
        case Ty::BF16: d[i] = r ? 0x3f80 : 0; break;
        case Ty::U16:
        case Ty::S16: d[i] = r ? 0xffff : 0; break;
        default: d[i] = r ? ~0u : 0;
      }
    }
  };
  if (tyBits(dt) == 64) t.err("set destination type");
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = cc;
  I.d = d;
  I.fl = fl;
  I.imm = c;
  I.t = (u8)dt;
  I.t2 = (u8)ty;
}
OP(selp) {
  Ty ty = t.type();
  bool n;
  s32 a = t.S(1, ty), b = t.S(2, ty), p = t.pred(t.op(3), n), d = t.D(0, ty);
  auto h32 = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    u32 p = w.preds[I.c] ^ (I.fl ? ~0u : 0);
    if (w.tainted) {
      u32 x = (p & getTaint(w, I.a)) | (~p & getTaint(w, I.b));
      setTaint(w, I.d, x, m);
      w.taintHandled = true;
    }
    if (m == ~0u) {
#pragma GCC ivdep
      for (int i = 0; i < 32; ++i) d[i] = p >> i & 1 ? a[i] : b[i];
    } else
      FOR_LANES(i, m) d[i] = p >> i & 1 ? a[i] : b[i];
  };
  auto h64 = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u64>(w, I.d);
    auto* a = src<u64>(w, I.a);
    auto* b = src<u64>(w, I.b);
    u32 p = w.preds[I.c] ^ (I.fl ? ~0u : 0);
    FOR_LANES(i, m) d[i] = p >> i & 1 ? a[i] : b[i];
  };
  Inst& I = t.out(tyBits(ty) == 64 ? (Handler)h64 : (Handler)h32, C_INT);
  I.a = a;
  I.b = b;
  I.c = p;
  I.d = d;
  I.fl = n;
}
OP(slct) {
  auto tys = t.types();
  t.ignore({"ftz"});
  Ty ty = tys[0];
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, tys[1]), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* c = srcw(w, I.c);
    FOR_LANES(i, m) {
      bool p = I.fl & 1 ? bitsf(c[i]) >= 0 : (s32)c[i] >= 0;
      if (I.fl & 2)
        dst<u64>(w, I.d)[i] = p ? src<u64>(w, I.a)[i] : src<u64>(w, I.b)[i];
      else
        dst<u32>(w, I.d)[i] = p ? srcw(w, I.a)[i] : srcw(w, I.b)[i];
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = (u32)(tys[1] == Ty::F32) | (tyBits(ty) == 64 ? 2u : 0);
}

}  // namespace ptxsim

// Products with a sum: fma, mad, mul24, sad.
#include "instructions/rounding.h"
#include "translate/elementwise.h"

namespace ptxsim {

template <class H>
static u16 hfma(const Inst& I, u16 a, u16 b, u16 c) {
  return hfin<H>(I, H::dn(fmaOdd(H::up(hftz(I, a)), H::up(hftz(I, b)), H::up(hftz(I, c)))));
}

static void fmaOp(Tr& t, Ty ty) {
  Round r = parseRound(t);
  u32 f = flFloat(t);
  switch (ty) {
    case Ty::F32:
      if (!f && r == RN)
        emit3<float>(t, ty, [](float a, float b, float c) { return canonNan(__builtin_fmaf(a, b, c)); }, C_FLOAT);
      else
        emitS3<float>(
            t, ty,
            [](const Inst& I, float a, float b, float c) {
              return fin(I, fmaR(fi(I, a), fi(I, b), fi(I, c), getRm(I)));
            },
            C_FLOAT)
            .fl = f | rm(r);
      return;
    case Ty::F64:
      emitS3<double>(
          t, ty, [](const Inst& I, double a, double b, double c) { return fmaD(a, b, c, getRm(I)); }, C_FLOAT)
          .fl = rm(r);
      return;
    case Ty::F16:
      emitS3<u16>(t, ty, [](const Inst& I, u16 a, u16 b, u16 c) { return hfma<HF>(I, a, b, c); }, C_HALF).fl = f;
      return;
    case Ty::BF16:
      emitS3<u16>(t, ty, [](const Inst& I, u16 a, u16 b, u16 c) { return hfma<BF>(I, a, b, c); }, C_HALF).fl = f;
      return;
    case Ty::F16X2:
      emitS3<u32>(
          t, ty,
          [](const Inst& I, u32 a, u32 b, u32 c) {
            return x2c(a, b, c, [&](u16 x, u16 y, u16 z) { return hfma<HF>(I, x, y, z); });
          },
          C_HALF)
          .fl = f;
      return;
    case Ty::BF16X2:
      emitS3<u32>(
          t, ty,
          [](const Inst& I, u32 a, u32 b, u32 c) {
            return x2c(a, b, c, [&](u16 x, u16 y, u16 z) { return hfma<BF>(I, x, y, z); });
          },
          C_HALF)
          .fl = f;
      return;
    default: t.err("fma type");
  }
}
OP(fma) {
  if (t.types().size() > 1) t.err("arithmetic on mixed types needs sm_100");
  fmaOp(t, t.type());
}
OP(mad) {
  Ty ty = t.type();
  if (tyFloat(ty)) {
    fmaOp(t, ty);
    return;
  }
  if (t.has("wide")) {
    Ty wt = ty == Ty::U16 ? Ty::U32 : ty == Ty::S16 ? Ty::S32 : ty == Ty::U32 ? Ty::U64 : Ty::S64;
    s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, wt), d = t.D(0, wt);
    auto mk = [&](Handler h) {
      Inst& I = t.out(h, C_INT);
      I.a = a;
      I.b = b;
      I.c = c;
      I.d = d;
    };
    auto f1 = [](u16 x, u16 y, u32 z) { return (u32)x * y + z; };
    auto f2 = [](s16 x, s16 y, u32 z) { return (u32)((s32)x * y) + z; };
    auto f3 = [](u32 x, u32 y, u64 z) { return (u64)x * y + z; };
    auto f4 = [](s32 x, s32 y, u64 z) { return (u64)((s64)x * y) + z; };
    if (ty == Ty::U16)
      mk(g3<u32, u16, u16, u32, decltype(f1)>);
    else if (ty == Ty::S16)
      mk(g3<u32, s16, s16, u32, decltype(f2)>);
    else if (ty == Ty::U32)
      mk(g3<u64, u32, u32, u64, decltype(f3)>);
    else
      mk(g3<u64, s32, s32, u64, decltype(f4)>);
    return;
  }
  bool cc = t.has("cc");
  if (cc) {
    bool hi = t.has("hi");
    t.has("lo");
    if (tyBits(ty) != 32) t.err("mad.cc type");
    s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty), d = t.D(0, ty);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      auto* a = src<u32>(w, I.a);
      auto* b = src<u32>(w, I.b);
      auto* c = src<u32>(w, I.c);
      auto* d = dst<u32>(w, I.d);
      FOR_LANES(i, m) {
        u64 p = I.t ? (u64)((s64)(s32)a[i] * (s32)b[i]) : (u64)a[i] * b[i];
        u32 x = I.fl ? (u32)(p >> 32) : (u32)p;
        u64 r = (u64)x + c[i];
        d[i] = (u32)r;
        w.cc = (w.cc & ~(1u << i)) | (u32)(r >> 32) << i;
      }
    };
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.c = c;
    I.d = d;
    I.fl = hi;
    I.t = tySigned(ty);
    return;
  }
  if (t.has("hi")) {
    bool sat = t.has("sat");
    if (sat) t.err("mad.hi.sat is not supported");
    switch (ty) {
      case Ty::U32: emit3<u32>(t, ty, [](u32 a, u32 b, u32 c) { return (u32)((u64)a * b >> 32) + c; }); return;
      case Ty::S32:
        emit3<s32>(t, ty, [](s32 a, s32 b, s32 c) { return (s32)((u32)((s64)a * b >> 32) + (u32)c); });
        return;
      case Ty::U64:
        emit3<u64>(t, ty, [](u64 a, u64 b, u64 c) { return (u64)((unsigned __int128)a * b >> 64) + c; });
        return;
      case Ty::S64:
        emit3<s64>(t, ty, [](s64 a, s64 b, s64 c) { return (s64)((u64)((__int128)a * b >> 64) + (u64)c); });
        return;
      default: t.err("mad.hi type");
    }
  }
  t.has("lo");
  intTy(t, ty, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using U = std::make_unsigned_t<T>;
    emit3<T>(t, ty, [](T a, T b, T c) { return (T)(U)((u64)(U)a * (u64)(U)b + (u64)(U)c); });
  });
}
OP(madc) {
  Ty ty = t.type();
  bool hi = t.has("hi");
  t.has("lo");
  bool out = t.has("cc");
  if (tyBits(ty) != 32) t.err("madc type");
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* a = src<u32>(w, I.a);
    auto* b = src<u32>(w, I.b);
    auto* c = src<u32>(w, I.c);
    auto* d = dst<u32>(w, I.d);
    FOR_LANES(i, m) {
      u64 p = I.t ? (u64)((s64)(s32)a[i] * (s32)b[i]) : (u64)a[i] * b[i];
      u32 x = I.fl & 1 ? (u32)(p >> 32) : (u32)p;
      u64 r = (u64)x + c[i] + (w.cc >> i & 1);
      d[i] = (u32)r;
      if (I.fl & 2) w.cc = (w.cc & ~(1u << i)) | (u32)(r >> 32 & 1) << i;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = (u32)hi | (u32)out << 1;
  I.t = tySigned(ty);
}
OP(mul24) {
  Ty ty = t.type();
  bool hi = t.has("hi");
  t.has("lo");
  if (hi) t.err("mul24.hi");
  if (ty == Ty::S32)
    emit2<s32>(t, ty, [](s32 a, s32 b) {
      s64 x = (s32)((u32)a << 8) >> 8, y = (s32)((u32)b << 8) >> 8;
      return (s32)(x * y);
    });
  else
    emit2<u32>(t, ty, [](u32 a, u32 b) { return (u32)((u64)(a & 0xffffff) * (b & 0xffffff)); });
}
OP(mad24) {
  Ty ty = t.type();
  bool hi = t.has("hi");
  t.has("lo");
  if (hi) t.err("mad24.hi");
  if (ty == Ty::S32)
    emit3<s32>(t, ty, [](s32 a, s32 b, s32 c) {
      s64 x = (s32)((u32)a << 8) >> 8, y = (s32)((u32)b << 8) >> 8;
      return (s32)((u32)(x * y) + (u32)c);
    });
  else
    emit3<u32>(t, ty, [](u32 a, u32 b, u32 c) { return (u32)((u64)(a & 0xffffff) * (b & 0xffffff)) + c; });
}
OP(sad) {
  Ty ty = t.type();
  intTy(t, ty, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using U = std::make_unsigned_t<T>;
    emit3<T>(t, ty, [](T a, T b, T c) { return (T)((U)(a < b ? (U)b - (U)a : (U)a - (U)b) + (U)c); });
  });
}

}  // namespace ptxsim

// Arithmetic, logic, conversions, moves.
#include "tr.h"
#include <cfenv>

namespace ptxsim {
#define OP(name) static void op_##name(Tr& t)
enum : u32 {
  F_SAT = 1,
  F_FTZ = 2,
  F_RELU = 4,
  F_SATFIN = 8,
  F_RINT = 16,
  F_NAN = 32,
  F_XORSIGN = 64,
  F_WIDE = 128,
  F_RSHIFT = 8
};  // round mode in bits 8..10
static u32 rm(Round r) { return (u32)r << F_RSHIFT; }
static Round getRm(const Inst& I) { return (Round)(I.fl >> F_RSHIFT & 7); }

static Round parseRound(Tr& t, bool* given = nullptr) {
  if (given) *given = true;
  if (t.has("rn")) return RN;
  if (t.has("rz")) return RZ;
  if (t.has("rm")) return RM;
  if (t.has("rp")) return RP;
  if (given) *given = false;
  return RN;
}
template <class T, class F>
static T withRound(Round r, F f) {
  if (r == RN) return f();
  int old = fegetround();
  fesetround(r == RZ ? FE_TOWARDZERO : r == RM ? FE_DOWNWARD : FE_UPWARD);
  T v = f();
  fesetround(old);
  return v;
}
__attribute__((noinline)) static float addR(float a, float b, Round r) {
  volatile float x = a, y = b;
  return withRound<float>(r, [&] {
    volatile float z = x + y;
    return (float)z;
  });
}
__attribute__((noinline)) static float mulR(float a, float b, Round r) {
  volatile float x = a, y = b;
  return withRound<float>(r, [&] {
    volatile float z = x * y;
    return (float)z;
  });
}
__attribute__((noinline)) static float fmaR(float a, float b, float c, Round r) {
  volatile float x = a, y = b, w = c;
  return withRound<float>(r, [&] {
    volatile float z = __builtin_fmaf(x, y, w);
    return (float)z;
  });
}
__attribute__((noinline)) static double addD(double a, double b, Round r) {
  volatile double x = a, y = b;
  return withRound<double>(r, [&] {
    volatile double z = x + y;
    return (double)z;
  });
}
__attribute__((noinline)) static double mulD(double a, double b, Round r) {
  volatile double x = a, y = b;
  return withRound<double>(r, [&] {
    volatile double z = x * y;
    return (double)z;
  });
}
__attribute__((noinline)) static double fmaD(double a, double b, double c, Round r) {
  volatile double x = a, y = b, w = c;
  return withRound<double>(r, [&] {
    volatile double z = __builtin_fma(x, y, w);
    return (double)z;
  });
}
__attribute__((noinline)) static float divR(float a, float b, Round r) {
  volatile float x = a, y = b;
  return withRound<float>(r, [&] {
    volatile float z = x / y;
    return (float)z;
  });
}
__attribute__((noinline)) static double divD(double a, double b, Round r) {
  volatile double x = a, y = b;
  return withRound<double>(r, [&] {
    volatile double z = x / y;
    return (double)z;
  });
}
__attribute__((noinline)) static float sqrtR(float a, Round r) {
  volatile float x = a;
  return withRound<float>(r, [&] {
    volatile float z = __builtin_sqrtf(x);
    return (float)z;
  });
}
__attribute__((noinline)) static double sqrtD(double a, Round r) {
  volatile double x = a;
  return withRound<double>(r, [&] {
    volatile double z = __builtin_sqrt(x);
    return (double)z;
  });
}

static float fin(const Inst& I, float v) {
  if (I.fl & F_FTZ) v = ftzf(v);
  if (I.fl & F_SAT) v = v != v ? 0.f : v < 0 ? 0.f : v > 1 ? 1.f : v;
  return canonNan(v);
}
static float fi(const Inst& I, float v) { return I.fl & F_FTZ ? ftzf(v) : v; }

// ---- half/bf16 helpers: value converters by type -------------------------------------------------
struct HF {
  static float up(u16 x) { return h2f(x); }
  static u16 dn(double d) { return d2h(d); }
  static u16 dnf(float f) { return f2h(f); }
};
struct BF {
  static float up(u16 x) { return b2f(x); }
  static u16 dn(double d) { return d2b(d); }
  static u16 dnf(float f) { return f2b(f); }
};
static u16 hftz(const Inst& I, u16 x) {
  return (I.fl & F_FTZ) && !(x & 0x7c00) ? (u16)(x & 0x8000) : x;
}  // .ftz exists for f16 only
template <class H>
static u16 hfin(const Inst& I, u16 r) {
  r = hftz(I, r);
  float f = H::up(r);
  if (I.fl & F_SAT) {
    if (f != f || f < 0) return 0;
    if (f > 1) return H::dnf(1.f);
  }
  if (I.fl & F_RELU) {
    if (f != f) return 0x7fff;
    if (f < 0 || r == 0x8000) return 0;
  }
  return r;
}
template <class H, class F>
static u32 x2(u32 a, F f) {
  return (u32)f((u16)a) | (u32)f((u16)(a >> 16)) << 16;
}
template <class F>
static u32 x2b(u32 a, u32 b, F f) {
  return (u32)f((u16)a, (u16)b) | (u32)f((u16)(a >> 16), (u16)(b >> 16)) << 16;
}
template <class F>
static u32 x2c(u32 a, u32 b, u32 c, F f) {
  return (u32)f((u16)a, (u16)b, (u16)c) | (u32)f((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}

static u32 flFloat(Tr& t) {
  u32 f = 0;
  if (t.has("ftz")) f |= F_FTZ;
  if (t.has("sat")) f |= F_SAT;
  if (t.has("relu")) f |= F_RELU;
  return f;
}
template <class H, int OPC>
static u16 hop2(const Inst& I, u16 a, u16 b) {
  float x = H::up(hftz(I, a)), y = H::up(hftz(I, b));
  u16 r;
  if constexpr (OPC == 0)
    r = H::dn((double)x + (double)y);  // exact in double (or far apart: see fmaOdd)
  else if constexpr (OPC == 1)
    r = H::dn((double)x - (double)y);
  else
    r = H::dn((double)x * (double)y);
  return hfin<H>(I, r);
}
template <class H>
static u16 hfma(const Inst& I, u16 a, u16 b, u16 c) {
  return hfin<H>(I, H::dn(fmaOdd(H::up(hftz(I, a)), H::up(hftz(I, b)), H::up(hftz(I, c)))));
}

template <int OPC>
static void arith(Tr& t) {  // 0 add 1 sub 2 mul
  auto tys = t.types();
  if (tys.empty()) t.err("missing type");
  if (tys.size() > 1) t.err("arithmetic on mixed types needs sm_100");
  Ty ty = tys.back();
  bool given;
  Round r = parseRound(t, &given);
  switch (ty) {
    case Ty::F32: {
      u32 f = flFloat(t) | rm(r);
      if (f == 0) {
        if constexpr (OPC == 0)
          emit2<float>(t, ty, [](float a, float b) { return canonNan(a + b); }, C_FLOAT);
        else if constexpr (OPC == 1)
          emit2<float>(t, ty, [](float a, float b) { return canonNan(a - b); }, C_FLOAT);
        else
          emit2<float>(t, ty, [](float a, float b) { return canonNan(a * b); }, C_FLOAT);
      } else {
        emitS2<float>(
            t, ty,
            [](const Inst& I, float a, float b) {
              a = fi(I, a);
              b = fi(I, b);
              float v = OPC == 2 ? mulR(a, b, getRm(I)) : addR(a, OPC == 1 ? -b : b, getRm(I));
              return fin(I, v);
            },
            C_FLOAT)
            .fl = f;
      }
      return;
    }
    case Ty::F64: {
      emitS2<double>(
          t, ty,
          [](const Inst& I, double a, double b) {
            return OPC == 2 ? mulD(a, b, getRm(I)) : addD(a, OPC == 1 ? -b : b, getRm(I));
          },
          C_FLOAT)
          .fl = rm(r);
      return;
    }
    case Ty::F16: {
      u32 f = flFloat(t);
      emitS2<u16>(t, ty, [](const Inst& I, u16 a, u16 b) { return hop2<HF, OPC>(I, a, b); }, C_HALF).fl = f;
      return;
    }
    case Ty::BF16: {
      u32 f = flFloat(t);
      emitS2<u16>(t, ty, [](const Inst& I, u16 a, u16 b) { return hop2<BF, OPC>(I, a, b); }, C_HALF).fl = f;
      return;
    }
    case Ty::F16X2: {
      u32 f = flFloat(t);
      emitS2<u32>(
          t, ty,
          [](const Inst& I, u32 a, u32 b) { return x2b(a, b, [&](u16 x, u16 y) { return hop2<HF, OPC>(I, x, y); }); },
          C_HALF)
          .fl = f;
      return;
    }
    case Ty::BF16X2: {
      u32 f = flFloat(t);
      emitS2<u32>(
          t, ty,
          [](const Inst& I, u32 a, u32 b) { return x2b(a, b, [&](u16 x, u16 y) { return hop2<BF, OPC>(I, x, y); }); },
          C_HALF)
          .fl = f;
      return;
    }
    case Ty::U16X2:
    case Ty::S16X2:
      emit2<u32>(t, ty, [](u32 a, u32 b) {
        return x2b(a, b, [](u16 x, u16 y) { return (u16)(OPC == 0 ? x + y : OPC == 1 ? x - y : x * y); });
      });
      return;
    default: break;
  }
  if constexpr (OPC == 2) {
    if (t.has("wide")) {
      Ty wt = ty == Ty::U16 ? Ty::U32 : ty == Ty::S16 ? Ty::S32 : ty == Ty::U32 ? Ty::U64 : Ty::S64;
      s32 a = t.S(1, ty), b = t.S(2, ty), d = t.D(0, wt);
      auto mk = [&](Handler h) {
        Inst& I = t.out(h, C_INT);
        I.a = a;
        I.b = b;
        I.d = d;
      };
      auto fu16 = [](u16 x, u16 y) { return (u32)x * y; };
      auto fs16 = [](s16 x, s16 y) { return (s32)x * y; };
      auto fu32 = [](u32 x, u32 y) { return (u64)x * y; };
      auto fs32 = [](s32 x, s32 y) { return (s64)x * y; };
      if (ty == Ty::U16)
        mk(g2<u32, u16, u16, decltype(fu16)>);
      else if (ty == Ty::S16)
        mk(g2<s32, s16, s16, decltype(fs16)>);
      else if (ty == Ty::U32)
        mk(g2<u64, u32, u32, decltype(fu32)>);
      else if (ty == Ty::S32)
        mk(g2<s64, s32, s32, decltype(fs32)>);
      else
        t.err("mul.wide type");
      return;
    }
    if (t.has("hi")) {
      switch (ty) {
        case Ty::U32: emit2<u32>(t, ty, [](u32 a, u32 b) { return (u32)((u64)a * b >> 32); }); return;
        case Ty::S32: emit2<s32>(t, ty, [](s32 a, s32 b) { return (s32)((s64)a * b >> 32); }); return;
        case Ty::U64: emit2<u64>(t, ty, [](u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }); return;
        case Ty::S64: emit2<s64>(t, ty, [](s64 a, s64 b) { return (s64)((__int128)a * b >> 64); }); return;
        case Ty::U16: emit2<u16>(t, ty, [](u16 a, u16 b) { return (u16)((u32)a * b >> 16); }); return;
        case Ty::S16: emit2<s16>(t, ty, [](s16 a, s16 b) { return (s16)((s32)a * b >> 16); }); return;
        default: t.err("mul.hi type");
      }
    }
    t.has("lo");
  } else {
    if (t.has("cc")) {
      Ty u = tyBits(ty) == 64 ? Ty::U64 : Ty::U32;
      s32 a = t.S(1, u), b = t.S(2, u), d = t.D(0, u);
      auto h32 = [](Warp& w, const Inst& I, u32 m) {
        auto* a = src<u32>(w, I.a);
        auto* b = src<u32>(w, I.b);
        auto* d = dst<u32>(w, I.d);
        FOR_LANES(i, m) {
          u64 r = OPC == 0 ? (u64)a[i] + b[i] : (u64)a[i] - b[i];
          d[i] = (u32)r;
          bool c = r >> 32 & 1;
          w.cc = (w.cc & ~(1u << i)) | (u32)c << i;
        }
      };
      auto h64 = [](Warp& w, const Inst& I, u32 m) {
        auto* a = src<u64>(w, I.a);
        auto* b = src<u64>(w, I.b);
        auto* d = dst<u64>(w, I.d);
        FOR_LANES(i, m) {
          u64 x = a[i], y = b[i];
          u64 r = OPC == 0 ? x + y : x - y;
          bool c = OPC == 0 ? r < x : x < y;
          d[i] = r;
          w.cc = (w.cc & ~(1u << i)) | (u32)c << i;
        }
      };
      Inst& I = t.out(u == Ty::U64 ? (Handler)h64 : (Handler)h32, C_INT);
      I.a = a;
      I.b = b;
      I.d = d;
      return;
    }
    if (t.has("sat")) {
      if (ty != Ty::S32) t.err("add.sat type");
      emit2<s32>(t, ty, [](s32 a, s32 b) {
        s64 r = OPC == 0 ? (s64)a + b : (s64)a - b;
        return (s32)std::clamp<s64>(r, INT32_MIN, INT32_MAX);
      });
      return;
    }
  }
  intTy(t, ty, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using U = std::make_unsigned_t<T>;
    emit2<T>(t, ty, [](T a, T b) {
      return (T)(OPC == 0 ? (U)((U)a + (U)b) : OPC == 1 ? (U)((U)a - (U)b) : (U)((u64)(U)a * (u64)(U)b));
    });
  });
}
OP(add) { arith<0>(t); }
OP(sub) { arith<1>(t); }
OP(mul) { arith<2>(t); }

template <bool SUB>
static void carry(Tr& t) {  // addc/subc
  Ty ty = t.type();
  bool out = t.has("cc");
  Ty u = tyBits(ty) == 64 ? Ty::U64 : Ty::U32;
  s32 a = t.S(1, u), b = t.S(2, u), d = t.D(0, u);
  auto h32 = [](Warp& w, const Inst& I, u32 m) {
    auto* a = src<u32>(w, I.a);
    auto* b = src<u32>(w, I.b);
    auto* d = dst<u32>(w, I.d);
    FOR_LANES(i, m) {
      u64 ci = w.cc >> i & 1;
      u64 r = SUB ? (u64)a[i] - b[i] - ci : (u64)a[i] + b[i] + ci;
      d[i] = (u32)r;
      if (I.fl) w.cc = (w.cc & ~(1u << i)) | (u32)(r >> 32 & 1) << i;
    }
  };
  auto h64 = [](Warp& w, const Inst& I, u32 m) {
    auto* a = src<u64>(w, I.a);
    auto* b = src<u64>(w, I.b);
    auto* d = dst<u64>(w, I.d);
    FOR_LANES(i, m) {
      u64 ci = w.cc >> i & 1;
      unsigned __int128 r = SUB ? (unsigned __int128)a[i] - b[i] - ci : (unsigned __int128)a[i] + b[i] + ci;
      d[i] = (u64)r;
      if (I.fl) w.cc = (w.cc & ~(1u << i)) | (u32)((u64)(r >> 64) & 1) << i;
    }
  };
  Inst& I = t.out(u == Ty::U64 ? (Handler)h64 : (Handler)h32, C_INT);
  I.a = a;
  I.b = b;
  I.d = d;
  I.fl = out;
}
OP(addc) { carry<false>(t); }
OP(subc) { carry<true>(t); }

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
OP(div) {
  Ty ty = t.type();
  if (ty == Ty::F32) {
    bool approx = t.hasAny({"approx", "full"});
    (void)approx;
    Round r = parseRound(t);
    emitS2<float>(
        t, ty, [](const Inst& I, float a, float b) { return fin(I, divR(fi(I, a), fi(I, b), getRm(I))); }, C_SFU)
        .fl = flFloat(t) | rm(r);
  } else if (ty == Ty::F64) {
    Round r = parseRound(t);
    emitS2<double>(t, ty, [](const Inst& I, double a, double b) { return divD(a, b, getRm(I)); }, C_SFU).fl = rm(r);
  } else
    intTy(t, ty, [&](auto tag) {
      using T = typename decltype(tag)::type;
      emitS2<T>(t, ty, [](const Inst&, T a, T b) -> T {
        if (b == 0) return (T)-1;
        if constexpr (std::is_signed_v<T>)
          if (b == -1) return (T)(0 - (std::make_unsigned_t<T>)a);
        return (T)(a / b);
      });
    });
}
OP(rem) {
  Ty ty = t.type();
  intTy(t, ty, [&](auto tag) {
    using T = typename decltype(tag)::type;
    emitS2<T>(t, ty, [](const Inst&, T a, T b) -> T {
      if (b == 0) return a;
      if constexpr (std::is_signed_v<T>)
        if (b == -1) return 0;
      return (T)(a % b);
    });
  });
}
OP(abs) {
  Ty ty = t.type();
  u32 f = flFloat(t);
  switch (ty) {
    case Ty::F32:
      emitS1<float>(t, ty, [](const Inst& I, float a) { return canonNan(fi(I, std::fabs(a))); }, C_FLOAT).fl = f;
      return;
    case Ty::F64: emit1<double>(t, ty, [](double a) { return std::fabs(a); }, C_FLOAT); return;
    case Ty::F16:
    case Ty::BF16: emit1<u16>(t, ty, [](u16 a) { return (u16)(a & 0x7fff); }, C_HALF); return;
    case Ty::F16X2:
    case Ty::BF16X2: emit1<u32>(t, ty, [](u32 a) { return a & 0x7fff7fff; }, C_HALF); return;
    default:
      intTy(t, ty, [&](auto tag) {
        using T = typename decltype(tag)::type;
        emit1<T>(t, ty, [](T a) {
          using U = std::make_unsigned_t<T>;
          if constexpr (std::is_signed_v<T>)
            return (T)(a < 0 ? (U)(0 - (U)a) : (U)a);
          else
            return a;
        });
      });
  }
}
OP(neg) {
  Ty ty = t.type();
  u32 f = flFloat(t);
  switch (ty) {
    case Ty::F32:
      emitS1<u32>(
          t, ty,
          [](const Inst& I, u32 a) {
            float x = fi(I, bitsf(a));
            return x != x ? 0x7fffffffu : fbits(x) ^ 0x80000000u;
          },
          C_FLOAT)
          .fl = f;
      return;
    case Ty::F64: emit1<u64>(t, ty, [](u64 a) { return a ^ 0x8000000000000000ull; }, C_FLOAT); return;
    case Ty::F16:
    case Ty::BF16: emit1<u16>(t, ty, [](u16 a) { return (u16)(a ^ 0x8000); }, C_HALF); return;
    case Ty::F16X2:
    case Ty::BF16X2: emit1<u32>(t, ty, [](u32 a) { return a ^ 0x80008000; }, C_HALF); return;
    default:
      intTy(t, ty, [&](auto tag) {
        using T = typename decltype(tag)::type;
        emit1<T>(t, ty, [](T a) {
          using U = std::make_unsigned_t<T>;
          return (T)(U)(0 - (U)a);
        });
      });
  }
}
// float min/max with PTX NaN and signed-zero rules
template <bool MAX>
static float fmm(float a, float b, bool nan) {
  if (a != a || b != b) {
    if (nan || (a != a && b != b)) return bitsf(0x7fffffff);
    return a != a ? b : a;
  }
  if (a == 0 && b == 0) return MAX ? (std::signbit(a) ? b : a) : (std::signbit(a) ? a : b);
  return MAX ? (a > b ? a : b) : (a < b ? a : b);
}
template <class H, bool MAX>
static u16 hmm(const Inst& I, u16 a, u16 b) {
  a = hftz(I, a);
  b = hftz(I, b);
  const u16 sg = I.fl & F_XORSIGN ? (u16)((a ^ b) & 0x8000) : 0;
  if (I.fl & F_XORSIGN) {
    a &= 0x7fff;
    b &= 0x7fff;
  }
  float r = fmm<MAX>(H::up(a), H::up(b), I.fl & F_NAN);
  u16 x = r != r ? 0x7fff : (u16)(H::dnf(r) | sg);
  return hfin<H>(I, x);
}
template <bool MAX>
static float fmmS(const Inst& I, float a, float b) {
  a = fi(I, a);
  b = fi(I, b);
  if (!(I.fl & F_XORSIGN)) return fmm<MAX>(a, b, I.fl & F_NAN);
  float r = fmm<MAX>(std::fabs(a), std::fabs(b), I.fl & F_NAN);
  return r != r ? r : bitsf(fbits(r) | ((fbits(a) ^ fbits(b)) & 0x80000000u));
}
template <bool MAX>
static void minmax(Tr& t) {
  Ty ty = t.type();
  u32 f = flFloat(t);
  if (t.has("NaN")) f |= F_NAN;
  if (t.has("xorsign")) {
    if (!t.has("abs")) t.err(".xorsign goes with .abs");
    f |= F_XORSIGN;
  }
  switch (ty) {
    case Ty::F32:
      if (t.nops() == 4) t.err("three sources need sm_100");
      if (!f)
        emit2<float>(t, ty, [](float a, float b) { return fmm<MAX>(a, b, false); }, C_FLOAT);
      else
        emitS2<float>(t, ty, [](const Inst& I, float a, float b) { return fmmS<MAX>(I, a, b); }, C_FLOAT).fl = f;
      return;
    case Ty::F64:
      emit2<double>(
          t, ty,
          [](double a, double b) {
            if (a != a) return b;
            if (b != b) return a;
            return MAX ? (a > b ? a : b) : (a < b ? a : b);
          },
          C_FLOAT);
      return;
    case Ty::F16:
      emitS2<u16>(t, ty, [](const Inst& I, u16 a, u16 b) { return hmm<HF, MAX>(I, a, b); }, C_HALF).fl = f;
      return;
    case Ty::BF16:
      emitS2<u16>(t, ty, [](const Inst& I, u16 a, u16 b) { return hmm<BF, MAX>(I, a, b); }, C_HALF).fl = f;
      return;
    case Ty::F16X2:
      emitS2<u32>(
          t, ty,
          [](const Inst& I, u32 a, u32 b) { return x2b(a, b, [&](u16 x, u16 y) { return hmm<HF, MAX>(I, x, y); }); },
          C_HALF)
          .fl = f;
      return;
    case Ty::BF16X2:
      emitS2<u32>(
          t, ty,
          [](const Inst& I, u32 a, u32 b) { return x2b(a, b, [&](u16 x, u16 y) { return hmm<BF, MAX>(I, x, y); }); },
          C_HALF)
          .fl = f;
      return;
    case Ty::S16X2:
      emitS2<u32>(t, ty, [](const Inst& I, u32 a, u32 b) {
        return x2b(a, b, [&](u16 x, u16 y) {
          s16 p = (s16)x, q = (s16)y;
          s16 r = MAX ? std::max(p, q) : std::min(p, q);
          if ((I.fl & F_RELU) && r < 0) r = 0;
          return (u16)r;
        });
      }).fl = f;
      return;
    case Ty::U16X2:
      emit2<u32>(t, ty, [](u32 a, u32 b) {
        return x2b(a, b, [](u16 x, u16 y) { return MAX ? std::max(x, y) : std::min(x, y); });
      });
      return;
    case Ty::S32:
      if (f & F_RELU) {
        emit2<s32>(t, ty, [](s32 a, s32 b) {
          s32 r = MAX ? std::max(a, b) : std::min(a, b);
          return r < 0 ? 0 : r;
        });
        return;
      }
      [[fallthrough]];
    default:
      intTy(t, ty, [&](auto tag) {
        using T = typename decltype(tag)::type;
        emit2<T>(t, ty, [](T a, T b) { return MAX ? (a > b ? a : b) : (a < b ? a : b); });
      });
  }
}
OP(min) { minmax<false>(t); }
OP(max) { minmax<true>(t); }

// special functions
template <int K>
static float sfu(float a) {
  switch (K) {
    case 0: return 1.0f / a;
    case 1: return (float)std::sqrt((double)a);
    case 2: return (float)(1.0 / std::sqrt((double)a));
    case 3: return (float)std::sin((double)a);
    case 4: return (float)std::cos((double)a);
    case 5: return (float)std::log2((double)a);
    case 6: return (float)std::exp2((double)a);
    case 7: return (float)std::tanh((double)a);
  }
  return 0;
}
template <int K>
static void special(Tr& t) {
  Ty ty = t.type();
  bool approx = t.has("approx");
  (void)approx;
  Round r = parseRound(t);
  u32 f = flFloat(t) | rm(r);
  switch (ty) {
    case Ty::F32:
      if (K == 0)
        emitS1<float>(
            t, ty, [](const Inst& I, float a) { return fin(I, divR(1.f, fi(I, a), getRm(I))); }, C_SFU)
            .fl = f;
      else if (K == 1)
        emitS1<float>(t, ty, [](const Inst& I, float a) { return fin(I, sqrtR(fi(I, a), getRm(I))); }, C_SFU).fl = f;
      else
        emitS1<float>(t, ty, [](const Inst& I, float a) { return fin(I, sfu<K>(fi(I, a))); }, C_SFU).fl = f;
      return;
    case Ty::F64:
      if (K == 0)
        emitS1<double>(t, ty, [](const Inst& I, double a) { return divD(1.0, a, getRm(I)); }, C_SFU).fl = rm(r);
      else if (K == 1)
        emitS1<double>(t, ty, [](const Inst& I, double a) { return sqrtD(a, getRm(I)); }, C_SFU).fl = rm(r);
      else if (K == 2)
        emit1<double>(t, ty, [](double a) { return 1.0 / std::sqrt(a); }, C_SFU);
      else
        t.err("type");
      return;
    case Ty::F16: emit1<u16>(t, ty, [](u16 a) { return f2h(sfu<K>(h2f(a))); }, C_SFU); return;
    case Ty::BF16: emit1<u16>(t, ty, [](u16 a) { return f2b(sfu<K>(b2f(a))); }, C_SFU); return;
    case Ty::F16X2:
      emit1<u32>(t, ty, [](u32 a) { return x2<HF>(a, [](u16 x) { return f2h(sfu<K>(h2f(x))); }); }, C_SFU);
      return;
    case Ty::BF16X2:
      emit1<u32>(t, ty, [](u32 a) { return x2<BF>(a, [](u16 x) { return f2b(sfu<K>(b2f(x))); }); }, C_SFU);
      return;
    default: t.err("type");
  }
}
OP(rcp) { special<0>(t); }
OP(sqrt) { special<1>(t); }
OP(rsqrt) { special<2>(t); }
OP(sin) { special<3>(t); }
OP(cos) { special<4>(t); }
OP(lg2) { special<5>(t); }
OP(ex2) { special<6>(t); }
OP(tanh) { special<7>(t); }

OP(copysign) {
  Ty ty = t.type();
  if (ty == Ty::F32)
    emit2<u32>(t, ty, [](u32 a, u32 b) { return (b & 0x7fffffffu) | (a & 0x80000000u); });
  else
    emit2<u64>(t, ty, [](u64 a, u64 b) { return (b & ~(1ull << 63)) | (a & (1ull << 63)); });
}
OP(testp) {
  Ty ty = t.type();
  u32 k = 0;
  const char* n[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
  for (u32 i = 0; i < 6; ++i)
    if (t.has(n[i])) k = i;
  s32 a = t.S(1, ty), d = t.predD(t.op(0));
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 r = 0;
    FOR_LANES(i, m) {
      double x;
      bool sub;
      if (I.t) {
        x = bitsd(src<u64>(w, I.a)[i]);
        sub = std::fpclassify(x) == FP_SUBNORMAL;
      } else {
        float f = bitsf(srcw(w, I.a)[i]);
        x = f;
        sub = std::fpclassify(f) == FP_SUBNORMAL;
      }
      bool b = false;
      switch (I.fl) {
        case 0: b = std::isfinite(x); break;
        case 1: b = std::isinf(x); break;
        case 2: b = !std::isnan(x); break;
        case 3: b = std::isnan(x); break;
        case 4: b = std::isfinite(x) && x != 0 && !sub; break;
        case 5: b = sub; break;
      }
      r |= (u32)b << i;
    }
    w.preds[I.d] = (w.preds[I.d] & ~m) | r;
  };
  Inst& I = t.out(h, C_FLOAT);
  I.a = a;
  I.d = d;
  I.fl = k;
  I.t = ty == Ty::F64;
}

// ---- bit operations ----
OP(popc) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto f32 = [](u32 x) { return (u32)__builtin_popcount(x); };
  auto f64 = [](u64 x) { return (u32)__builtin_popcountll(x); };
  Inst& I =
      t.out(tyBits(ty) == 64 ? (Handler)g1<u32, u64, decltype(f64)> : (Handler)g1<u32, u32, decltype(f32)>, C_INT);
  I.a = a;
  I.d = d;
}
OP(clz) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto f32 = [](u32 x) { return (u32)(x ? __builtin_clz(x) : 32); };
  auto f64 = [](u64 x) { return (u32)(x ? __builtin_clzll(x) : 64); };
  Inst& I =
      t.out(tyBits(ty) == 64 ? (Handler)g1<u32, u64, decltype(f64)> : (Handler)g1<u32, u32, decltype(f32)>, C_INT);
  I.a = a;
  I.d = d;
}
OP(bfind) {
  bool sh = t.has("shiftamt");
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    FOR_LANES(i, m) {
      u32 r;
      int bits = I.t & 1 ? 64 : 32;
      u64 x = bits == 64 ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
      if (I.t & 2) {
        s64 sx = bits == 64 ? (s64)x : (s64)(s32)x;
        if (sx < 0) x = bits == 64 ? ~x : (u32)~x;
      }
      r = x ? (u32)(63 - __builtin_clzll(x)) : ~0u;
      if (I.fl && r != ~0u) r = (u32)bits - 1 - r;
      d[i] = r;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.t = (u8)((tyBits(ty) == 64) | (tySigned(ty) ? 2 : 0));
  I.fl = sh;
}
OP(brev) {
  Ty ty = t.type();
  if (tyBits(ty) == 64)
    emit1<u64>(t, ty, [](u64 x) {
      u64 r = 0;
      for (int i = 0; i < 64; ++i) r |= (x >> i & 1) << (63 - i);
      return r;
    });
  else
    emit1<u32>(t, ty, [](u32 x) {
      u32 r = 0;
      for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
      return r;
    });
}
template <class T>
static T bfeF(T a, u32 b, u32 c) {
  const u32 B = sizeof(T) * 8;
  u32 pos = b & 0xff, len = c & 0xff;
  using U = std::make_unsigned_t<T>;
  if (len == 0) return 0;
  bool sgn = false;
  if constexpr (std::is_signed_v<T>) sgn = (U)a >> std::min(pos + len - 1, B - 1) & 1;
  U r = pos >= B ? 0 : (U)a >> pos;
  u32 have = pos >= B ? 0 : B - pos;
  if (len < B) r &= ((U)1 << len) - 1;
  u32 valid = std::min(len, have);
  if (sgn && valid < B) r |= ~(((U)1 << valid) - 1);
  return (T)r;
}
OP(bfe) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), c = t.S(3, Ty::U32), d = t.D(0, ty);
  auto mk = [&](Handler h) {
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.c = c;
    I.d = d;
  };
  auto f1 = [](u32 x, u32 y, u32 z) { return bfeF<u32>(x, y, z); };
  auto f2 = [](s32 x, u32 y, u32 z) { return bfeF<s32>(x, y, z); };
  auto f3 = [](u64 x, u32 y, u32 z) { return bfeF<u64>(x, y, z); };
  auto f4 = [](s64 x, u32 y, u32 z) { return bfeF<s64>(x, y, z); };
  if (ty == Ty::U32)
    mk(g3<u32, u32, u32, u32, decltype(f1)>);
  else if (ty == Ty::S32)
    mk(g3<s32, s32, u32, u32, decltype(f2)>);
  else if (ty == Ty::U64)
    mk(g3<u64, u64, u32, u32, decltype(f3)>);
  else
    mk(g3<s64, s64, u32, u32, decltype(f4)>);
}
OP(bfi) {
  Ty ty = t.type();
  bool q = tyBits(ty) == 64;
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, Ty::U32), e = t.S(4, Ty::U32), d = t.D(0, ty);
  auto h32 = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    auto* c = srcw(w, I.c);
    auto* e = srcw(w, I.e);
    FOR_LANES(i, m) {
      u32 pos = c[i] & 255, len = e[i] & 255;
      u64 mask = len >= 32 ? 0xffffffffu : ((1ull << len) - 1);
      u64 mm = pos >= 32 ? 0 : (u32)(mask << pos);
      d[i] = (u32)((b[i] & ~mm) | (((u64)a[i] << (pos & 63)) & mm));
    }
  };
  auto h64 = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u64>(w, I.d);
    auto* a = src<u64>(w, I.a);
    auto* b = src<u64>(w, I.b);
    auto* c = srcw(w, I.c);
    auto* e = srcw(w, I.e);
    FOR_LANES(i, m) {
      u32 pos = c[i] & 255, len = e[i] & 255;
      u64 mask = len >= 64 ? ~0ull : ((1ull << len) - 1);
      u64 mm = pos >= 64 ? 0 : mask << pos;
      d[i] = (b[i] & ~mm) | (pos >= 64 ? 0 : (a[i] << pos) & mm);
    }
  };
  Inst& I = t.out(q ? (Handler)h64 : (Handler)h32, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.e = e;
  I.d = d;
}
OP(bmsk) {
  t.ignore({"clamp"});
  bool wrap = t.has("wrap");
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, ty), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    FOR_LANES(i, m) {
      u32 x = a[i], y = b[i];
      if (I.fl) {
        x &= 31;
        y &= 31;
      }
      u64 mk = y >= 32 ? 0xffffffffull : (1ull << y) - 1;
      d[i] = x >= 32 ? 0 : (u32)(mk << x);
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.d = d;
  I.fl = wrap;
}
template <int K>
static void logic(Tr& t) {  // and or xor
  Ty ty = t.type();
  if (ty == Ty::PRED) {
    bool na, nb;
    s32 a = t.pred(t.op(1), na), b = t.pred(t.op(2), nb), d = t.predD(t.op(0));
    auto h = [](Warp& w, const Inst& I, u32 m) {
      u32 x = w.preds[I.a] ^ (I.fl & 1 ? ~0u : 0), y = w.preds[I.b] ^ (I.fl & 2 ? ~0u : 0);
      u32 r = K == 0 ? x & y : K == 1 ? x | y : x ^ y;
      w.preds[I.d] = (w.preds[I.d] & ~m) | (r & m);
    };
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.d = d;
    I.fl = (u32)na | (u32)nb << 1;
    return;
  }
  auto go = [&](auto tag) {
    using T = typename decltype(tag)::type;
    emit2<T>(t, ty, [](T a, T b) { return (T)(K == 0 ? a & b : K == 1 ? a | b : a ^ b); });
  };
  int b = tyBits(ty);
  if (b == 64)
    go(Tag<u64>{});
  else if (b == 32)
    go(Tag<u32>{});
  else
    go(Tag<u16>{});
}
static void op_and_(Tr& t) { logic<0>(t); }
static void op_or_(Tr& t) { logic<1>(t); }
static void op_xor_(Tr& t) { logic<2>(t); }
static void op_not_(Tr& t) {
  Ty ty = t.type();
  if (ty == Ty::PRED) {
    bool na;
    s32 a = t.pred(t.op(1), na), d = t.predD(t.op(0));
    auto h = [](Warp& w, const Inst& I, u32 m) {
      w.preds[I.d] = (w.preds[I.d] & ~m) | (~(w.preds[I.a] ^ (I.fl ? ~0u : 0)) & m);
    };
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.d = d;
    I.fl = na;
    return;
  }
  int b = tyBits(ty);
  if (b == 64)
    emit1<u64>(t, ty, [](u64 a) { return ~a; });
  else if (b == 32)
    emit1<u32>(t, ty, [](u32 a) { return ~a; });
  else
    emit1<u16>(t, ty, [](u16 a) { return (u16)~a; });
}
OP(cnot) {
  Ty ty = t.type();
  if (tyBits(ty) == 64)
    emit1<u64>(t, ty, [](u64 a) { return (u64)(a == 0); });
  else
    emit1<u32>(t, ty, [](u32 a) { return (u32)(a == 0); });
}
OP(lop3) {
  Ty ty = t.type();
  bool isOr = t.has("or"), isAnd = t.has("and");
  if (isOr || isAnd) {  // d|p = (a op b op c), p = (d != 0) or/and q
    const Operand& o = t.op(0);
    if (o.k != Operand::PAIR) t.err("lop3 d|p expected");
    if (t.op(4).k != Operand::INT) t.err("lop3 table must be a constant");
    bool n;
    s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty), q = t.pred(t.op(5), n), d = t.D(o.v[0], 4), p = t.predD(o.v[1]);
    const s32* v = t.aux({p, q, (s32)n});
    auto h = [](Warp& w, const Inst& I, u32 m) {
      auto* d = dst<u32>(w, I.d);
      auto* a = srcw(w, I.a);
      auto* b = srcw(w, I.b);
      auto* c = srcw(w, I.c);
      u32 nz = 0;
      FOR_LANES(i, m) {
        u32 r = 0;
        for (int k = 0; k < 8; ++k)
          if (I.fl >> k & 1) r |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
        d[i] = r;
        nz |= (u32)(r != 0) << i;
      }
      u32 q = w.preds[I.v[1]] ^ (I.v[2] ? ~0u : 0), r = I.t ? nz | q : nz & q;
      w.preds[I.v[0]] = (w.preds[I.v[0]] & ~m) | (r & m);
    };
    u32 lut = (u32)t.op(4).imm & 255;
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.c = c;
    I.d = d;
    I.v = v;
    I.fl = lut;
    I.t = isOr;
    return;
  }
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    auto* c = srcw(w, I.c);
    u32 L = I.fl;
    u32 k[8];
    for (int j = 0; j < 8; ++j) k[j] = L >> j & 1 ? ~0u : 0;
    auto f = [&](u32 x, u32 y, u32 z) {
      return (~x & ~y & ~z & k[0]) | (~x & ~y & z & k[1]) | (~x & y & ~z & k[2]) | (~x & y & z & k[3]) |
             (x & ~y & ~z & k[4]) | (x & ~y & z & k[5]) | (x & y & ~z & k[6]) | (x & y & z & k[7]);
    };
    if (m == ~0u) {
#pragma GCC ivdep
      for (int i = 0; i < 32; ++i) d[i] = f(a[i], b[i], c[i]);
    } else
      FOR_LANES(i, m) d[i] = f(a[i], b[i], c[i]);
  };
  if (t.op(4).k != Operand::INT) t.err("lop3 table must be a constant");
  u32 lut = (u32)t.op(4).imm & 255;
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = lut;
}
OP(shl) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, ty);
  auto mk = [&](Handler h) {
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.d = d;
  };
  auto f32 = [](u32 x, u32 s) { return s > 31 ? 0u : x << s; };
  auto f64 = [](u64 x, u32 s) { return s > 63 ? 0ull : x << s; };
  auto f16 = [](u16 x, u32 s) { return (u16)(s > 15 ? 0 : x << s); };
  int bb = tyBits(ty);
  if (bb == 64)
    mk(g2<u64, u64, u32, decltype(f64)>);
  else if (bb == 32)
    mk(g2<u32, u32, u32, decltype(f32)>);
  else
    mk(g2<u16, u16, u32, decltype(f16)>);
}
OP(shr) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, ty);
  auto mk = [&](Handler h) {
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.d = d;
  };
  auto f32 = [](u32 x, u32 s) { return s > 31 ? 0u : x >> s; };
  auto f64 = [](u64 x, u32 s) { return s > 63 ? 0ull : x >> s; };
  auto f16 = [](u16 x, u32 s) { return (u16)(s > 15 ? 0 : x >> s); };
  auto g32 = [](s32 x, u32 s) { return x >> (s > 31 ? 31 : s); };
  auto g64 = [](s64 x, u32 s) { return x >> (s > 63 ? 63 : s); };
  auto g16 = [](s16 x, u32 s) { return (s16)(x >> (s > 15 ? 15 : s)); };
  int bb = tyBits(ty);
  if (tySigned(ty)) {
    if (bb == 64)
      mk(g2<s64, s64, u32, decltype(g64)>);
    else if (bb == 32)
      mk(g2<s32, s32, u32, decltype(g32)>);
    else
      mk(g2<s16, s16, u32, decltype(g16)>);
  } else {
    if (bb == 64)
      mk(g2<u64, u64, u32, decltype(f64)>);
    else if (bb == 32)
      mk(g2<u32, u32, u32, decltype(f32)>);
    else
      mk(g2<u16, u16, u32, decltype(f16)>);
  }
}
OP(shf) {
  bool l = t.has("l");
  t.has("r");
  bool wrap = t.has("wrap");
  t.has("clamp");
  Ty ty = t.type();
  auto lw = [](u32 a, u32 b, u32 c) {
    u32 n = c & 31;
    return (u32)(((u64)b << 32 | a) << n >> 32);
  };
  auto lc = [](u32 a, u32 b, u32 c) {
    u32 n = std::min(c, 32u);
    return n == 32 ? a : (u32)(((u64)b << 32 | a) << n >> 32);
  };
  auto rw = [](u32 a, u32 b, u32 c) {
    u32 n = c & 31;
    return (u32)(((u64)b << 32 | a) >> n);
  };
  auto rc = [](u32 a, u32 b, u32 c) {
    u32 n = std::min(c, 32u);
    return n == 32 ? b : (u32)(((u64)b << 32 | a) >> n);
  };
  if (l) {
    if (wrap)
      emit3<u32>(t, ty, lw);
    else
      emit3<u32>(t, ty, lc);
  } else {
    if (wrap)
      emit3<u32>(t, ty, rw);
    else
      emit3<u32>(t, ty, rc);
  }
}
static u32 prmtF(u32 a, u32 b, u32 sel, u32 mode) {
  u64 s = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) {
    u32 n;
    u32 k = sel & 3;
    switch (mode) {
      case 0: {
        u32 x = sel >> (4 * i) & 15;
        u32 by = (u32)(s >> ((x & 7) * 8)) & 255;
        if (x & 8) by = by & 0x80 ? 255 : 0;
        r |= by << (8 * i);
        continue;
      }
      case 1: n = k + i; break;                   // f4e
      case 2: n = (k - i) & 7; break;             // b4e
      case 3: n = k; break;                       // rc8
      case 4: n = std::max<u32>(k, i); break;     // ecl
      case 5: n = std::min<u32>(k, i); break;     // ecr
      default: n = (k & 1) * 2 + (i & 1); break;  // rc16
    }
    r |= ((u32)(s >> (n * 8)) & 255) << (8 * i);
  }
  return r;
}
OP(prmt) {
  Ty ty = t.type();
  const char* md[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  u32 mode = 0;
  for (u32 i = 1; i < 7; ++i)
    if (t.has(md[i])) mode = i;
  emitS3<u32>(t, ty, [](const Inst& I, u32 a, u32 b, u32 c) { return prmtF(a, b, c, I.fl); }).fl = mode;
}
OP(dp4a) {
  auto ty = t.types();
  if (ty.size() != 2) t.err("dp4a types");
  bool sa = tySigned(ty[0]), sb = tySigned(ty[1]);
  s32 a = t.S(1, Ty::U32), b = t.S(2, Ty::U32), c = t.S(3, Ty::U32), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    auto* c = srcw(w, I.c);
    FOR_LANES(i, m) {
      u32 r = c[i];
      for (int k = 0; k < 4; ++k) {
        int x = (u8)(a[i] >> 8 * k), y = (u8)(b[i] >> 8 * k);
        if (I.fl & 1) x = (s8)x;
        if (I.fl & 2) y = (s8)y;
        r += (u32)(x * y);
      }
      d[i] = r;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = (u32)sa | (u32)sb << 1;
}
OP(dp2a) {
  bool hi = t.has("hi");
  t.has("lo");
  auto ty = t.types();
  if (ty.size() != 2) t.err("dp2a types");
  bool sa = tySigned(ty[0]), sb = tySigned(ty[1]);
  s32 a = t.S(1, Ty::U32), b = t.S(2, Ty::U32), c = t.S(3, Ty::U32), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    auto* c = srcw(w, I.c);
    FOR_LANES(i, m) {
      u32 r = c[i];
      for (int k = 0; k < 2; ++k) {
        int x = (u16)(a[i] >> 16 * k), y = (u8)(b[i] >> (8 * k + (I.fl & 4 ? 16 : 0)));
        if (I.fl & 1) x = (s16)x;
        if (I.fl & 2) y = (s8)y;
        r += (u32)(x * y);
      }
      d[i] = r;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = (u32)sa | (u32)sb << 1 | (u32)hi << 2;
}

// ---- comparisons ----
enum Cmp : int { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
template <class T>
static bool cmpF(int c, T a, T b) {
  bool un = false;
  if constexpr (std::is_floating_point_v<T>) un = (a != a) || (b != b);
  switch (c) {
    case EQ: return !un && a == b;
    case NE: return !un && a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case EQU: return un || a == b;
    case NEU: return un || a != b;
    case LTU: return un || a < b;
    case LEU: return un || a <= b;
    case GTU: return un || a > b;
    case GEU: return un || a >= b;
    case NUM: return !un;
    case NAN_: return un;
  }
  return false;
}
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

// ---- moves ----
static void hmovS(Warp& w, const Inst& I, u32 m);
static void emitMov(Tr& t, s32 d, s32 a, int bytes) {
  auto f32 = [](u32 x) { return x; };
  auto f64 = [](u64 x) { return x; };
  Inst& I = t.out(bytes == 8 ? (Handler)h1<u64, decltype(f64)> : (Handler)h1<u32, decltype(f32)>, C_MOV);
  I.a = a;
  I.d = d;
}
OP(mov) {
  Ty ty = t.type();
  const Operand &d = t.op(0), &s = t.op(1);
  if (ty == Ty::PRED) {
    bool n;
    s32 a = t.pred(s, n), dd = t.predD(d);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      w.preds[I.d] = (w.preds[I.d] & ~m) | ((w.preds[I.a] ^ (I.fl ? ~0u : 0)) & m);
    };
    Inst& I = t.out(h, C_MOV);
    I.a = a;
    I.d = dd;
    I.fl = n;
    return;
  }
  if (s.k == Operand::SREG) {
    Inst I0;
    int bytes = tyBits(ty) > 32 ? 8 : 4;
    Inst& I = t.out(hmovS, C_MOV);
    I.fl = (u32)s.sreg;
    I.d = t.D(0, bytes);
    I.t = bytes == 8;
    return;
  }
  if (s.k == Operand::VEC || d.k == Operand::VEC) {  // pack or unpack
    int bits = tyBits(ty);
    const auto& vec = s.k == Operand::VEC ? s.v : d.v;
    int n = (int)vec.size(), eb = bits / n;
    Ty et = eb == 64 ? Ty::B64 : eb == 32 ? Ty::B32 : eb == 16 ? Ty::B16 : Ty::B8;
    if (bits == 128) {
      const Operand& big = s.k == Operand::VEC ? d : s;
      if (big.k != Operand::REG || t.regTy[big.reg] != Ty::B128) t.err("128-bit register expected");
      s32 bs = t.slot[big.reg];
      std::vector<s32> v;
      for (auto& o : vec) v.push_back(s.k == Operand::VEC ? t.S(o, et) : t.D(o, eb == 64 ? 8 : 4));
      if (n != 2) t.err("128-bit mov of 2 elements expected");
      auto hp = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) for (int k = 0; k < 2; ++k) memcpy(w.regs + I.d + i * 4 + k * 2, &src<u64>(w, I.v[k])[i], 8);
      };
      auto hu = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) for (int k = 0; k < 2; ++k) memcpy(&dst<u64>(w, I.v[k])[i], w.regs + I.a + i * 4 + k * 2, 8);
      };
      const s32* av = t.aux(v);
      Inst& I = t.out(s.k == Operand::VEC ? (Handler)hp : (Handler)hu, C_MOV);
      I.v = av;
      I.d = bs;
      I.a = bs;
      return;
    }
    if (s.k == Operand::VEC && d.k == Operand::VEC) t.err("vector to vector mov");
    std::vector<s32> v;
    if (s.k == Operand::VEC) {
      for (auto& o : s.v) v.push_back(t.S(o, et));
      const s32* av = t.aux(v);
      s32 dd = t.D(0, bits > 32 ? 8 : 4);
      auto h = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) {
          u64 r = 0;
          for (int k = 0; k < I.n; ++k) {
            u64 x = srcw(w, I.v[k])[i];
            x &= I.imm;
            r |= x << (k * I.t2);
          }
          if (I.t)
            dst<u64>(w, I.d)[i] = r;
          else
            dst<u32>(w, I.d)[i] = (u32)r;
        }
      };
      Inst& I = t.out(h, C_MOV);
      I.v = av;
      I.d = dd;
      I.n = (u8)n;
      I.t2 = (u8)eb;
      I.t = bits > 32;
      I.imm = (s64)((1ull << eb) - 1);
    } else {
      for (auto& o : d.v) v.push_back(o.k == Operand::SINK ? -1 : t.D(o, 4));
      const s32* av = t.aux(v);
      s32 a = t.S(s, ty);
      auto h = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) {
          u64 x = I.t ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
          for (int k = 0; k < I.n; ++k)
            if (I.v[k] >= 0) w.regs[I.v[k] + i] = (u32)((x >> (k * I.t2)) & (u64)I.imm);
        }
      };
      Inst& I = t.out(h, C_MOV);
      I.v = av;
      I.a = a;
      I.n = (u8)n;
      I.t2 = (u8)eb;
      I.t = bits > 32;
      I.imm = (s64)((1ull << eb) - 1);
    }
    return;
  }
  if (ty == Ty::B128) {
    if (s.k != Operand::REG || d.k != Operand::REG) t.err("128-bit mov operand");
    auto h = [](Warp& w, const Inst& I, u32 m) {
      FOR_LANES(i, m) memcpy(w.regs + I.d + i * 4, w.regs + I.a + i * 4, 16);
    };
    Inst& I = t.out(h, C_MOV);
    I.a = t.slot[s.reg];
    I.d = t.slot[d.reg];
    return;
  }
  int bytes = tyBits(ty) > 32 ? 8 : 4;
  s32 a = t.S(1, ty), dd = t.D(0, bytes);
  emitMov(t, dd, a, bytes);
}
static void hmovS(Warp& w, const Inst& I, u32 m) {
  u32 v = 0;
  u64 v64 = 0;
  const CTA& c = *w.cta;
  const Launch& L = *c.L;
  const u32* per = nullptr;
  u32 tmp[32];
  auto each = [&](auto f) {
    for (u32 i = 0; i < 32; ++i) tmp[i] = f(i);
    per = tmp;
  };
  static std::atomic<u64> timer{1};
  switch (I.fl) {
    case SR_TID_X: per = w.tid[0]; break;
    case SR_TID_Y: per = w.tid[1]; break;
    case SR_TID_Z: per = w.tid[2]; break;
    case SR_NTID_X:
    case SR_NTID_Y:
    case SR_NTID_Z: v = L.block[I.fl - SR_NTID_X]; break;
    case SR_CTAID_X:
    case SR_CTAID_Y:
    case SR_CTAID_Z: v = c.id[I.fl - SR_CTAID_X]; break;
    case SR_NCTAID_X:
    case SR_NCTAID_Y:
    case SR_NCTAID_Z: v = L.grid[I.fl - SR_NCTAID_X]; break;
    case SR_LANEID: each([](u32 i) { return i; }); break;
    case SR_WARPID: v = w.wid; break;
    case SR_NWARPID: v = 64; break;
    case SR_SMID: v = (w.cl->id * (u32)w.cl->ctas.size() + c.rank) % (g_cfg.a100 ? 108 : 132); break;
    case SR_NSMID: v = g_cfg.a100 ? 108 : 132; break;
    case SR_GRIDID:
      v = (u32)L.gridId;
      v64 = L.gridId;
      break;
    case SR_CLUSTERID_X:
    case SR_CLUSTERID_Y:
    case SR_CLUSTERID_Z: v = w.cl->cid[I.fl - SR_CLUSTERID_X]; break;
    case SR_NCLUSTERID_X:
    case SR_NCLUSTERID_Y:
    case SR_NCLUSTERID_Z: {
      int k = (int)I.fl - SR_NCLUSTERID_X;
      v = L.grid[k] / L.cluster[k];
      break;
    }
    case SR_CLUSTER_CTAID_X:
    case SR_CLUSTER_CTAID_Y:
    case SR_CLUSTER_CTAID_Z: {
      int k = (int)I.fl - SR_CLUSTER_CTAID_X;
      v = c.id[k] % L.cluster[k];
      break;
    }
    case SR_CLUSTER_NCTAID_X:
    case SR_CLUSTER_NCTAID_Y:
    case SR_CLUSTER_NCTAID_Z: v = L.cluster[I.fl - SR_CLUSTER_NCTAID_X]; break;
    case SR_CLUSTER_CTARANK: v = c.rank; break;
    case SR_CLUSTER_NCTARANK: v = (u32)w.cl->ctas.size(); break;
    case SR_IS_EXPLICIT_CLUSTER: v = w.cl->ctas.size() > 1; break;
    case SR_LANEMASK_EQ: each([](u32 i) { return 1u << i; }); break;
    case SR_LANEMASK_LT: each([](u32 i) { return (1u << i) - 1; }); break;
    case SR_LANEMASK_LE: each([](u32 i) { return (u32)((2ull << i) - 1); }); break;
    case SR_LANEMASK_GT: each([](u32 i) { return ~(u32)((2ull << i) - 1); }); break;
    case SR_LANEMASK_GE: each([](u32 i) { return ~((1u << i) - 1); }); break;
    case SR_CLOCK: v = (u32)(w.cl->instrs * 4 + w.instCount); break;
    case SR_CLOCK_HI: v = (u32)((w.cl->instrs * 4) >> 32); break;
    case SR_CLOCK64:
      v64 = w.cl->instrs * 4 + w.instCount;
      v = (u32)v64;
      break;
    case SR_GLOBALTIMER:
    case SR_GLOBALTIMER_LO:
    case SR_GLOBALTIMER_HI:
      v64 = timer.fetch_add(100) + w.cl->instrs * 32;
      v = I.fl == SR_GLOBALTIMER_HI ? (u32)(v64 >> 32) : (u32)v64;
      break;
    case SR_DYNAMIC_SMEM_SIZE: v = L.dynSmem; break;
    case SR_TOTAL_SMEM_SIZE: v = L.smemBytes - kSmemBase; break;
    case SR_AGGR_SMEM_SIZE: v = L.smemBytes; break;
    default: simFail(w, 719, "special register %u is not supported", I.fl);
  }
  if (I.t) {
    if (!v64) v64 = per ? 0 : v;
    FOR_LANES(i, m) dst<u64>(w, I.d)[i] = per ? per[i] : v64;
  } else {
    u32* d = w.regs + I.d;
    FOR_LANES(i, m) d[i] = per ? per[i] : v;
  }
}

// ---- conversions ----
static void hcvt(Warp& w, const Inst& I, u32 m) {
  const Ty dt = (Ty)I.t, st = (Ty)I.t2;
  const bool s64b = tyBits(st) > 32, d64 = I.n == 8;
  const Round r = getRm(I);
  const bool dflt = tyFloat(dt) || dt == Ty::TF32, sflt = tyFloat(st);
  FOR_LANES(i, m) {
    u64 raw = s64b || (I.fl & F_WIDE) ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
    double dv = 0;
    s64 iv = 0;
    bool uns = false;
    switch (st) {
      case Ty::F32: {
        float f = bitsf((u32)raw);
        if (I.fl & F_FTZ) f = ftzf(f);
        dv = f;
        break;
      }
      case Ty::F64: dv = bitsd(raw); break;
      case Ty::F16: dv = h2f((u16)raw); break;
      case Ty::BF16: dv = b2f((u16)raw); break;
      case Ty::S8: iv = (s8)raw; break;
      case Ty::S16: iv = (s16)raw; break;
      case Ty::S32: iv = (s32)raw; break;
      case Ty::S64: iv = (s64)raw; break;
      case Ty::U8:
      case Ty::B8: iv = (u8)raw; break;
      case Ty::U16:
      case Ty::B16: iv = (u16)raw; break;
      case Ty::U32:
      case Ty::B32: iv = (u32)raw; break;
      case Ty::U64:
      case Ty::B64:
        iv = (s64)raw;
        uns = true;
        break;
      default: simFail(w, 719, "cvt source type .%s", tyName(st));
    }
    u64 out = 0;
    if (!dflt) {
      int db = tyBits(dt);
      bool ds = tySigned(dt);
      if (sflt) {
        if (dv != dv)
          out = 0;
        else {
          double q = roundInt(std::fabs(dv), r == RM ? (dv < 0 ? RP : RM) : r == RP ? (dv < 0 ? RM : RP) : r);
          if (dv < 0) q = -q;
          if (ds) {
            double lo = -std::ldexp(1.0, db - 1), hi = std::ldexp(1.0, db - 1);
            s64 x = q <= lo   ? (db == 64 ? INT64_MIN : -(1ll << (db - 1)))
                    : q >= hi ? (db == 64 ? INT64_MAX : (1ll << (db - 1)) - 1)
                              : (s64)q;
            out = (u64)x;
          } else {
            double hi = std::ldexp(1.0, db);
            out = q <= 0 ? 0 : q >= hi ? (db == 64 ? ~0ull : (1ull << db) - 1) : (u64)q;
          }
        }
      } else if (I.fl & F_SAT) {
        if (ds) {
          s64 lo = db == 64 ? INT64_MIN : -(1ll << (db - 1)), hi = db == 64 ? INT64_MAX : (1ll << (db - 1)) - 1;
          if (uns && iv < 0)
            out = (u64)hi;
          else
            out = (u64)std::clamp(iv, lo, hi);
        } else {
          u64 hi = db == 64 ? ~0ull : (1ull << db) - 1;
          if (!uns && iv < 0)
            out = 0;
          else
            out = std::min((u64)iv, hi);
        }
      } else {
        out = (u64)iv;
        if (db == 8)
          out = ds ? (u64)(s64)(s8)out : (u8)out;
        else if (db == 16)
          out = ds ? (u64)(s64)(s16)out : (u16)out;
        else if (db == 32)
          out = ds ? (u64)(s64)(s32)out : (u32)out;
      }
    } else {
      if (sflt) {
        if (I.fl & F_RINT) {
          double q = roundInt(std::fabs(dv), r == RM ? (dv < 0 ? RP : RM) : r == RP ? (dv < 0 ? RM : RP) : r);
          dv = std::copysign(q, dv);
        }
        if (I.fl & F_SAT) dv = dv != dv ? 0 : dv < 0 ? 0 : dv > 1 ? 1 : dv;
        if ((I.fl & F_RELU) && dv <= 0) dv = 0;
      }
      Round er = (I.fl & F_RINT) ? RN : r;
      bool sf = I.fl & F_SATFIN;
      if (!sflt) {
        bool exact = uns ? (u64)iv < (1ull << 53) : std::llabs(iv) < (1ll << 53);
        dv = uns ? (double)(u64)iv : (double)iv;
        if (!exact && dt != Ty::F64) {
          if (dt == Ty::F32 && er == RN) {
            float f = uns ? (float)(u64)iv : (float)iv;
            out = fbits(f);
            goto store;
          }
          dv = uns ? (double)((u64)iv & ~0xfffull)
                   : std::copysign((double)((u64)std::llabs(iv) & ~0xfffull), (double)iv);
          dv = bitsd(dbits(dv) | 1);  // sticky bit: correct for every rounding direction of narrow formats
        }
      }
      switch (dt) {
        case Ty::F32:
          out = dv != dv ? 0x7fffffffu : encodeFloat(dv, 8, 23, er, sf);
          if (I.fl & F_FTZ) out = fbits(ftzf(bitsf((u32)out)));
          break;
        case Ty::F64: out = dbits(dv); break;
        case Ty::F16: out = encodeFloat(dv, 5, 10, er, sf); break;
        case Ty::BF16: out = encodeFloat(dv, 8, 7, er, sf); break;
        case Ty::TF32: out = dv != dv ? 0x7fffffffu : (u64)encodeFloat(dv, 8, 10, er, sf) << 13; break;
        default: simFail(w, 719, "cvt destination type .%s", tyName(dt));
      }
    }
  store:
    if (d64)
      dst<u64>(w, I.d)[i] = out;
    else
      w.regs[I.d + i] = I.n == 2 ? (u32)out & 0xffff : (u32)out;
  }
}
static u8 encE4(double v, bool sat) { return (u8)encodeFloat(v, 4, 3, RN, sat, K_E4M3); }
static u8 encE5(double v, bool sat) { return (u8)encodeFloat(v, 5, 2, RN, sat); }
static void hcvtPack(Warp& w, const Inst& I, u32 m) {  // two f32 -> packed, or f16x2 <-> fp8x2
  const Ty dt = (Ty)I.t, st = (Ty)I.t2;
  const Round r = getRm(I);
  FOR_LANES(i, m) {
    double hi, lo;
    u32 a = srcw(w, I.a)[i];
    if (st == Ty::F32) {
      hi = bitsf(a);
      lo = bitsf(srcw(w, I.b)[i]);
      if (I.fl & F_FTZ) {
        hi = ftzf((float)hi);
        lo = ftzf((float)lo);
      }
    } else if (st == Ty::F16X2) {
      hi = h2f((u16)(a >> 16));
      lo = h2f((u16)a);
    } else if (st == Ty::BF16X2) {
      hi = b2f((u16)(a >> 16));
      lo = b2f((u16)a);
    } else if (st == Ty::E4M3X2) {
      hi = g_fp8.e4m3[a >> 8 & 255];
      lo = g_fp8.e4m3[a & 255];
    } else {
      hi = g_fp8.e5m2[a >> 8 & 255];
      lo = g_fp8.e5m2[a & 255];
    }
    if (I.fl & F_RELU) {
      if (hi <= 0) hi = 0;
      if (lo <= 0) lo = 0;
    }
    bool sf = I.fl & F_SATFIN;
    u32 o;
    switch (dt) {
      case Ty::F16X2: o = encodeFloat(hi, 5, 10, r, sf) << 16 | encodeFloat(lo, 5, 10, r, sf); break;
      case Ty::BF16X2: o = encodeFloat(hi, 8, 7, r, sf) << 16 | encodeFloat(lo, 8, 7, r, sf); break;
      case Ty::E4M3X2: o = (u32)encE4(hi, sf) << 8 | encE4(lo, sf); break;
      default: o = (u32)encE5(hi, sf) << 8 | encE5(lo, sf); break;
    }
    w.regs[I.d + i] = o;
  }
}
static bool tyInt(Ty t) { return t >= Ty::B8 && t <= Ty::S64; }
OP(cvt) {
  if (t.in->mods.size() > 1 && t.in->mods[1] == "pack") {
    t.has("pack");
    t.has("sat");
    auto tys = t.types();
    Ty ct = tys[0];
    s32 a = t.S(1, Ty::S32), b = t.S(2, Ty::S32), c = t.nops() > 3 ? t.S(3, Ty::B32) : 0, d = t.D(0, 4);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      FOR_LANES(i, m) {
        int bits = tyBits((Ty)I.t);
        bool sg = tySigned((Ty)I.t);
        s64 lo = sg ? -(1ll << (bits - 1)) : 0, hi = sg ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
        u32 x = (u32)std::clamp<s64>((s32)srcw(w, I.a)[i], lo, hi) & ((1u << bits) - 1),
            y = (u32)std::clamp<s64>((s32)srcw(w, I.b)[i], lo, hi) & ((1u << bits) - 1);
        u32 o = x << bits | y;
        if (I.fl) o |= bits < 16 ? srcw(w, I.c)[i] << (2 * bits) : 0;
        w.regs[I.d + i] = o;
      }
    };
    Inst& I = t.out(h, C_I2I);
    I.a = a;
    I.b = b;
    I.c = c;
    I.d = d;
    I.t = (u8)ct;
    I.fl = t.nops() > 3;
    return;
  }
  auto tys = t.types();
  if (tys.size() != 2) t.err("cvt types");
  Ty dt = tys[0], st = tys[1];
  const bool dfl = !tyInt(dt), sfl = !tyInt(st);
  u32 f = flFloat(t);
  Round r = RN;
  if (t.has("satfinite")) f |= F_SATFIN;
  if (t.has("rni")) {
    f |= F_RINT;
    r = RN;
  } else if (t.has("rzi")) {
    f |= F_RINT;
    r = RZ;
  } else if (t.has("rmi")) {
    f |= F_RINT;
    r = RM;
  } else if (t.has("rpi")) {
    f |= F_RINT;
    r = RP;
  } else if (t.has("rna"))
    r = RNA;
  else if (t.has("rn"))
    r = RN;
  else if (t.has("rz"))
    r = RZ;
  else if (t.has("rm"))
    r = RM;
  else if (t.has("rp"))
    r = RP;
  f |= rm(r);
  const Cls cc = dfl && sfl ? (f & F_RINT ? C_FRND : C_F2F) : sfl ? C_F2I : dfl ? C_I2F : C_I2I;
  auto packed = [](Ty x) { return x == Ty::F16X2 || x == Ty::BF16X2 || x == Ty::E4M3X2 || x == Ty::E5M2X2; };
  if (packed(dt)) {
    if (t.nops() > 3) t.err("cvt with three sources");
    s32 a = t.S(1, st), b = st == Ty::F32 ? t.S(2, st) : 0, d = t.D(0, 4);
    if (st == Ty::F32 && dt == Ty::F16X2 && f == 0) {
      auto h = [](u32 x, u32 y) { return (u32)f2h(bitsf(x)) << 16 | f2h(bitsf(y)); };
      Inst& I = t.out(h2<u32, decltype(h)>, C_F2F);
      I.a = a;
      I.b = b;
      I.d = d;
      return;
    }
    if (st == Ty::F32 && dt == Ty::BF16X2 && f == 0) {
      auto h = [](u32 x, u32 y) { return (u32)f2b(bitsf(x)) << 16 | f2b(bitsf(y)); };
      Inst& I = t.out(h2<u32, decltype(h)>, C_F2F);
      I.a = a;
      I.b = b;
      I.d = d;
      return;
    }
    Inst& I = t.out(hcvtPack, cc);
    I.a = a;
    I.b = b;
    I.d = d;
    I.t = (u8)dt;
    I.t2 = (u8)st;
    I.fl = f;
    return;
  }
  if (t.op(0).k != Operand::REG) t.err("cvt destination");
  int rb = tyBits(t.regTy[t.op(0).reg]);
  const Operand& so = t.op(1);
  // integer sources may live in wider registers, whose low bits are converted
  const bool wide = so.k == Operand::REG && tyBits(t.regTy[so.reg]) == 64 && tyBits(st) <= 32;
  if (wide && sfl) t.err("cvt source register wider than its floating-point type");
  if (wide) f |= F_WIDE;
  s32 a = wide ? t.slot[so.reg] : t.S(1, st);
  s32 d = t.slot[t.op(0).reg];
  auto quick = [&](Handler h) {
    Inst& I = t.out(h, cc);
    I.a = a;
    I.d = d;
  };
  if (f == 0) {
    auto a1 = [](u32 x) { return (u64)x; };
    auto a2 = [](s32 x) { return (s64)x; };
    auto a3 = [](u64 x) { return (u32)x; };
    auto a4 = [](u16 x) { return h2f(x); };
    auto a5 = [](float x) { return f2h(x); };
    auto a6 = [](s32 x) { return (float)x; };
    auto a7 = [](u32 x) { return (float)x; };
    auto a8 = [](u16 x) { return (u32)x; };
    auto a9 = [](u32 x) { return (u16)x; };
    auto a10 = [](s16 x) { return (s32)x; };
    auto a11 = [](u16 x) { return b2f(x); };
    auto a12 = [](float x) { return f2b(x); };
    bool su32 = st == Ty::U32, ss32 = st == Ty::S32;
    if (dt == Ty::F32 && st == Ty::BF16) return quick(g1<float, u16, decltype(a11)>);
    if (dt == Ty::BF16 && st == Ty::F32) return quick(g1<u16, float, decltype(a12)>);
    if (rb == 64 && su32 && (dt == Ty::U64 || dt == Ty::S64)) return quick(g1<u64, u32, decltype(a1)>);
    if (rb == 64 && ss32 && (dt == Ty::U64 || dt == Ty::S64)) return quick(g1<s64, s32, decltype(a2)>);
    if (rb == 32 && (st == Ty::U64 || st == Ty::S64) && (dt == Ty::U32 || dt == Ty::S32))
      return quick(g1<u32, u64, decltype(a3)>);
    if (dt == Ty::F32 && st == Ty::F16) return quick(g1<float, u16, decltype(a4)>);
    if (dt == Ty::F16 && st == Ty::F32) return quick(g1<u16, float, decltype(a5)>);
    if (dt == Ty::F32 && ss32) return quick(g1<float, s32, decltype(a6)>);
    if (dt == Ty::F32 && su32) return quick(g1<float, u32, decltype(a7)>);
    if (rb == 32 && (dt == Ty::U32 || dt == Ty::S32) && st == Ty::U16) return quick(g1<u32, u16, decltype(a8)>);
    if (rb == 32 && (dt == Ty::U32 || dt == Ty::S32) && st == Ty::S16) return quick(g1<s32, s16, decltype(a10)>);
    if (rb == 16 && (dt == Ty::U16 || dt == Ty::S16) && (su32 || ss32)) return quick(g1<u16, u32, decltype(a9)>);
  }
  Inst& I = t.out(hcvt, cc);
  I.a = a;
  I.d = d;
  I.t = (u8)dt;
  I.t2 = (u8)st;
  I.fl = f;
  I.n = (u8)(rb == 64 ? 8 : rb <= 16 ? 2 : 4);
}
OP(cvta) {
  bool to = t.has("to");
  Ty ty = t.type();
  u64 win = 0;
  if (t.has("shared") || t.has("shared::cta") || t.has("shared::cluster"))
    win = g_sharedWin;
  else if (t.has("local"))
    win = g_localWin;
  else
    t.ignore({"global", "const", "param", "param::entry"});
  s32 a = t.S(1, ty), d = t.D(0, ty);
  if (win && t.op(1).k == Operand::INT && t.op(1).rsp == Space::PARAM) win = 0;
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* a = src<u64>(w, I.a);
    auto* d = dst<u64>(w, I.d);
    FOR_LANES(i, m) d[i] = a[i] + (u64)I.imm;
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.imm = (s64)(to ? 0 - win : win);
}
OP(isspacep) {
  int k = 0;
  if (t.has("shared") || t.has("shared::cta") || t.has("shared::cluster"))
    k = 1;
  else if (t.has("local"))
    k = 2;
  else if (t.has("global"))
    k = 3;
  else
    t.err("isspacep space");
  s32 a = t.S(1, Ty::B64), d = t.predD(t.op(0));
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 r = 0;
    auto* a = src<u64>(w, I.a);
    FOR_LANES(i, m) {
      bool s = a[i] - g_sharedWin < kWin, l = a[i] - g_localWin < kWin;
      r |= (u32)(I.fl == 1 ? s : I.fl == 2 ? l : !s && !l) << i;
    }
    w.preds[I.d] = (w.preds[I.d] & ~m) | r;
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.fl = (u32)k;
}
OP(createpolicy) {
  for (size_t i = 1; i < t.in->mods.size(); ++i) t.used[i] = 1;
  auto h = [](Warp& w, const Inst& I, u32 m) { FOR_LANES(i, m) dst<u64>(w, I.d)[i] = 0x14f0000000000000ull; };
  s32 d = t.D(0, 8);
  Inst& I = t.out(h, C_OTHER);
  I.d = d;
}

// ---- SIMD video instructions on two halves or four bytes: vop{2,4}.dtype.atype.btype{.sat}{.add} d, a, b, c ----
enum VOp : u8 { V_ADD, V_SUB, V_AVRG, V_ABSDIFF, V_MIN, V_MAX, V_SET };
static void hvideo(
    Warp& w, const Inst& I,
    u32 m) {  // t: operation, n: lanes; fl: 1 signed d, 2 signed a, 4 signed b, 8 sat, 16 add; imm: comparison
  const int bits = 32 / I.n;
  const u32 mask = bits == 16 ? 0xffff : 0xff;
  u32 out[32];
  auto ext = [&](u32 x, int k, bool sg) -> s32 {
    u32 v = x >> (bits * k) & mask;
    return sg ? (s32)(v << (32 - bits)) >> (32 - bits) : (s32)v;
  };
  const s32 lo = I.fl & 1 ? -(1 << (bits - 1)) : 0, hi = I.fl & 1 ? (1 << (bits - 1)) - 1 : (s32)mask;
  FOR_LANES(i, m) {
    u32 r = 0, sum = srcw(w, I.c)[i];
    for (int k = 0; k < I.n; ++k) {
      s32 x = ext(srcw(w, I.a)[i], k, I.fl & 2), y = ext(srcw(w, I.b)[i], k, I.fl & 4), v = 0;
      switch (I.t) {
        case V_ADD: v = x + y; break;
        case V_SUB: v = x - y; break;
        case V_AVRG: v = (x + y + 1) >> 1; break;
        case V_ABSDIFF: v = std::abs(x - y); break;
        case V_MIN: v = std::min(x, y); break;
        case V_MAX: v = std::max(x, y); break;
        default: v = cmpF<s32>((int)I.imm, x, y);
      }
      if (I.fl & 8) v = std::clamp(v, lo, hi);
      r |= ((u32)v & mask) << (bits * k);
      sum += (u32)ext((u32)v, 0, I.fl & 1);
    }
    out[i] = I.fl & 16 ? sum : r;
  }
  FOR_LANES(i, m) w.regs[I.d + i] = out[i];
}
template <int N>
static void video(Tr& t) {
  static const char* nm[] = {"vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset"};
  const std::string op = t.in->mods[0].substr(0, t.in->mods[0].size() - 1);
  int k = -1;
  for (int i = 0; i < 7; ++i)
    if (op == nm[i]) k = i;
  auto ty = t.types();
  if (k == V_SET) ty.insert(ty.begin(), Ty::U32);
  if (ty.size() != 3) t.err("video instruction types");
  u32 f = (u32)tySigned(ty[0]) | (u32)tySigned(ty[1]) << 1 | (u32)tySigned(ty[2]) << 2;
  if (t.has("sat")) f |= 8;
  if (t.has("add")) f |= 16;
  int c = 0;
  if (k == V_SET) {
    static const char* cn[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    c = -1;
    for (int i = 0; i < 6; ++i)
      if (t.has(cn[i])) c = i;
    if (c < 0) t.err("comparison");
  }
  s32 a = t.S(1, Ty::B32), b = t.S(2, Ty::B32), cs = t.nops() > 3 ? t.S(3, Ty::B32) : t.konst(0, 4), d = t.D(0, 4);
  Inst& I = t.out(hvideo, C_INT);
  I.a = a;
  I.b = b;
  I.c = cs;
  I.d = d;
  I.fl = f;
  I.t = (u8)k;
  I.n = N;
  I.imm = c;
}
OP(fns) {  // position of the n-th set bit counted from |base|
  t.type();
  s32 a = t.S(1, Ty::B32), b = t.S(2, Ty::B32), c = t.S(3, Ty::S32), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u32 mask = srcw(w, I.a)[i], r = ~0u;
      s64 base = srcw(w, I.b)[i];
      s32 n = (s32)srcw(w, I.c)[i];
      if (n == 0) {
        if (base < 32 && (mask >> base & 1)) r = (u32)base;
      } else {
        s64 step = n > 0 ? 1 : -1, left = std::llabs((s64)n);
        for (s64 p = base; p >= 0 && p < 32; p += step)
          if ((mask >> p & 1) && --left == 0) {
            r = (u32)p;
            break;
          }
      }
      w.regs[I.d + i] = r;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
}
OP(szext) {
  bool wrap = t.has("wrap");
  t.has("clamp");
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u32 x = srcw(w, I.a)[i], n = srcw(w, I.b)[i];
      if (I.fl & 2) n &= 31;
      w.regs[I.d + i] = n == 0     ? 0
                        : n >= 32  ? x
                        : I.fl & 1 ? (u32)((s32)(x << (32 - n)) >> (32 - n))
                                   : x & ((1u << n) - 1);
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.d = d;
  I.fl = (u32)tySigned(ty) | (u32)wrap << 1;
}

void registerAlu() {
  auto& T = opTable();
#define R(n) T[#n] = op_##n;
  R(add);
  R(sub);
  R(mul);
  R(addc);
  R(subc);
  R(fma);
  R(mad);
  R(madc);
  R(mul24);
  R(mad24);
  R(sad);
  R(div);
  R(rem);
  R(abs);
  R(neg);
  R(min);
  R(max);
  R(rcp);
  R(sqrt);
  R(rsqrt);
  R(sin);
  R(cos);
  R(lg2);
  R(ex2);
  R(tanh);
  R(copysign);
  R(testp);
  R(popc);
  R(clz);
  R(bfind);
  R(brev);
  R(bfe);
  R(bfi);
  R(bmsk);
  T["and"] = op_and_;
  T["or"] = op_or_;
  T["xor"] = op_xor_;
  T["not"] = op_not_;
  R(cnot);
  R(lop3);
  R(shl);
  R(shr);
  R(shf);
  R(prmt);
  R(dp4a);
  R(dp2a);
  R(setp);
  R(set);
  R(selp);
  R(slct);
  R(mov);
  R(cvt);
  R(cvta);
  R(isspacep);
  R(createpolicy);
  R(fns);
  R(szext);
  for (const char* v : {"vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset"}) {
    T[std::string(v) + "2"] = video<2>;
    T[std::string(v) + "4"] = video<4>;
  }
}
}  // namespace ptxsim

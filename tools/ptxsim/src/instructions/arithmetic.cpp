// Sums, differences, products, quotients, signs.
#include "instructions/rounding.h"
#include "translate/elementwise.h"

namespace ptxsim {

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

}  // namespace ptxsim

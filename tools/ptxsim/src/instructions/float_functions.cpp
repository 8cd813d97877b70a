// Minimum and maximum, the special functions, tests of floats.
#include "instructions/rounding.h"
#include "translate/elementwise.h"

namespace ptxsim {

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

}  // namespace ptxsim

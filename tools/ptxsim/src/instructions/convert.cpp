// Conversions between types.
#include "instructions/rounding.h"
#include "translate/elementwise.h"

namespace ptxsim {

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

}  // namespace ptxsim

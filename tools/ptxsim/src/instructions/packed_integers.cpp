// Dot products of bytes and the SIMD video instructions.
#include "instructions/comparison.h"
#include "translate/elementwise.h"

namespace ptxsim {

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
#define VIDEO(name)                                \
  static const Entry name##2(#name "2", video<2>); \
  static const Entry name##4(#name "4", video<4>)
VIDEO(vadd);
VIDEO(vsub);
VIDEO(vavrg);
VIDEO(vabsdiff);
VIDEO(vmin);
VIDEO(vmax);
VIDEO(vset);

}  // namespace ptxsim

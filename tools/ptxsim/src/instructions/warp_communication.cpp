// Shuffles, votes, matches, reductions of a warp.
#include "translate/translator.h"

namespace ptxsim {

// ---- warp communication ----
static void hshfl(Warp& w, const Inst& I, u32 m) {  // t: mode 0 up 1 down 2 bfly 3 idx
  u32 mem = I.imm ? srcw(w, I.e)[ffs32(m)] : w.active;
  if (I.imm && !converge(w, m, mem & w.live)) return;
  const u32* a = srcw(w, I.a);
  const u32* b = srcw(w, I.b);
  const u32* c = srcw(w, I.c);
  u32 out[32], p = 0, ot = 0;
  const u32 ta = w.tainted ? getTaint(w, I.a) : 0;
  FOR_LANES(i, m) {
    u32 bv = b[i] & 31, cv = c[i], seg = cv >> 8 & 31, cl = cv & 31, maxL = (i & seg) | (cl & ~seg), minL = i & seg;
    s32 j;
    bool ok;
    switch (I.t) {
      case 0:
        j = (s32)i - (s32)bv;
        ok = j >= (s32)maxL;
        break;
      case 1:
        j = (s32)(i + bv);
        ok = j <= (s32)maxL;
        break;
      case 2:
        j = (s32)(i ^ bv);
        ok = j <= (s32)maxL;
        break;
      default: j = (s32)(minL | (bv & ~seg)); ok = j <= (s32)maxL;
    }
    if (!ok) j = (s32)i;
    out[i] = a[j & 31];
    p |= (u32)ok << i;
    ot |= (ta >> (j & 31) & 1) << i;
  }
  FOR_LANES(i, m) w.regs[I.d + i] = out[i];
  if (w.tainted) {
    setTaint(w, I.d, ot, m);
    w.taintHandled = true;
  }
  if (I.fl) w.preds[I.fl] = (w.preds[I.fl] & ~m) | p;
}
OP(shfl) {
  bool sync = t.has("sync");
  int md = t.has("up") ? 0 : t.has("down") ? 1 : t.has("bfly") ? 2 : t.has("idx") ? 3 : -1;
  if (md < 0) t.err("shfl mode");
  t.has("b32");
  const Operand& d0 = t.op(0);
  u32 pd = 0;
  s32 d;
  if (d0.k == Operand::PAIR) {
    d = t.D(d0.v[0], 4);
    pd = (u32)t.predD(d0.v[1]);
  } else
    d = t.D(d0, 4);
  s32 a = t.S(1, Ty::B32), b = t.S(2, Ty::U32), c = t.S(3, Ty::U32), e = sync ? t.S(4, Ty::U32) : 0;
  Inst& I = t.out(hshfl, C_SHFL);
  I.d = d;
  I.a = a;
  I.b = b;
  I.c = c;
  I.e = e;
  I.t = (u8)md;
  I.fl = pd;
  I.imm = sync;
}
OP(vote) {
  bool sync = t.has("sync");
  int k = t.has("all") ? 0 : t.has("any") ? 1 : t.has("uni") ? 2 : t.has("ballot") ? 3 : -1;
  t.ignore({"pred", "b32"});
  bool n;
  s32 p = t.pred(t.op(1), n), d = k == 3 ? t.D(0, 4) : t.predD(t.op(0)), e = sync ? t.S(2, Ty::U32) : 0;
  auto h = [](Warp& w, const Inst& I, u32 m) {
    if (I.imm) {
      u32 mem = srcw(w, I.e)[ffs32(m)];
      if (!converge(w, m, mem & w.live)) return;
    }
    u32 v = (w.preds[I.a] ^ (I.fl ? ~0u : 0)) & m;
    if (I.t == 3) {
      FOR_LANES(i, m) w.regs[I.d + i] = v;
      return;
    }
    bool r = I.t == 0 ? v == m : I.t == 1 ? v != 0 : (v == 0 || v == m);
    w.preds[I.d] = (w.preds[I.d] & ~m) | (r ? m : 0);
  };
  Inst& I = t.out(h, C_VOTE);
  I.a = p;
  I.d = d;
  I.e = e;
  I.fl = n;
  I.t = (u8)k;
  I.imm = sync;
}
OP(activemask) {
  t.has("b32");
  s32 d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) { FOR_LANES(i, m) w.regs[I.d + i] = m; };
  Inst& I = t.out(h, C_VOTE);
  I.d = d;
}
OP(elect) {
  t.has("sync");
  const Operand& d0 = t.op(0);
  if (d0.k != Operand::PAIR) t.err("elect.sync d|p expected");
  s32 d = t.D(d0.v[0], 4), p = t.predD(d0.v[1]), a = t.S(1, Ty::U32);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 mem = srcw(w, I.a)[ffs32(m)];
    if (!converge(w, m, mem & w.live)) return;
    int l = ffs32(m);
    FOR_LANES(i, m) w.regs[I.d + i] = (u32)l;
    w.preds[I.e] = (w.preds[I.e] & ~m) | 1u << l;
  };
  Inst& I = t.out(h, C_VOTE);
  I.d = d;
  I.e = p;
  I.a = a;
}
OP(match) {
  bool any = t.has("any");
  t.has("all");
  t.has("sync");
  Ty ty = t.type();
  const Operand& d0 = t.op(0);
  s32 d, p = 0;
  if (d0.k == Operand::PAIR) {
    d = t.D(d0.v[0], 4);
    p = t.predD(d0.v[1]);
  } else
    d = t.D(d0, 4);
  s32 a = t.S(1, ty), e = t.S(2, Ty::U32);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 mem = srcw(w, I.e)[ffs32(m)];
    if (!converge(w, m, mem & w.live)) return;
    auto v = [&](u32 i) -> u64 { return I.t ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i]; };
    u32 out[32];
    bool all = true;
    FOR_LANES(i, m) {
      u32 r = 0;
      u64 x = v(i);
      for (u32 j = 0; j < 32; ++j)
        if (m >> j & 1 && v(j) == x) r |= 1u << j;
      out[i] = r;
      if (r != m) all = false;
    }
    if (I.fl) {
      FOR_LANES(i, m) w.regs[I.d + i] = out[i];
    } else {
      FOR_LANES(i, m) w.regs[I.d + i] = all ? m : 0;
      if (I.c) w.preds[I.c] = (w.preds[I.c] & ~m) | (all ? m : 0);
    }
  };
  Inst& I = t.out(h, C_VOTE);
  I.d = d;
  I.c = p;
  I.a = a;
  I.e = e;
  I.fl = any;
  I.t = tyBits(ty) > 32;
}
OP(redux) {
  t.has("sync");
  static const char* nm[] = {"add", "min", "max", "and", "or", "xor"};
  int k = -1;
  for (int i = 0; i < 6; ++i)
    if (t.has(nm[i])) k = i;
  if (k < 0) t.err("redux operation");
  Ty ty = t.type();
  if (tyFloat(ty)) t.err("redux.sync on floats needs sm_100");
  s32 d = t.D(0, 4), a = t.S(1, ty), e = t.S(2, Ty::U32);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 mem = srcw(w, I.e)[ffs32(m)];
    if (!converge(w, m, mem & w.live)) return;
    const u32* a = srcw(w, I.a);
    u32 r = a[ffs32(m)];
    bool first = true;
    FOR_LANES(i, m) {
      if (first) {
        first = false;
        continue;
      }
      u32 x = a[i];
      switch (I.t) {
        case 0: r += x; break;
        case 1: r = I.fl ? (u32)std::min((s32)r, (s32)x) : std::min(r, x); break;
        case 2: r = I.fl ? (u32)std::max((s32)r, (s32)x) : std::max(r, x); break;
        case 3: r &= x; break;
        case 4: r |= x; break;
        default: r ^= x;
      }
    }
    FOR_LANES(i, m) w.regs[I.d + i] = r;
  };
  Inst& I = t.out(h, C_REDUX);
  I.d = d;
  I.a = a;
  I.e = e;
  I.t = (u8)k;
  I.fl = tySigned(ty);
}

}  // namespace ptxsim

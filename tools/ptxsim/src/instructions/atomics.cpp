// atom and red.
#include "instructions/atomics.h"
#include "instructions/memory_operands.h"

namespace ptxsim {

u64 atomApply(u8 op, Ty ty, u64 o, u64 v, u64 c) {
  auto f2 = [&](auto up, auto dn) -> u64 {
    auto one = [&](u16 a, u16 b) -> u16 {
      double x = up(a), y = up(b);
      switch (op) {
        case A_ADD: return dn(x + y);
        case A_MIN: return x != x ? b : y != y ? a : y < x ? b : a;
        default: return x != x ? b : y != y ? a : y > x ? b : a;
      }
    };
    if (ty == Ty::F16X2 || ty == Ty::BF16X2)
      return (u64)one((u16)o, (u16)v) | (u64)one((u16)(o >> 16), (u16)(v >> 16)) << 16;
    return one((u16)o, (u16)v);
  };
  switch (op) {
    case A_EXCH: return v;
    case A_CAS: return o == v ? c : o;
    case A_AND: return o & v;
    case A_OR: return o | v;
    case A_XOR: return o ^ v;
    case A_INC: return (u32)o >= (u32)v ? 0 : (u32)o + 1;
    case A_DEC: return ((u32)o == 0 || (u32)o > (u32)v) ? (u32)v : (u32)o - 1;
  }
  switch (ty) {
    case Ty::F32: {
      float a = bitsf((u32)o), b = bitsf((u32)v);
      return fbits(canonNan(op == A_ADD   ? a + b
                            : op == A_MIN ? (a != a   ? b
                                             : b != b ? a
                                                      : std::min(a, b))
                                          : (a != a   ? b
                                             : b != b ? a
                                                      : std::max(a, b))));
    }
    case Ty::F64: {
      double a = bitsd(o), b = bitsd(v);
      return dbits(op == A_ADD ? a + b : op == A_MIN ? std::fmin(a, b) : std::fmax(a, b));
    }
    case Ty::F16:
    case Ty::F16X2: return f2([](u16 x) { return (double)h2f(x); }, [](double d) { return d2h(d); });
    case Ty::BF16:
    case Ty::BF16X2: return f2([](u16 x) { return (double)b2f(x); }, [](double d) { return d2b(d); });
    case Ty::S32:
      return op == A_ADD ? (u32)(o + v) : (u32)(op == A_MIN ? std::min((s32)o, (s32)v) : std::max((s32)o, (s32)v));
    case Ty::S64: return op == A_ADD ? o + v : (u64)(op == A_MIN ? std::min((s64)o, (s64)v) : std::max((s64)o, (s64)v));
    case Ty::U64:
    case Ty::B64: return op == A_ADD ? o + v : op == A_MIN ? std::min(o, v) : std::max(o, v);
    default: return op == A_ADD ? (u32)(o + v) : op == A_MIN ? std::min((u32)o, (u32)v) : std::max((u32)o, (u32)v);
  }
}

static u64 atomDo(Warp& w, int lane, Space sp, u64 a, u8 op, Ty ty, u64 v, u64 c) {
  u32 eb = (u32)tyBits(ty) / 8;
  if (a & (eb - 1)) misaligned(w, lane, a, eb);
  u8* p;
  bool sh = sp == Space::SHARED || sp == Space::SHARED_CLUSTER || (sp == Space::GENERIC && a - g_sharedWin < kWin);
  if (sh) {
    u32 sa = (u32)(sp == Space::GENERIC ? a - g_sharedWin : a);
    p = smemPtr(w, sa, eb, "atomic");
    if (g_cfg.check) {
      CTA* cc = ctaOfSmem(w, sa);
      readShared(w, *cc, sa & 0xffffff, eb, w.pc - 1, nullptr);
      markShared(*cc, sa & 0xffffff, eb);
      if (w.cl->race) raceAtomic(w, *cc, sa & 0xffffff, true);
    }
  } else {
    p = resolve(w, lane, sp, a, eb, false);
    if (g_cfg.ckOob) resolve(w, lane, sp, a, eb, true);
  }
  if (w.taintNext) {
    w.taintNext = false;
    report(w, w.pc - 1, "uninitialised",
           strf("lane %d: atomic on %s that was never written", lane, w.taintWhat.c_str()));
  }
  w.cl->st.atomics++;
  u64 o;
  if (eb == 8)
    o = atomMem<u64>(p, op, ty, v, c);
  else if (eb == 4)
    o = atomMem<u32>(p, op, ty, v, c);
  else
    o = atomMem<u16>(p, op, ty, v, c);
  if (op != A_CAS || o == v) w.cl->progress++;
  return o;
}
// v: value slots (n), then compare slot; d: destinations in v after; fl: op | hasDest<<8
static void hatom(Warp& w, const Inst& I, u32 m) {
  Ty ty = (Ty)I.t;
  u32 eb = (u32)tyBits(ty) / 8;
  const bool dest = I.fl >> 8 & 1;
  FOR_LANES(i, m) {
    u64 a = laneAddr(w, I, (int)i);
    if (a & ((u64)eb * I.n - 1)) misaligned(w, (int)i, a, eb * I.n);
    for (int k = 0; k < I.n; ++k) {
      auto rd = [&](s32 s) -> u64 { return eb == 8 ? src<u64>(w, s)[i] : srcw(w, s)[i]; };
      u64 v = rd(I.v[k]), c = (I.fl & 255) == A_CAS ? rd(I.b) : 0;
      if (eb == 2) {
        v &= 0xffff;
        c &= 0xffff;
      }
      u64 o = atomDo(w, (int)i, (Space)I.e, a + (u64)k * eb, (u8)(I.fl & 255), ty, v, c);
      if (dest && I.v[I.n + k] >= 0) {
        s32 d = I.v[I.n + k];
        if (eb == 8)
          dst<u64>(w, d)[i] = o;
        else
          w.regs[d + i] = (u32)o;
      }
    }
  }
  w.ev |= EV_YIELD;
}
static void emitAtom(Tr& t, bool dest) {
  Space sp = parseSpace(t);
  cacheMods(t);
  t.ignore({"acq_rel", "noftz"});
  int n = parseVec(t);
  const bool async =
      t.has("async");  // red.async: on shared memory of the cluster, completing bytes of an mbarrier there
  static const char* nm[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
  int op = -1;
  for (int i = 0; i < 10; ++i)
    if (t.has(nm[i])) op = i;
  if (op < 0) t.err("atomic operation");
  Ty ty = t.type();
  if (tyBits(ty) > 64) t.err("128-bit atomics are not supported");
  if (n > 1 && (sp == Space::SHARED || sp == Space::SHARED_CLUSTER))
    t.err("vector atomics exist for global memory only");
  if (n > 1 && n * tyBits(ty) > 128) t.err("vector atomic of more than 16 bytes");
  if (async) {
    if (dest || !t.has("mbarrier::complete_tx::bytes") || op == 6 || op == 7 || tyFloat(ty)) t.err("red.async form");
    auto h = [](Warp& w, const Inst& I, u32 m) {
      const u32 eb = (u32)tyBits((Ty)I.t) / 8;
      FOR_LANES(i, m) {
        u32 a = (u32)laneAddr(w, I, (int)i), mb = srcw(w, I.b)[i] + (u32)I.e;
        CTA* c = ctaOfSmem(w, mb);
        atomDo(w, (int)i, Space::SHARED_CLUSTER, a, (u8)I.fl, (Ty)I.t, eb == 8 ? src<u64>(w, I.c)[i] : srcw(w, I.c)[i],
               0);
        if (ctaOfSmem(w, a) != w.cta) w.cl->st.dsmem += eb;
        if (w.cl->race) raceMbarArrive(w, *c, mb & 0xffffff);
        mbarCompleteTx(*c, mb & 0xffffff, eb, &w);
      }
    };
    const Operand& mo = t.op(2);
    if (mo.k != Operand::ADDR) t.err("mbarrier operand");
    s32 mb = mo.v[0].k == Operand::REG ? t.slot[mo.v[0].reg] : t.konst((u64)mo.v[0].imm, 4), c = t.S(1, ty);
    Inst& I = t.out(h, C_ATOM);
    I.t = (u8)ty;
    I.fl = (u32)op;
    I.b = mb;
    I.c = c;
    I.e = (s32)mo.imm;
    t.addr(I, t.op(0));
    return;
  }
  size_t k = dest ? 1 : 0;
  std::vector<s32> v;
  const Operand& vo = t.op(k + 1);
  if (n > 1)
    for (auto& o : vo.v) v.push_back(t.S(o, ty));
  else
    v.push_back(t.S(vo, ty));
  if (dest) {
    if (n > 1)
      for (auto& o : t.op(0).v) v.push_back(t.D(o, tyBits(ty) > 32 ? 8 : 4));
    else
      v.push_back(t.op(0).k == Operand::SINK ? -1 : t.D(0, ty));
  }
  s32 b = op == A_CAS ? t.S(k + 2, ty) : 0;
  const s32* av = t.aux(v);
  Inst& I = t.out(hatom, C_ATOM);
  I.v = av;
  I.n = (u8)n;
  I.b = b;
  I.t = (u8)ty;
  I.e = (int)sp;
  I.fl = (u32)op | (dest ? 256u : 0);
  t.addr(I, t.op(k));
}
OP(atom) { emitAtom(t, true); }
OP(red) { emitAtom(t, false); }

}  // namespace ptxsim

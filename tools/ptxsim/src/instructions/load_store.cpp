// ld, st and prefetches.
#include "instructions/memory_operands.h"

namespace ptxsim {

// fl: bit0 = sign extend to 64, bit1: sign extend, bit2: volatile; e = Space; c = element bytes
template <int ES>
static void hld(Warp& w, const Inst& I, u32 m) {
  const u32 tot = ES * I.n;
  const Space sp = (Space)I.e;
  if (g_cfg.stats) statAccess(w, I, sp, m, tot, false);
  u32 lt = 0;
  FOR_LANES(i, m) {
    u64 a = laneAddr(w, I, (int)i);
    if (a & (tot - 1)) misaligned(w, (int)i, a, tot);
    const u8* p = resolve(w, (int)i, sp, a, tot, false);
    if (w.taintNext) {
      w.taintNext = false;
      lt |= 1u << i;
    }
    for (int k = 0; k < I.n; ++k, p += ES) {
      s32 d = I.v[k];
      if (d < 0) continue;
      if constexpr (ES == 8) {
        memcpy(&dst<u64>(w, d)[i], p, 8);
      } else if constexpr (ES == 4) {
        u32 x;
        memcpy(&x, p, 4);
        if (I.c == 8)
          dst<u64>(w, d)[i] = I.fl & 2 ? (u64)(s64)(s32)x : x;
        else
          w.regs[d + i] = x;
      } else if constexpr (ES == 2) {
        u16 x;
        memcpy(&x, p, 2);
        u32 v = I.fl & 2 ? (u32)(s32)(s16)x : x;
        if (I.c == 8)
          dst<u64>(w, d)[i] = I.fl & 2 ? (u64)(s64)(s16)x : x;
        else
          w.regs[d + i] = I.c == 2 ? (u16)v : v;
      } else if constexpr (ES == 16) {
        memcpy(w.regs + d + i * 4, p, 16);
      } else {
        u8 x = *p;
        u32 v = I.fl & 2 ? (u32)(s32)(s8)x : x;
        if (I.c == 8)
          dst<u64>(w, d)[i] = I.fl & 2 ? (u64)(s64)(s8)x : x;
        else
          w.regs[d + i] = I.c == 2 ? (u16)v : v;
      }
    }
  }
  if (I.fl & 4) w.ev |= EV_YIELD;
  if (lt || w.tainted) {
    for (int k = 0; k < I.n; ++k) setTaint(w, I.v[k], lt, m);
    w.taintHandled = true;
  }
}
template <int ES>
static void hst(Warp& w, const Inst& I, u32 m) {
  const u32 tot = ES * I.n;
  const Space sp = (Space)I.e;
  if (g_cfg.stats) statAccess(w, I, sp, m, tot, true);
  FOR_LANES(i, m) {
    u64 a = laneAddr(w, I, (int)i);
    if (a & (tot - 1)) misaligned(w, (int)i, a, tot);
    u8* p = resolve(w, (int)i, sp, a, tot, true);
    for (int k = 0; k < I.n; ++k, p += ES) {
      s32 s = I.v[k];
      if (w.tainted && getTaint(w, s) >> i & 1) {
        if (sp == Space::SHARED || sp == Space::SHARED_CLUSTER || (sp == Space::GENERIC && a - g_sharedWin < kWin)) {
          CTA* c = ctaOfSmem(w, (u32)a);
          size_t o = (size_t)(p - c->smem);
          if (!c->init.empty()) memset(&c->init[o], 0, ES);
        } else if (sp != Space::LOCAL && !(sp == Space::GENERIC && a - g_localWin < kWin))
          taintReport(w, w.pc - 1, 1u << i, "store a value");
      }
      if constexpr (ES == 8)
        memcpy(p, &src<u64>(w, s)[i], 8);
      else if constexpr (ES == 16)
        memcpy(p, w.regs + s + i * 4, 16);
      else if (I.c == 8) {
        u64 x = src<u64>(w, s)[i];
        memcpy(p, &x, ES);
      } else {
        u32 x = srcw(w, s)[i];
        memcpy(p, &x, ES);
      }
    }
  }
  if (sp != Space::LOCAL) w.cl->progress++;
}
static void hldParam(Warp& w, const Inst& I, u32 m) {  // uniform address
  const u8* p = (const u8*)I.x;
  for (int k = 0; k < I.n; ++k, p += I.fl >> 8) {
    s32 d = I.v[k];
    u64 x = 0;
    u32 es = I.fl >> 8;
    if (d < 0) continue;
    memcpy(&x, p, es);
    if (I.fl & 2) {
      int sh = 64 - 8 * (int)es;
      x = (u64)((s64)(x << sh) >> sh);
    }
    if (I.c == 8) {
      u64* r = dst<u64>(w, d);
      FOR_LANES(i, m) r[i] = x;
    } else {
      u32 v = I.c == 2 ? (u16)x : (u32)x;
      u32* r = w.regs + d;
      FOR_LANES(i, m) r[i] = v;
    }
  }
}
OP(ld) {
  Space sp = parseSpace(t);
  bool vol = cacheMods(t);
  int n = parseVec(t);
  Ty ty = t.type();
  t.has("unified");
  int eb = std::max(1, tyBits(ty) / 8);
  if (eb * n > 16) t.err("accesses of more than 16 bytes per thread need sm_100");
  std::vector<const Operand*> ds;
  if (n > 1) {
    if (t.op(0).k != Operand::VEC || (int)t.op(0).v.size() != n) t.err("vector destination");
    for (auto& o : t.op(0).v) ds.push_back(&o);
  } else
    ds.push_back(&t.op(0));
  std::vector<s32> v;
  int cell = 4;
  for (auto* o : ds) {
    if (o->k == Operand::SINK) {
      v.push_back(-1);
      continue;
    }
    if (o->k != Operand::REG) t.err("ld destination");
    int rb = tyBits(t.regTy[o->reg]);
    if (rb < tyBits(ty)) t.err("ld destination register too narrow");
    cell = rb > 64 ? 16 : rb > 32 ? 8 : rb > 16 ? 4 : 2;
    v.push_back(t.slot[o->reg]);
  }
  const s32* av = t.aux(v);
  const Operand& ao = t.op(1);
  if (sp == Space::PARAM && ao.v[0].k == Operand::INT && (u64)ao.v[0].imm - g_localWin >= kWin) {
    u64 a = (u64)(ao.v[0].imm + ao.imm);
    if (a < (u64)t.P.params || a + (u64)(eb * n) > (u64)t.P.params + t.P.paramBytes) t.err("ld.param out of bounds");
    Inst& I = t.out(hldParam, C_PARAM);
    I.v = av;
    I.n = (u8)n;
    I.c = cell;
    I.x = (const void*)a;
    I.fl = (u32)eb << 8 | (tySigned(ty) ? 2u : 0);
    return;
  }
  Handler h = eb == 1 ? hld<1> : eb == 2 ? hld<2> : eb == 4 ? hld<4> : eb == 8 ? hld<8> : hld<16>;
  Inst& I = t.out(h, memCls(sp, false));
  I.v = av;
  I.n = (u8)n;
  I.c = cell;
  I.e = (int)sp;
  I.fl = (tySigned(ty) ? 2u : 0) | (vol && (sp == Space::GLOBAL || sp == Space::GENERIC) ? 4u : 0);
  t.addr(I, ao);
}
OP(st) {
  if (t.in->mods.size() > 1 && t.in->mods[1] == "async") {
    t.has("async");
    t.ignore({"weak", "shared::cluster", "mbarrier::complete_tx::bytes", "relaxed", "cluster"});
    int n = parseVec(t);
    Ty ty = t.type();
    std::vector<s32> v;
    if (n > 1)
      for (auto& o : t.op(1).v) v.push_back(t.S(o, ty));
    else
      v.push_back(t.S(1, ty));
    const s32* av = t.aux(v);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      FOR_LANES(i, m) {
        u32 a = (u32)laneAddr(w, I, (int)i), eb = I.fl;
        u8* p = resolve(w, (int)i, Space::SHARED_CLUSTER, a, eb * I.n, true);
        for (int k = 0; k < I.n; ++k) {
          if (eb == 8)
            memcpy(p + 8 * k, &src<u64>(w, I.v[k])[i], 8);
          else
            memcpy(p + 4 * k, &srcw(w, I.v[k])[i], 4);
        }
        u32 mb = srcw(w, I.b)[i] + (u32)I.e;
        CTA* c = ctaOfSmem(w, mb);
        if (w.cl->race) {
          raceMbarArrive(w, *c, mb & 0xffffff);
        }
        if (ctaOfSmem(w, a) != w.cta) w.cl->st.dsmem += eb * I.n;
        mbarCompleteTx(*c, mb & 0xffffff, eb * I.n, &w);
      }
    };
    const Operand& mo = t.op(2);
    s32 mb = mo.v[0].k == Operand::REG ? t.slot[mo.v[0].reg] : t.konst((u64)mo.v[0].imm, 4);
    Inst& I = t.out(h, C_STS);
    I.v = av;
    I.n = (u8)n;
    I.fl = (u32)tyBits(ty) / 8;
    I.b = mb;
    I.e = (s32)mo.imm;
    t.addr(I, t.op(0));
    return;
  }
  if (t.in->mods.size() > 1 && t.in->mods[1] == "bulk") t.err("st.bulk is not supported");
  Space sp = parseSpace(t);
  cacheMods(t);
  int n = parseVec(t);
  Ty ty = t.type();
  int eb = std::max(1, tyBits(ty) / 8);
  if (eb * n > 16) t.err("accesses of more than 16 bytes per thread need sm_100");
  std::vector<const Operand*> ss;
  if (n > 1)
    for (auto& o : t.op(1).v) ss.push_back(&o);
  else
    ss.push_back(&t.op(1));
  if ((int)ss.size() != n) t.err("vector source");
  std::vector<s32> v;
  int cell = 4;
  for (auto* o : ss) {
    if (o->k == Operand::REG) {
      int rb = tyBits(t.regTy[o->reg]);
      if (rb < tyBits(ty)) t.err("st source register too narrow");
      cell = rb > 32 ? 8 : 4;
      v.push_back(t.slot[o->reg]);
    } else {
      cell = eb == 8 ? 8 : 4;
      v.push_back(t.S(*o, ty));
    }
  }
  for (auto* o : ss)
    if (o->k == Operand::REG && (tyBits(t.regTy[o->reg]) > 32 ? 8 : 4) != cell && eb < 16) t.err("mixed source widths");
  const s32* av = t.aux(v);
  Handler h = eb == 1 ? hst<1> : eb == 2 ? hst<2> : eb == 4 ? hst<4> : eb == 8 ? hst<8> : hst<16>;
  Inst& I = t.out(h, memCls(sp, true));
  I.v = av;
  I.n = (u8)n;
  I.c = cell;
  I.e = (int)sp;
  t.addr(I, t.op(0));
}
OP(ldu) { op_ld(t); }

// ---- prefetch and friends ----
OP(prefetch) {
  for (size_t i = 1; i < t.used.size(); ++i) t.used[i] = 1;
  t.out(hnop, C_OTHER);
}
OP(prefetchu) { op_prefetch(t); }
OP(applypriority) { op_prefetch(t); }
OP(discard) { op_prefetch(t); }

}  // namespace ptxsim

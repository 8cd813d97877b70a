// Barriers of CTAs and clusters.
#include "translate/translator.h"

namespace ptxsim {

// ---- CTA barriers ----
// a: id slot; b: thread count slot or -1; fl: 1 arrive-only, 2 aligned, red op<<4 (1 and,2 or,3 popc); c: pred; d: dest
static void hbar(Warp& w, const Inst& I, u32 m) {
  if (I.fl & 2) {
    if (!converge(w, m, w.live)) return;
  }
  u32 id = srcw(w, I.a)[ffs32(m)];
  if (id > 15) simFail(w, 719, "barrier id %u", id);
  Barrier& b = w.cta->bar[id];
  Frag& f0 = w.frags[w.cur];
  if (f0.need == 0x80000000u + 7) {  // woken after completion: deliver the reduction result
    f0.need = 0;
    u32 res = b.redResult[f0.gen & 1], op = I.fl >> 4;
    if (op == 3) {
      FOR_LANES(i, m) w.regs[I.d + i] = res;
    } else
      w.preds[I.d] = (w.preds[I.d] & ~m) | (res ? m : 0);
    if (w.cl->race) raceBarWait(w, (int)id);
    return;
  }
  u32 cnt = 0;
  if (I.b != -1) {
    cnt = srcw(w, I.b)[ffs32(m)];
    if (cnt == 0 || cnt % 32) simFail(w, 719, "barrier %u: thread count %u is not a positive multiple of 32", id, cnt);
  }
  if (b.arrived && b.expected != cnt)
    simFail(w, 719, "barrier %u: thread count %u differs from %u given by earlier arrivals", id, cnt, b.expected);
  b.expected = cnt;
  u32 gen = b.gen;
  u32 threads = (m == w.live || (I.fl & 2)) ? 32 : (u32)__builtin_popcount(m);
  b.arrived += threads;
  w.cl->st.barriers++;
  w.cl->progress++;
  u32 rop = I.fl >> 4;
  if (rop) {
    u32 p = (w.preds[I.c] ^ (I.imm ? ~0u : 0)) & m;
    if (!b.hasRed) {
      b.hasRed = true;
      b.redOp = rop;
      b.redAcc = rop == 1 ? 1 : 0;
    }
    if (rop == 1)
      b.redAcc &= p == m;
    else if (rop == 2)
      b.redAcc |= p != 0;
    else
      b.redAcc += (u32)__builtin_popcount(p);
  }
  if (w.cl->race) raceBarArrive(w, (int)id);
  if (!(I.fl & 1)) {
    Frag& f = w.frags[w.cur];
    f.bar = (u8)id;
    f.gen = gen;
    if (rop) {
      f.need = 0x80000000u + 7;
      w.pc--;
    }
    blockFrag(w, F_BAR);
  }
  barCheck(*w.cta, (int)id);
}
static void emitBar(Tr& t) {
  u32 fl = 0;
  bool isBarrier = t.in->mods[0] == "barrier";
  if (t.has("cluster")) {
    bool arrive = t.has("arrive"), wait = t.has("wait");
    t.ignore({"aligned", "release", "relaxed", "acquire"});
    if (arrive == wait) t.err("barrier.cluster form");
    auto ha = [](Warp& w, const Inst&, u32 m) {
      if (!converge(w, m, w.live)) return;
      if (w.cl->cbWarpArrived[w.gwid]) simFail(w, 719, "barrier.cluster.arrive twice without a wait");
      w.cl->cbWarpArrived[w.gwid] = 1;
      w.cl->progress++;
      w.cbGen = w.cl->cbGen;
      if (w.cl->race) raceClusterArrive(w);
      if (++w.cl->cbArrived >= w.cl->liveWarps) {
        if (w.cl->race) raceClusterComplete(*w.cl);
        w.cl->cbArrived = 0;
        w.cl->cbGen++;
        std::fill(w.cl->cbWarpArrived.begin(), w.cl->cbWarpArrived.end(), 0);
      }
    };
    auto hw = [](Warp& w, const Inst&, u32 m) {
      if (!converge(w, m, w.live)) return;
      Frag& f = w.frags[w.cur];
      (void)f;
      if (w.cl->cbGen == w.cbGen) {
        if (!w.cl->cbWarpArrived[w.gwid]) simFail(w, 719, "barrier.cluster.wait without a preceding arrive");
        blockFrag(w, F_CBAR);
        w.pc--;
        w.frags[w.cur].pc = w.pc;
        return;
      }
      if (w.cl->race) raceClusterWait(w);
    };
    if (arrive)
      t.out(ha, C_BAR);
    else
      t.out(hw, C_BAR);
    return;
  }
  if (t.has("warp")) {
    t.has("sync");
    s32 a = t.S(0, Ty::U32);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      u32 mem = srcw(w, I.a)[ffs32(m)];
      if ((m & (mem & w.live)) == (mem & w.live)) return;
      Frag& f = w.frags[w.cur];
      f.need = mem;
      blockFrag(w, F_WSYNC);
    };
    Inst& I = t.out(h, C_BAR);
    I.a = a;
    return;
  }
  t.has("cta");
  bool al = t.has("aligned") || !isBarrier;
  if (t.has("arrive"))
    fl |= 1;
  else
    t.has("sync");
  if (al) fl |= 2;
  bool red = t.has("red");
  u32 rop = 0;
  size_t k = 0;
  s32 d = 0, c = 0;
  bool neg = false;
  bool hasCnt;
  if (red) {
    if (t.has("and"))
      rop = 1;
    else if (t.has("or"))
      rop = 2;
    else if (t.has("popc"))
      rop = 3;
    t.ignore({"pred", "u32"});
    k = 1;
    d = rop == 3 ? t.D(0, 4) : t.predD(t.op(0));
    fl |= rop << 4;
    hasCnt = t.nops() == 4;
    c = t.pred(t.op(t.nops() - 1), neg);
  } else
    hasCnt = t.nops() == 2;
  s32 a = t.S(k, Ty::U32), b = hasCnt ? t.S(k + 1, Ty::U32) : -1;
  Inst& I = t.out(hbar, C_BAR);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = fl;
  I.imm = neg;
}
OP(bar) { emitBar(t); }
OP(barrier) { emitBar(t); }

}  // namespace ptxsim

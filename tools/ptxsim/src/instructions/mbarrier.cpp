// mbarrier: arrivals, transactions, phases, waits.
#include "instructions/mbarrier.h"
#include "instructions/memory_operands.h"

namespace ptxsim {

bool mbarReady(const Frag& f) { return mbPhase(*f.mbar) != f.parity; }
u64* mbPtr(Warp& w, u32 addr, const char* what) {
  if (addr & 7) misaligned(w, 0, addr, 8);
  u64* p = (u64*)smemPtr(w, addr, 8, what);
  if ((*p >> 62) != 1)
    simFail(w, 719, "%s on shared offset %u: not an initialised mbarrier (or it was overwritten)", what,
            (addr & 0xffffff) - kSmemBase);
  return p;
}
static void mbUpdate(CTA& c, u64* p, u32 addr, u32 pend, u32 exp, s32 tx) {
  u32 ph = mbPhase(*p);
  if (pend == 0 && tx == 0) {
    ph ^= 1;
    pend = exp;
    if (c.cl->race) raceMbarPhase(c, addr);
  }
  *p = mbMake(pend, exp, tx, ph);
  c.cl->progress++;
}
void mbarCompleteTx(CTA& c, u32 addr, u32 bytes, Warp* w) {
  u64* p = (u64*)(c.smem + addr);
  if ((*p >> 62) != 1)
    simFail(*w, 719, "complete_tx on shared offset %u: not an initialised mbarrier", addr - kSmemBase);
  mbUpdate(c, p, addr, mbPend(*p), mbExp(*p), mbTx(*p) - (s32)bytes);
}
void mbArrive(Warp& w, u32 addr, u32 count, s32 expectTx, bool drop, u64* stateOut) {
  CTA* c = ctaOfSmem(w, addr);
  u64* p = mbPtr(w, addr, "mbarrier.arrive");
  if (stateOut) *stateOut = *p;
  if (w.cl->race) raceMbarArrive(w, *c, addr & 0xffffff);
  u32 pend = mbPend(*p), exp = mbExp(*p);
  s32 tx = mbTx(*p) + expectTx;
  if (count > pend)
    simFail(w, 719,
            "mbarrier.arrive at shared offset %u: %u arrivals but only %u pending in this phase (expected count %u)",
            (addr & 0xffffff) - kSmemBase, count, pend, exp);
  if (drop) exp -= count;
  mbUpdate(*c, p, addr & 0xffffff, pend - count, exp, tx);
}
enum { MB_INIT, MB_INVAL, MB_ARRIVE, MB_EXPECT, MB_COMPLETE, MB_PENDING };
static void hmbar(Warp& w, const Inst& I,
                  u32 m) {  // t: kind; fl: 1 expect_tx, 2 drop, 4 has state dest; b: count/tx slot; c: state
  FOR_LANES(i, m) {
    u64 a64 = laneAddr(w, I, (int)i);
    u32 a = (u32)(a64 - g_sharedWin < kWin && I.t2 ? a64 - g_sharedWin : a64);
    u32 b = I.b != -1 ? srcw(w, I.b)[i] : 1;
    switch (I.t) {
      case MB_INIT: {
        if (a & 7) misaligned(w, (int)i, a, 8);
        u64* p = (u64*)smemPtr(w, a, 8, "mbarrier.init");
        if (b == 0 || b > 0xfffff) simFail(w, 719, "mbarrier.init with count %u", b);
        *p = mbMake(b, b, 0, 0);
        CTA* c = ctaOfSmem(w, a);
        if (g_cfg.check) markShared(*c, a & 0xffffff, 8);
        if (w.cl->race) raceInitMbar(w, *c, a & 0xffffff);
        w.cl->progress++;
        break;
      }
      case MB_INVAL: {
        u64* p = mbPtr(w, a, "mbarrier.inval");
        *p = 0;
        break;
      }
      case MB_ARRIVE: {
        u64 st;
        bool ex = I.fl & 1;
        mbArrive(w, a, ex ? 1 : b, ex ? (s32)b : 0, I.fl & 2, &st);
        if (I.fl & 4) dst<u64>(w, I.c)[i] = st;
        break;
      }
      case MB_EXPECT: {
        CTA* c = ctaOfSmem(w, a);
        u64* p = mbPtr(w, a, "mbarrier.expect_tx");
        mbUpdate(*c, p, a & 0xffffff, mbPend(*p), mbExp(*p), mbTx(*p) + (s32)b);
        break;
      }
      case MB_COMPLETE: {
        CTA* c = ctaOfSmem(w, a);
        mbPtr(w, a, "mbarrier.complete_tx");
        mbarCompleteTx(*c, a & 0xffffff, b, &w);
        break;
      }
    }
  }
}
bool pumpForMbar(Warp& w, CTA* c, u32 addr) {
  auto& q = w.cl->bulk;
  bool any = false;
  for (size_t k = 0; k < q.size();) {
    BulkOp* op = q[k];
    if (op->hasMbar && op->mbarCta == c && op->mbar == addr && (g_cfg.async == Config::LAZY || (w.cl->rnd() & 1))) {
      q.erase(q.begin() + (long)k);
      bulkExecute(*op);
      delete op;
      any = true;
      continue;
    }
    ++k;
  }
  return any;
}
// try_wait / test_wait: d = predicate, fl: 1 parity form, 2 blocking (try_wait); b = state/parity slot
static void hmbwait(Warp& w, const Inst& I, u32 m) {
  u32 done = 0;
  int first = -1;
  u32 waitMask = 0;
  FOR_LANES(i, m) {
    u64 a64 = laneAddr(w, I, (int)i);
    u32 a = (u32)(a64 - g_sharedWin < kWin && I.t2 ? a64 - g_sharedWin : a64);
    u64* p = mbPtr(w, a, "mbarrier.try_wait");
    CTA* c = ctaOfSmem(w, a);
    if (c != w.cta) simFail(w, 719, "mbarrier.try_wait on an mbarrier of another CTA");
    u8 par = I.fl & 1 ? (u8)(srcw(w, I.b)[i] & 1) : (u8)mbPhase(src<u64>(w, I.b)[i]);
    bool ok = mbPhase(*p) != par;
    if (!ok && g_cfg.async != Config::EAGER) {
      pumpForMbar(w, c, a & 0xffffff);
      ok = mbPhase(*p) != par;
    }
    if (ok) {
      done |= 1u << i;
      if (w.cl->race) raceMbarAcquire(w, *c, a & 0xffffff);
    } else {
      waitMask |= 1u << i;
      if (first < 0) {
        first = (int)i;
        Frag& f = w.frags[w.cur];
        f.mbar = p;
        f.mbarAddr = a;
        f.parity = par;
      }
    }
  }
  Frag& f = w.frags[w.cur];
  if (waitMask && (I.fl & 2) && !f.force) {
    if (done == 0) {
      w.pc--;
      blockFrag(w, F_MBAR);
      return;
    }
    // mixed outcome: report per lane without blocking
  }
  f.force = false;
  if (I.d >= 0) w.preds[I.d] = (w.preds[I.d] & ~m) | done;
  if (waitMask) w.ev |= EV_YIELD;
}
OP(mbarrier) {
  std::string k = t.mod(1);
  t.ignore(
      {"shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed", "cta", "cluster", "sem"});
  auto mk = [&](int kind, size_t ai) -> Inst& {
    Inst& I = t.out(hmbar, C_MBAR);
    I.t = (u8)kind;
    I.b = -1;
    t.addr(I, t.op(ai));
    return I;
  };
  if (k == "init") {
    s32 b = t.S(1, Ty::U32);
    mk(MB_INIT, 0).b = b;
  } else if (k == "inval")
    mk(MB_INVAL, 0);
  else if (k == "arrive" || k == "arrive_drop") {
    bool ex = t.has("expect_tx");
    t.has("noComplete");
    size_t ai = 0;
    u32 fl = (u32)ex | (k == "arrive_drop" ? 2u : 0);
    s32 c = 0;
    if (t.op(0).k != Operand::ADDR) {
      ai = 1;
      if (t.op(0).k == Operand::REG) {
        fl |= 4;
        c = t.D(0, 8);
      }
    }
    s32 b = t.nops() > ai + 1 ? t.S(ai + 1, Ty::U32) : -1;
    Inst& I = mk(MB_ARRIVE, ai);
    I.fl = fl;
    I.c = c;
    I.b = b;
  } else if (k == "expect_tx") {
    s32 b = t.S(1, Ty::U32);
    mk(MB_EXPECT, 0).b = b;
  } else if (k == "complete_tx") {
    s32 b = t.S(1, Ty::U32);
    mk(MB_COMPLETE, 0).b = b;
  } else if (k == "try_wait" || k == "test_wait") {
    bool par = t.has("parity");
    s32 b = par ? t.S(2, Ty::U32) : t.S(2, Ty::B64);
    s32 d = t.predD(t.op(0));
    Inst& I = t.out(hmbwait, C_MBAR);
    I.d = d;
    I.b = b;
    I.fl = (u32)par | (k == "try_wait" ? 2u : 0);
    t.addr(I, t.op(1));
  } else if (k == "pending_count") {
    s32 a = t.S(1, Ty::B64), d = t.D(0, 4);
    auto h = [](Warp& w, const Inst& I, u32 m) { FOR_LANES(i, m) w.regs[I.d + i] = mbPend(src<u64>(w, I.a)[i]); };
    Inst& I = t.out(h, C_MBAR);
    I.a = a;
    I.d = d;
  } else
    t.err("unknown mbarrier operation");
}

}  // namespace ptxsim

// Executes the instructions of one warp for a slice of time.
#include "machine/machine.h"

namespace ptxsim {

static bool fragRunnable(Warp& w, Frag& f) {
  switch (f.st) {
    case F_READY: return true;
    case F_CONV: return (f.mask & f.need & w.live) == (f.need & w.live);
    case F_BAR:
      if (w.cta->bar[f.bar].gen != f.gen) {
        if (w.cl->race && f.need != 0x80000000u + 7) raceBarWait(w, f.bar);
        return true;
      }
      return false;
    case F_MBAR:
      if (f.force || mbarReady(f)) return true;
      if (g_cfg.async != Config::EAGER) {
        CTA* c = ctaOfSmem(w, f.mbarAddr);
        if (pumpForMbar(w, c, f.mbarAddr & 0xffffff)) return mbarReady(f);
      }
      return false;
    case F_WG: return wgPeersReady(w, f.need);
    case F_CBAR: return w.cl->cbGen != w.cbGen;
    case F_REGS: return w.cta->freeRegs >= f.need;
    case F_WSYNC: {
      u32 got = 0;
      for (auto& g : w.frags)
        if (g.st == F_WSYNC && g.need == f.need) got |= g.mask;
      if ((got & f.need & w.live) != (f.need & w.live)) return false;
      u32 nd = f.need;
      for (auto& g : w.frags)
        if (g.st == F_WSYNC && g.need == nd) g.st = F_READY;
      return true;
    }
  }
  return false;
}
static void saveCur(Warp& w) {
  if (w.cur >= 0 && w.cur < (int)w.frags.size()) {
    Frag& f = w.frags[w.cur];
    f.pc = w.pc;
    f.mask = w.active;
  }
}
static void mergeFrags(Warp& w) {
  for (size_t i = 0; i < w.frags.size(); ++i)
    for (size_t j = i + 1; j < w.frags.size();) {
      Frag &a = w.frags[i], &b = w.frags[j];
      if (a.pc == b.pc && (a.st == F_READY || a.st == F_CONV) && (b.st == F_READY || b.st == F_CONV)) {
        a.mask |= b.mask;
        if (b.st == F_CONV) {
          a.need |= b.need;
        }
        a.st = F_READY;
        w.frags.erase(w.frags.begin() + (long)j);
        continue;
      }
      ++j;
    }
}
// An instruction that has to wait is executed again: it counts when it proceeds.
__attribute__((noinline, cold)) static void countOnce(Warp& w, const Inst& I, u32 m) {
  if (w.pc == (u32)(&I - w.code)) {
    w.cls[I.cls]--;
    w.cl->st.threadInsts -= (u64)__builtin_popcount(m);
  }
}
// What is watched while a warp runs: counters; registers of wgmma in flight, and never-written values.
struct Watch {
  bool counters, values, registers;
};
// One instruction of the current fragment. Returns whether the scheduler has to look at the warp again.
[[gnu::always_inline]] static inline bool step(Warp& w, const Watch& watch) {
  const Inst& I = w.code[w.pc++];
  u32 m = w.active;
  if (I.guard >= 0) m &= I.gneg ? ~w.preds[I.guard] : w.preds[I.guard];
  if (watch.counters) {
    w.cls[I.cls]++;
    w.cl->st.threadInsts += (u64)__builtin_popcount(m);
  }
  if (watch.values && m) {
    const u32 pc = w.pc - 1;
    if (watch.registers) wgCheckTouch(w, pc);
    const u32 tainted = w.tainted ? taintPre(w, pc, m) : 0;
    if (tainted && I.cls == C_ATOM) taintReport(w, pc, tainted, "use in an atomic a value");
    I.fn(w, I, m);
    if (w.tainted || w.taintHandled) taintPost(w, pc, m, tainted);
    if (watch.registers) wgDirtyStep(w, pc);
  } else if (m) {
    I.fn(w, I, m);
  }
  if (!w.ev) return false;
  if (watch.counters) countOnce(w, I, m);
  return true;
}

// The fragment to go on with; -1: every one waits. The lowest pc runs first (reconvergence); a fragment that has run
// for long yields to others.
static int chooseFrag(Warp& w) {
  int best = -1;
  for (int i = 0; i < (int)w.frags.size(); ++i) {
    const Frag& f = w.frags[i];
    if (!fragRunnable(w, w.frags[i])) continue;
    if (best >= 0) {
      const Frag& g = w.frags[best];
      if (!(f.age / 4096 != g.age / 4096 ? f.age < g.age : f.pc < g.pc)) continue;
    }
    best = i;
  }
  return best;
}
// Whether another fragment stands at or before the place that the current one has reached: they may merge there.
static bool othersAreBehind(const Warp& w) {
  for (int i = 0; i < (int)w.frags.size(); ++i) {
    const Frag& g = w.frags[i];
    if (i == w.cur || (g.st != F_READY && g.st != F_CONV)) continue;
    if (g.pc <= w.pc && (g.pc == w.pc || g.st == F_READY)) return true;
  }
  return false;
}
// Runs up to |q| instructions. Returns the number executed (0: blocked).
u32 runWarp(Warp& w, u32 q) {
  const Watch watch = {g_cfg.stats, g_cfg.ckRegs || g_cfg.ckUninit, g_cfg.ckRegs && w.prog->wgCount != 0};
  u32 n = 0;
  t_ctx.w = &w;
  while (n < q && !w.done) {
    if (w.frags.size() > 1) mergeFrags(w);
    const int best = chooseFrag(w);
    if (best < 0) break;
    Frag& f = w.frags[best];
    f.st = F_READY;
    w.cur = best;
    w.pc = f.pc;
    w.active = f.mask;
    w.ev = 0;
    u32 burst = 0;
    if (w.frags.size() == 1) {
      f.age = 0;
      while (n < q) {
        ++n;
        if (step(w, watch)) break;
      }
    } else {
      while (n < q) {
        ++n;
        ++burst;
        if (step(w, watch) || othersAreBehind(w) || burst >= 4096) break;
      }
    }
    if (w.done) break;
    if (w.cur >= 0) {
      Frag& c = w.frags[w.cur];
      c.age += burst;
      if (c.st == F_READY) saveCur(w);
    }
    if (w.ev & EV_YIELD) break;
  }
  w.instCount += n;
  w.cl->instrs += n;
  return n;
}

}  // namespace ptxsim

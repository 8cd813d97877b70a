// Branches, exits, fences, and what only the clock would notice.
#include "translate/translator.h"

namespace ptxsim {

static void hbra(Warp& w, const Inst& I, u32 m) {
  if (m == w.active) {
    if ((u32)I.imm < w.pc) w.instCount += 0;
    w.pc = (u32)I.imm;
    return;
  }
  u32 rest = w.active & ~m;
  splitFrag(w, w.pc, rest);
  w.active = m;
  w.pc = (u32)I.imm;
}
OP(bra) {
  t.ignore({"uni"});
  if (t.op(0).k != Operand::LABEL) t.err("branch target");
  Inst& I = t.out(hbra, C_CTRL);
  I.t = 0xbb;
  I.imm = t.op(0).label;
}
static void hbrx(Warp& w, const Inst& I, u32 m) {
  u32 rest = w.active & ~m;
  if (rest) {
    splitFrag(w, w.pc, rest);
    w.active = m;
  }
  while (m) {
    u32 idx = srcw(w, I.a)[ffs32(m)];
    u32 same = 0;
    FOR_LANES(i, m) if (srcw(w, I.a)[i] == idx) same |= 1u << i;
    if (idx >= I.fl) simFail(w, 719, "brx.idx index %u outside the table of %u", idx, I.fl);
    m &= ~same;
    if (m) {
      splitFrag(w, (u32)I.v[idx], same);
      w.active &= ~same;
    } else {
      w.active = same;
      w.pc = (u32)I.v[idx];
    }
  }
}
OP(brx) {
  t.ignore({"idx", "uni"});
  s32 a = t.S(0, Ty::U32);
  auto& tb = t.tables[-2 - t.op(1).label];
  std::vector<s32> v(tb.begin(), tb.end());
  const s32* av = t.aux(v);
  Inst& I = t.out(hbrx, C_CTRL);
  I.a = a;
  I.v = av;
  I.fl = (u32)v.size();
  I.t = 0xbc;
}
static void hexit(Warp& w, const Inst&, u32 m) { exitLanes(w, m); }
OP(ret) {
  t.ignore({"uni"});
  t.out(hexit, C_CTRL);
}
OP(exit) { t.out(hexit, C_CTRL); }
static void htrap(Warp& w, const Inst& I, u32 m) {
  simFail(w, 719, "%s executed by lanes %s", I.fl ? "brkpt" : "trap", laneStr(m).c_str());
}
OP(trap) { t.out(htrap, C_CTRL); }
OP(brkpt) {
  Inst& I = t.out(htrap, C_CTRL);
  I.fl = 1;
}
OP(nanosleep) {
  t.has("u32");
  auto h = [](Warp& w, const Inst&, u32) { w.ev |= EV_YIELD; };
  t.out(h, C_OTHER);
}
// pmevent n: a performance event on a device; here the warp's instructions are counted in region n (0 to 15) from now
// on
OP(pmevent) {
  if (t.has("mask")) {
    t.out(hnop, C_OTHER);
    return;
  }
  if (t.op(0).k != Operand::INT || t.op(0).imm < 0 || t.op(0).imm >= kRegions) t.err("pmevent number");
  s64 n = t.op(0).imm;
  auto h = [](Warp& w, const Inst& I, u32) {
    if (g_cfg.stats) w.cls[C_OTHER]--;
    w.cls = w.cl->st.cls[I.imm];
  };
  Inst& I = t.out(h, C_OTHER);
  I.imm = n;
}
OP(fence) {
  bool proxy = false;
  for (size_t i = 1; i < t.in->mods.size(); ++i)
    if (t.in->mods[i].rfind("proxy", 0) == 0) {
      proxy = true;
    }
  static const char* ok[] = {"sc",
                             "acq_rel",
                             "acquire",
                             "release",
                             "cta",
                             "cluster",
                             "gpu",
                             "sys",
                             "mbarrier_init",
                             "sync_restrict::shared::cta",
                             "sync_restrict::shared::cluster"};
  for (size_t i = 1; i < t.in->mods.size(); ++i) {
    auto& m = t.in->mods[i];
    bool k = m.rfind("proxy", 0) == 0 || m.rfind("async", 0) == 0 || m == "global" || m.rfind("shared", 0) == 0 ||
             m == "alias" || m.rfind("tensormap", 0) == 0 || m == "proxy";
    for (auto o : ok) k |= m == o;
    if (k) t.used[i] = 1;
  }
  if (proxy) {
    auto h = [](Warp& w, const Inst&, u32) {
      if (w.cl->race) raceFence(w);
    };
    t.out(h, C_FENCE);
  } else
    t.out(hnop, C_FENCE);
}
OP(membar) {
  t.ignore({"cta", "gl", "sys", "gpu"});
  t.out(hnop, C_FENCE);
}
OP(setmaxnreg) {
  const bool inc = t.has("inc"), dec = t.has("dec");
  t.ignore({"sync", "aligned", "u32"});
  s64 n = t.op(0).imm;
  if (n < 24 || n > 256 || n % 8 || inc == dec) t.err("setmaxnreg value");
  t.P.mostRegs = std::max(t.P.mostRegs, (u32)n);
  // Registers come from what the CTA got at launch and its warps gave back; an increase waits until there are enough.
  auto give = [](Warp& w, const Inst& I, u32 m) {
    if (!converge(w, m, w.live) || !w.threadRegs) return;
    const u32 n = (u32)I.imm;
    if (n > w.threadRegs) simFail(w, 719, "setmaxnreg.dec to %u registers of a thread that has %u", n, w.threadRegs);
    w.cta->freeRegs += w.threadRegs - n;
    w.threadRegs = n;
    w.cl->progress++;
  };
  auto take = [](Warp& w, const Inst& I, u32 m) {
    if (!converge(w, m, w.live) || !w.threadRegs) return;
    const u32 n = (u32)I.imm;
    if (n < w.threadRegs) simFail(w, 719, "setmaxnreg.inc to %u registers of a thread that has %u", n, w.threadRegs);
    if (w.cta->freeRegs < n - w.threadRegs) {
      w.frags[w.cur].need = n - w.threadRegs;
      blockFrag(w, F_REGS);
      w.pc--;
      w.frags[w.cur].pc = w.pc;
      return;
    }
    w.cta->freeRegs -= n - w.threadRegs;
    w.threadRegs = n;
    w.cl->progress++;
  };
  Inst& I = inc ? t.out(take, C_OTHER) : t.out(give, C_OTHER);
  I.imm = (u32)n;
}
OP(griddepcontrol) {
  t.ignore({"wait", "launch_dependents"});
  t.out(hnop, C_GRIDDEP);
}

}  // namespace ptxsim

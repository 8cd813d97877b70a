// Fragments of diverged warps: split, converge, block, exit; and what the end of a warp means to others.
#include "machine/machine.h"

namespace ptxsim {

void splitFrag(Warp& w, u32 pc, u32 mask) {
  Frag f;
  f.pc = pc;
  f.mask = mask;
  f.gen = w.frags[w.cur].gen;
  f.age = w.frags[w.cur].age;
  w.frags.push_back(f);
  w.ev |= EV_RESCHED;
}
bool converge(Warp& w, u32 m, u32 need) {
  need &= w.live;
  if ((m & need) == need && m == w.active) return true;
  if ((m & need) == need) return true;
  // lanes are missing: the executing lanes wait here
  if (m != w.active) {
    splitFrag(w, w.pc, w.active & ~m);
    w.active = m;
  }
  w.pc--;
  w.frags[w.cur].need = need;
  blockFrag(w, F_CONV);
  return false;
}
void blockFrag(Warp& w, FragState st) {
  Frag& f = w.frags[w.cur];
  f.st = st;
  f.pc = w.pc;
  f.mask = w.active;
  w.ev |= EV_RESCHED;
}

static void warpDone(Warp& w) {
  w.done = true;
  w.cl->progress++;
  w.cl->liveWarps--;
  w.cta->liveWarps--;
  if (!w.cp.empty()) cpRunAll(w);
  if (w.wgInflight && g_cfg.ckRegs)
    report(w, w.pc ? w.pc - 1 : 0, "async", "warp exits with wgmma operations in flight (no wgmma.wait_group)");
  wgWait(w, 0);
  for (BulkOp* op : w.cl->bulk)
    if (op->w == &w && op->grouped && (!op->readDone || op->kind == BK_T_GATHER) && g_cfg.check)
      report(w, op->pc, "async",
             "warp exits before its bulk store has read shared memory (no cp.async.bulk.wait_group)");
  for (int i = 0; i < 16; ++i)
    if (w.cta->bar[i].arrived) barCheck(*w.cta, i);
  if (w.cl->cbWarpArrived[w.gwid]) {
    w.cl->cbWarpArrived[w.gwid] = 0;
    w.cl->cbArrived--;
  }
  if (w.cl->cbArrived && w.cl->cbArrived >= w.cl->liveWarps) {
    if (w.cl->race) raceClusterComplete(*w.cl);
    w.cl->cbArrived = 0;
    w.cl->cbGen++;
    std::fill(w.cl->cbWarpArrived.begin(), w.cl->cbWarpArrived.end(), 0);
  }
}
void exitLanes(Warp& w, u32 m) {
  w.live &= ~m;
  w.active &= ~m;
  if (!w.active) {
    w.frags.erase(w.frags.begin() + w.cur);
    w.ev |= EV_RESCHED;
    w.cur = -1;
    if (w.frags.empty()) {
      warpDone(w);
      w.ev |= EV_DONE;
    }
  }
}
void barCheck(CTA& c, int id) {
  Barrier& b = c.bar[id];
  u32 exp = b.expected ? b.expected : c.liveWarps * 32;
  if (b.arrived < exp || exp == 0) return;
  if (b.hasRed) {
    b.redResult[b.gen & 1] = b.redAcc;
    b.hasRed = false;
  }
  if (c.cl->race) raceBarComplete(c, id);
  b.gen++;
  b.arrived = 0;
  b.expected = 0;
  c.cl->progress++;
}

}  // namespace ptxsim

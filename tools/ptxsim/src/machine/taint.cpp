// Values loaded from never-written memory are followed through registers and shared memory and reported when they reach
// global memory, an atomic or an address.
#include "machine/machine.h"

namespace ptxsim {

void setTaint(Warp& w, s32 slot, u32 lanes, u32 m) {
  if (slot < 0) return;
  if (w.taint.empty()) {
    if (!lanes) return;
    w.taint.assign((size_t)w.prog->regWords / 32 + 4, 0);
  }
  u32& t = w.taint[(size_t)slot / 32];
  t = (t & ~m) | (lanes & m);
  if (lanes & m) w.tainted = true;
}
void taintReport(Warp& w, u32 pc, u32 lanes, const char* use) {
  std::string what = w.taintWhat.empty() ? "memory" : w.taintWhat;
  w.taint.assign(w.taint.size(), 0);
  w.tainted = false;
  report(w, pc, "uninitialised",
         strf("lanes %s %s derived from %s that was never written, loaded at %s", laneStr(lanes).c_str(), use,
              what.c_str(), codeLoc(w.prog, w.taintPc).c_str()));
}
u32 taintPre(Warp& w, u32 pc, u32 m) {
  u32 tm = 0;
  for (s32 s : w.prog->regRd[pc]) tm |= w.taint[(size_t)s / 32];
  return tm & m;
}
void taintPost(Warp& w, u32 pc, u32 m, u32 tm) {
  if (w.taintHandled) {
    w.taintHandled = false;
    return;
  }
  for (s32 s : w.prog->regWr[pc]) setTaint(w, s, tm, m);
}

}  // namespace ptxsim

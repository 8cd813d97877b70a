// Happens-before race detection for shared memory.
//
// Agents: every warp w is agent w of its cluster; the asynchronous operations a warp issues (cp.async,
// bulk copies, wgmma) form agent W + w. Each agent has a clock. A warp's vector clock lists, per agent,
// the latest event known to have happened before. CTA barriers, cluster barriers, mbarriers, and the
// completion mechanisms of asynchronous operations transfer clocks. Per 4 bytes of shared memory the
// detector keeps the last writer and the most recent readers; an access that is not ordered after a
// conflicting one is reported. When reader slots overflow the oldest is dropped: races may then be
// missed but never invented.
//
// A second vector clock per warp (pvc) lists the events made visible to the asynchronous proxy by
// fence.proxy.async: generic writes read by wgmma or a bulk store must be in it.
#include "machine/machine.h"
#include <algorithm>
#include <map>

namespace ptxsim {
using VC = std::vector<u32>;
static void join(VC& a, const VC& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::max(a[i], b[i]);
}
struct Ep {
  u32 agent = ~0u, clk = 0, pc = 0;
};
struct Cell {
  Ep w;
  u8 wmask = 0;
  bool wgen = true;
  Ep r[4];
  u8 rmask[4] = {};
};
struct MB {
  VC cur, done, pcur, pdone;
};
struct BarVC {
  VC acc, rel, pacc, prel;
};
struct RaceState {
  u32 W;                                 // warps in the cluster
  std::vector<VC> vc, pvc;               // per warp
  std::vector<u32> aclk;                 // async clocks per warp
  std::vector<std::vector<Cell>> cells;  // per CTA
  std::map<std::pair<u32, u32>, MB> mb;
  std::vector<BarVC> bars;  // per CTA * 16
  VC cacc, crel, cpacc, cprel;
  std::map<std::pair<u32, u32>, std::pair<VC, VC>> sync;  // atomics on shared words
};
void raceInit(Cluster& c) {
  auto* R = new RaceState;
  R->W = (u32)c.warps.size();
  u32 n = 2 * R->W;
  R->vc.assign(R->W, VC(n));
  R->pvc.assign(R->W, VC(n));
  R->aclk.assign(R->W, 0);
  for (u32 i = 0; i < R->W; ++i) R->vc[i][i] = 1;
  for (CTA* t : c.ctas) R->cells.emplace_back((t->smemSize + 3) / 4);
  R->bars.resize(c.ctas.size() * 16);
  for (auto& b : R->bars) {
    b.acc = b.rel = b.pacc = b.prel = VC(n);
  }
  R->cacc = R->crel = R->cpacc = R->cprel = VC(n);
  c.race = R;
}
void raceFree(Cluster& c) {
  delete c.race;
  c.race = nullptr;
}
static std::string agentStr(Cluster& c, u32 a) {
  u32 W = c.race->W;
  Warp* w = c.warps[a % W];
  return strf("%swarp %u of CTA (%u,%u,%u)", a >= W ? "asynchronous operation of " : "", w->wid, w->cta->id[0],
              w->cta->id[1], w->cta->id[2]);
}
static void conflict(Warp& w, u32 off, u32 pc, const char* a, const Ep& o, const char* b) {
  std::string other = whereStr(*w.cl->warps[o.agent % w.cl->race->W], o.pc);
  report(w, pc, "race",
         strf("shared memory offset %u: this %s is not ordered after a %s by %s\n    other access at %s",
              off - kSmemBase, a, b, agentStr(*w.cl, o.agent).c_str(), other.c_str()));
}
static inline bool hb(const Ep& e, const u32* vc) { return e.clk <= vc[e.agent]; }
static void access(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc, u32 agent, u32 clk, const u32* vc,
                   const u32* pvc, bool asyncProxy) {
  RaceState& R = *w.cl->race;
  auto& cells = R.cells[c.rank];
  for (u32 o = off & ~3u; o < off + bytes; o += 4) {
    Cell& s = cells[o / 4];
    u8 mask = 15;
    if (o < off) mask &= (u8)(15 << (off - o));
    if (o + 4 > off + bytes) mask &= (u8)(15 >> (o + 4 - off - bytes));
    if (s.w.agent != ~0u && (s.wmask & mask) && s.w.agent != agent) {
      if (!hb(s.w, vc)) {
        Ep e = s.w;
        s = Cell();
        conflict(w, o, pc, write ? "write" : "read", e, "write");
      } else if (asyncProxy && !write && g_cfg.ckProxy && s.wgen && !hb(s.w, pvc)) {
        Ep e = s.w;
        s.wgen = false;
        report(
            w, pc, "proxy",
            strf("shared memory offset %u was written by ordinary stores of %s without a fence.proxy.async before this "
                 "asynchronous read\n    store at %s",
                 o - kSmemBase, agentStr(*w.cl, e.agent).c_str(), whereStr(*w.cl->warps[e.agent % R.W], e.pc).c_str()));
      }
    }
    if (write) {
      for (int k = 0; k < 4; ++k)
        if (s.r[k].agent != ~0u && (s.rmask[k] & mask) && s.r[k].agent != agent && !hb(s.r[k], vc)) {
          Ep e = s.r[k];
          s = Cell();
          conflict(w, o, pc, "write", e, "read");
          break;
        }
      if (s.wmask && (s.wmask & ~mask) && s.w.agent == agent && s.w.clk == clk)
        s.wmask |= mask;
      else {
        s.wmask = mask;
      }
      s.w = {agent, clk, pc};
      s.wgen = !asyncProxy;
      if (mask == 15)
        for (auto& r : s.r) r.agent = ~0u;
    } else {
      int slot = -1;
      for (int k = 0; k < 4; ++k)
        if (s.r[k].agent == agent) {
          slot = k;
          break;
        }
      if (slot < 0)
        for (int k = 0; k < 4; ++k)
          if (s.r[k].agent == ~0u) {
            slot = k;
            break;
          }
      if (slot < 0)
        for (int k = 0; k < 4; ++k)
          if (hb(s.r[k], vc)) {
            slot = k;
            break;
          }
      if (slot < 0) slot = (int)(clk & 3);
      s.rmask[slot] = s.r[slot].agent == agent && s.r[slot].clk == clk ? s.rmask[slot] | mask : mask;
      s.r[slot] = {agent, clk, pc};
    }
  }
}
void raceAccess(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc) {
  RaceState& R = *w.cl->race;
  auto& v = R.vc[w.gwid];
  access(w, c, off, bytes, write, pc, w.gwid, v[w.gwid], v.data(), nullptr, false);
}
u64 raceIssueAsync(Warp& w, std::vector<u64>& vc, std::vector<u64>& pvc) {
  RaceState& R = *w.cl->race;
  u32 k = ++R.aclk[w.gwid];
  auto& v = R.vc[w.gwid];
  auto& p = R.pvc[w.gwid];
  vc.assign(v.begin(), v.end());
  pvc.assign(p.begin(), p.end());
  return k;
}
void raceAsyncAccess(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc, u64 clk, const std::vector<u64>& vc,
                     const std::vector<u64>& pvc, bool asyncProxy) {
  RaceState& R = *w.cl->race;
  u32 a = R.W + w.gwid;
  static thread_local VC v, p;
  v.assign(vc.begin(), vc.end());
  p.assign(pvc.begin(), pvc.end());
  access(w, c, off, bytes, write, pc, a, (u32)clk, v.data(), p.data(), asyncProxy);
}
void raceAcquireAsync(Warp& w, u64 clk) {
  RaceState& R = *w.cl->race;
  u32& x = R.vc[w.gwid][R.W + w.gwid];
  x = std::max(x, (u32)clk);
  u32& y = R.pvc[w.gwid][R.W + w.gwid];
  y = std::max(y, (u32)clk);
}
void raceAcquirePeer(Warp& w, Warp& p, u64 clk) {
  RaceState& R = *w.cl->race;
  u32& x = R.vc[w.gwid][R.W + p.gwid];
  x = std::max(x, (u32)clk);
  u32& y = R.pvc[w.gwid][R.W + p.gwid];
  y = std::max(y, (u32)clk);
}
u64 raceAsyncClk(Warp& w) { return w.cl->race->aclk[w.gwid]; }
static void tick(RaceState& R, Warp& w) { R.vc[w.gwid][w.gwid]++; }
void raceBarArrive(Warp& w, int id) {
  RaceState& R = *w.cl->race;
  BarVC& b = R.bars[w.cta->rank * 16 + (u32)id];
  join(b.acc, R.vc[w.gwid]);
  join(b.pacc, R.pvc[w.gwid]);
  tick(R, w);
}
void raceBarComplete(CTA& c, int id) {
  RaceState& R = *c.cl->race;
  BarVC& b = R.bars[c.rank * 16 + (u32)id];
  b.rel.swap(b.acc);
  b.prel.swap(b.pacc);
  std::fill(b.acc.begin(), b.acc.end(), 0);
  std::fill(b.pacc.begin(), b.pacc.end(), 0);
}
void raceClusterComplete(Cluster& c) {
  RaceState& R = *c.race;
  R.crel.swap(R.cacc);
  R.cprel.swap(R.cpacc);
  std::fill(R.cacc.begin(), R.cacc.end(), 0);
  std::fill(R.cpacc.begin(), R.cpacc.end(), 0);
}
void raceBarWait(Warp& w, int id) {
  RaceState& R = *w.cl->race;
  BarVC& b = R.bars[w.cta->rank * 16 + (u32)id];
  join(R.vc[w.gwid], b.rel);
  join(R.pvc[w.gwid], b.prel);
}
void raceClusterArrive(Warp& w) {
  RaceState& R = *w.cl->race;
  join(R.cacc, R.vc[w.gwid]);
  join(R.cpacc, R.pvc[w.gwid]);
  tick(R, w);
}
void raceClusterWait(Warp& w) {
  RaceState& R = *w.cl->race;
  join(R.vc[w.gwid], R.crel);
  join(R.pvc[w.gwid], R.cprel);
}
static MB& mb(RaceState& R, CTA& c, u32 addr) {
  MB& m = R.mb[{c.rank, addr}];
  if (m.cur.empty()) {
    u32 n = 2 * R.W;
    m.cur = m.done = m.pcur = m.pdone = VC(n);
  }
  return m;
}
void raceInitMbar(Warp& w, CTA& c, u32 addr) {
  RaceState& R = *w.cl->race;
  R.mb.erase({c.rank, addr});
  (void)mb(R, c, addr);
}
void raceMbarArrive(Warp& w, CTA& c, u32 addr) {
  RaceState& R = *w.cl->race;
  MB& m = mb(R, c, addr);
  join(m.cur, R.vc[w.gwid]);
  join(m.pcur, R.pvc[w.gwid]);
  tick(R, w);
}
void raceMbarComplete(CTA& c, u32 addr, Warp* w, u64 clk, const std::vector<u64>& vc) {
  RaceState& R = *c.cl->race;
  MB& m = mb(R, c, addr);
  u32 a = R.W + w->gwid;
  for (size_t i = 0; i < vc.size(); ++i) m.cur[i] = std::max(m.cur[i], (u32)vc[i]);
  m.cur[a] = std::max(m.cur[a], (u32)clk);
  m.pcur[a] = std::max(m.pcur[a], (u32)clk);
}
void raceMbarPhase(CTA& c, u32 addr) {
  RaceState& R = *c.cl->race;
  MB& m = mb(R, c, addr);
  join(m.done, m.cur);
  join(m.pdone, m.pcur);
}
void raceMbarAcquire(Warp& w, CTA& c, u32 addr) {
  RaceState& R = *w.cl->race;
  MB& m = mb(R, c, addr);
  join(R.vc[w.gwid], m.done);
  join(R.pvc[w.gwid], m.pdone);
}
void raceFence(Warp& w) {
  RaceState& R = *w.cl->race;
  join(R.pvc[w.gwid], R.vc[w.gwid]);
}
void raceAtomic(Warp& w, CTA& c, u32 off, bool) {
  // a shared atomic both acquires and releases: treated as synchronisation, never as a conflict
  RaceState& R = *w.cl->race;
  auto& s = R.sync[{c.rank, off}];
  u32 n = 2 * R.W;
  if (s.first.empty()) {
    s.first = VC(n);
    s.second = VC(n);
  }
  join(R.vc[w.gwid], s.first);
  join(R.pvc[w.gwid], s.second);
  join(s.first, R.vc[w.gwid]);
  join(s.second, R.pvc[w.gwid]);
  tick(R, w);
}
}  // namespace ptxsim

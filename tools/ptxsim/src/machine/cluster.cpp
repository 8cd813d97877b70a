// A cluster: its making, its warps in turn, asynchronous operations that complete, deadlocks.
#include "machine/machine.h"
#include <sys/mman.h>

namespace ptxsim {

// What a thread has at launch where setmaxnreg moves registers later, as ptxas 13 gives it: what the CTAs that the
// kernel is declared for leave it, in eights, but no more than any setmaxnreg asks for. 0 where the kernel does not say
// how many threads and CTAs: ptxas ignores setmaxnreg there (its note C7508).
static u32 launchRegs(const Program& p) {
  auto count = [](const int* n) { return n[0] * n[1] * n[2]; };
  const Function& f = *p.fn;
  if (f.maxRegs) return (u32)f.maxRegs / 8 * 8;
  const int threads = std::max(count(f.maxntid), count(f.reqntid));
  if (!threads || !f.minCtas) return 0;
  return std::min(65536u / (u32)(threads * f.minCtas) / 8 * 8, p.mostRegs);
}
Cluster* makeCluster(Launch& L, u32 idx) {
  auto* c = new Cluster;
  c->L = &L;
  c->id = idx;
  u32 nc[3] = {L.grid[0] / L.cluster[0], L.grid[1] / L.cluster[1], L.grid[2] / L.cluster[2]};
  c->cid[0] = idx % nc[0];
  c->cid[1] = idx / nc[0] % nc[1];
  c->cid[2] = idx / nc[0] / nc[1];
  u32 n = L.cluster[0] * L.cluster[1] * L.cluster[2], threads = L.block[0] * L.block[1] * L.block[2],
      nw = (threads + 31) / 32;
  c->rng = (g_cfg.seed + 1) * 0x9e3779b97f4a7c15ull ^ ((u64)idx + 1) * 0xbf58476d1ce4e5b9ull ^
           L.gridId * 0x94d049bb133111ebull;
  if (!c->rng) c->rng = 1;
  Program* P = L.prog;
  auto up = [](size_t x) { return (x + 1023) / 1024 * 1024; };
  size_t smem = up(L.smemBytes), regs = up((size_t)P->regWords * 4), preds = up((size_t)P->npreds * 4),
         loc = up((size_t)P->localBytes * 32 + 64);
  c->arenaBytes = n * (smem + nw * (regs + preds + loc));
  c->arena = (u8*)mmap(nullptr, c->arenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (c->arena == MAP_FAILED) fail("ptxsim: out of host memory for a cluster (%zu bytes)", c->arenaBytes);
  u8* p = c->arena;
  u32 gw = 0;
  const u32 atLaunch = launchRegs(*P);
  for (u32 r = 0; r < n; ++r) {
    auto* t = new CTA;
    t->cl = c;
    t->L = &L;
    t->rank = r;
    u32 cx = r % L.cluster[0], cy = r / L.cluster[0] % L.cluster[1], cz = r / L.cluster[0] / L.cluster[1];
    t->id[0] = c->cid[0] * L.cluster[0] + cx;
    t->id[1] = c->cid[1] * L.cluster[1] + cy;
    t->id[2] = c->cid[2] * L.cluster[2] + cz;
    t->smem = p;
    p += smem;
    t->smemSize = L.smemBytes;
    if (g_cfg.ckUninit) t->init.assign(L.smemBytes, 0);
    memset(t->smem, 0xcd, L.smemBytes);
    t->liveWarps = nw;
    for (u32 i = 0; i < nw; ++i) {
      auto* w = new Warp;
      w->cta = t;
      w->cl = c;
      w->prog = P;
      w->code = P->code.data();
      w->kp = P->kpool.data();
      w->wid = i;
      w->gwid = gw++;
      w->threadRegs = atLaunch;
      w->cls = c->st.cls[0];
      w->regs = (u32*)p;
      p += regs;
      w->preds = (u32*)p;
      p += preds;
      w->local = p;
      p += loc;
      w->localBytes = P->localBytes;
      w->preds[0] = ~0u;
      w->preds[1] = 0;
      for (u32 l = 0; l < 32; ++l) {
        u32 id = i * 32 + l;
        w->tid[0][l] = id % L.block[0];
        w->tid[1][l] = id / L.block[0] % L.block[1];
        w->tid[2][l] = id / L.block[0] / L.block[1];
        if (id < threads) w->live |= 1u << l;
      }
      w->active = w->live;
      Frag f;
      f.pc = 0;
      f.mask = w->live;
      w->frags.push_back(f);
      if (g_cfg.ckRegs) {
        w->wgBusyD.assign((size_t)P->wgCount + 1, 0);
        w->wgBusyA.assign((size_t)P->wgCount + 1, 0);
        w->wgDirty.assign((size_t)P->regWords / 32 + 4, 0);
      }
      t->warps.push_back(w);
      c->warps.push_back(w);
    }
    c->ctas.push_back(t);
  }
  c->cbWarpArrived.assign(c->warps.size(), 0);
  c->liveWarps = (u32)c->warps.size();
  if (g_cfg.ckRace) raceInit(*c);
  return c;
}
void freeCluster(Cluster* c) {
  if (c->race) raceFree(*c);
  for (BulkOp* o : c->bulk) delete o;
  for (auto* w : c->warps) delete w;
  for (auto* t : c->ctas) delete t;
  munmap(c->arena, c->arenaBytes);
  delete c;
}

bool Cluster::completeOne(bool any) {
  if (g_cfg.async == Config::RANDOM) {
    std::vector<size_t> cand;
    for (size_t k = 0; k < bulk.size(); ++k)
      if (bulk[k]->kind != BK_T_GATHER && (any || bulk[k]->hasMbar)) cand.push_back(k);
    if (cand.empty()) return false;
    size_t k = cand[rnd() % cand.size()];
    BulkOp* op = bulk[k];
    bulk.erase(bulk.begin() + (long)k);
    if (op->grouped && op->w->cl->race) { /* visible only after the wait */
    }
    bulkExecute(*op);
    delete op;
    return true;
  }
  for (size_t k = 0; k < bulk.size(); ++k)
    if (bulk[k]->hasMbar) {
      BulkOp* op = bulk[k];
      bulk.erase(bulk.begin() + (long)k);
      bulkExecute(*op);
      delete op;
      return true;
    }
  return false;
}
static const char* kState[] = {"ready",
                               "waits for the other lanes of the warp at a warp-synchronous instruction",
                               "waits at CTA barrier",
                               "waits on mbarrier",
                               "waits at barrier.cluster",
                               "waits at bar.warp.sync",
                               "waits for the other warps of the warpgroup at wgmma.wait_group",
                               "waits for registers at setmaxnreg.inc"};
std::string dumpCluster(Cluster& c) {
  std::string s;
  int lines = 0;
  for (Warp* w : c.warps) {
    if (w->done) continue;
    for (auto& f : w->frags) {
      if (++lines > 40) {
        s += "    ...\n";
        return s;
      }
      u32 pc = f.st == F_BAR ? (f.pc ? f.pc - 1 : 0) : f.pc;
      std::string what = kState[f.st];
      if (f.st == F_BAR) {
        Barrier& b = w->cta->bar[f.bar];
        what +=
            strf(" %u (%u of %u threads arrived)", f.bar, b.arrived, b.expected ? b.expected : w->cta->liveWarps * 32);
      }
      if (f.st == F_MBAR) {
        u64 v = *f.mbar;
        what += strf(" at shared offset %u for parity %u (phase %u, pending arrivals %u of %u, pending bytes %d)",
                     (f.mbarAddr & 0xffffff) - kSmemBase, f.parity, (u32)(v >> 61 & 1), (u32)(v & 0xfffff),
                     (u32)(v >> 20 & 0xfffff), (s32)((s64)(v << 3) >> 43));
      }
      if (f.st == F_REGS)
        what += strf(" (of %u a thread; given back: %u of %u)", w->threadRegs, w->cta->freeRegs, f.need);
      s += strf("    CTA (%u,%u,%u) warp %u lanes %s: %s\n        %s\n", w->cta->id[0], w->cta->id[1], w->cta->id[2],
                w->wid, laneStr(f.mask).c_str(), what.c_str(), codeLoc(w->prog, pc).c_str());
    }
  }
  for (BulkOp* o : c.bulk)
    if (o->hasMbar)
      s += strf("    bulk copy of %u bytes still in flight towards mbarrier %u\n", o->bytes, o->mbar - kSmemBase);
  return s;
}
bool Cluster::run(u64 budget) {
  u64 start = instrs, idleRounds = 0, lastProgress = progress, forced = 0;
  // RANKED: a warp runs while none before it in a random order can, so that some get as far ahead of others as their
  // waits allow (Burckhardt et al., ASPLOS 2010); now and then the order is drawn anew.
  const bool rnd_ = g_cfg.sched == Config::SLICES, ranked = g_cfg.sched == Config::RANKED;
  std::vector<u32> order(warps.size());
  for (u32 i = 0; i < order.size(); ++i) order[i] = i;
  onlyGlobalStall = false;
  while (liveWarps) {
    bool any = false;
    if (rnd_ || (ranked && (start == instrs || rnd() % 256 == 0)))
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rnd() % i]);
    u64 instr0 = instrs;
    for (u32 k : order) {
      Warp* w = warps[k];
      if (w->done) continue;
      u32 q = rnd_ ? 1 + (u32)(rnd() % 300) : 1024;
      const bool ran = runWarp(*w, q);
      if (ran) any = true;
      if (g_cfg.async == Config::RANDOM && !bulk.empty() && rnd() % 8 == 0) completeOne(true);
      if (ran && ranked) break;
    }
    if (!liveWarps) break;
    if (progress != lastProgress) {
      lastProgress = progress;
      idleRounds = 0;
      forced = 0;
    } else
      ++idleRounds;
    if (!any) {
      if (g_cfg.async != Config::EAGER && completeOne(false)) continue;
      // let blocked try_wait operations time out: the program may have something else to do
      bool f = false;
      for (Warp* w : warps)
        if (!w->done)
          for (auto& g : w->frags)
            if (g.st == F_MBAR) {
              g.force = true;
              f = true;
            }
      if (!f || ++forced > 64)
        throw SimError(strf("deadlock: no warp of the cluster can continue\n%s    kernel %s",
                            dumpCluster(*this).c_str(), shortName(L->prog->fn->name).c_str()),
                       719);
      continue;
    }
    // spinning on global memory: hand the host thread to another cluster
    if (idleRounds > 64 && instrs - instr0 < 64 * warps.size()) {
      onlyGlobalStall = true;
      return false;
    }
    if (instrs - start > budget) {
      onlyGlobalStall = idleRounds > 8;
      return false;
    }
  }
  // writes still in flight complete now
  for (BulkOp* op : bulk) {
    if (op->kind != BK_T_GATHER) bulkExecute(*op);
    delete op;
  }
  bulk.clear();
  return true;
}

}  // namespace ptxsim

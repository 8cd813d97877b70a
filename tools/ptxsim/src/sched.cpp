// Warp scheduling, divergence, clusters, launches, reports.
#include "sim.h"
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <list>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace ptxsim {
thread_local ThreadCtx t_ctx;
Config g_cfg;
static int envInt(const char* n, int d) {
  const char* s = getenv(n);
  return s && *s ? atoi(s) : d;
}
Config::Config() {
  const char* s = getenv("PTXSIM_ASYNC");
  if (s) {
    std::string v = s;
    if (v == "lazy")
      async = LAZY;
    else if (v.rfind("random", 0) == 0) {
      async = RANDOM;
      size_t c = v.find(':');
      if (c != std::string::npos) seed = strtoull(v.c_str() + c + 1, nullptr, 0);
    } else if (v != "eager" && !v.empty())
      fprintf(stderr, "ptxsim: unknown PTXSIM_ASYNC=%s (eager, lazy, random[:seed])\n", s);
  }
  if ((s = getenv("PTXSIM_SCHED")) && *s) {
    sched = true;
    seed += strtoull(s, nullptr, 0) * 0x9e3779b97f4a7c15ull;
  }
  if ((s = getenv("PTXSIM_CHECK")) && *s && strcmp(s, "0")) {
    std::string v = "," + std::string(s) + ",";
    auto has = [&](const char* k) { return v.find(std::string(",") + k + ",") != std::string::npos; };
    bool all = has("1") || has("all");
    ckOob = all || has("oob");
    ckUninit = all || has("uninit");
    ckRace = all || has("race");
    ckRegs = all || has("regs");
    ckProxy = all || has("proxy");
    if (ckProxy) ckRace = true;
    for (const char* k : {"oob", "uninit", "race", "regs", "proxy"})
      if (has((std::string("-") + k).c_str())) {
        if (!strcmp(k, "oob")) ckOob = false;
        if (!strcmp(k, "uninit")) ckUninit = false;
        if (!strcmp(k, "race")) ckRace = ckProxy = false;
        if (!strcmp(k, "regs")) ckRegs = false;
        if (!strcmp(k, "proxy")) ckProxy = false;
      }
    check = ckOob || ckUninit || ckRace || ckRegs;
  }
  checkContinue = envInt("PTXSIM_CHECK_CONTINUE", 0);
  threads = envInt("PTXSIM_THREADS", 0);
  if ((s = getenv("PTXSIM_STATS")) && *s) {
    stats = true;
    statsFile = s;
  }
  if ((s = getenv("PTXSIM_SUMMARY")) && *s && strcmp(s, "0")) {
    stats = summary = true;
    if (strcmp(s, "1")) summaryFile = s;
  }
  if ((s = getenv("PTXSIM_DEVICE"))) a100 = strcasestr(s, "a100") != nullptr;
  verbose = envInt("PTXSIM_VERBOSE", 0);
}

// ---- reports ----
std::string laneStr(u32 m) {
  if (m == ~0u) return "0-31";
  std::string s;
  for (int i = 0; i < 32; ++i)
    if (m >> i & 1) {
      int j = i;
      while (j < 31 && (m >> (j + 1) & 1)) ++j;
      if (!s.empty()) s += ",";
      s += j > i ? strf("%d-%d", i, j) : strf("%d", i);
      i = j;
    }
  return s;
}
static std::string codeLoc(Program* p, u32 pc) {
  if (pc >= p->info.size()) return "end of kernel";
  const InstInfo& f = p->info[pc];
  std::string s = strf("PTX line %u", f.line);
  if (f.loc.line) {
    auto it = p->mod->files.find(f.loc.file);
    std::string fn = it == p->mod->files.end() ? strf("file %u", f.loc.file) : it->second;
    size_t k = fn.rfind('/');
    s += strf(", source %s:%u", (k == std::string::npos ? fn : fn.substr(k + 1)).c_str(), f.loc.line);
  }
  s += ": " + p->mod->lineText(f.line);
  return s;
}
std::string shortName(const std::string& n) { return n.size() > 120 ? n.substr(0, 117) + "..." : n; }
std::string whereStr(const Warp& w, u32 pc) {
  std::string s = strf("CTA (%u,%u,%u)", w.cta->id[0], w.cta->id[1], w.cta->id[2]);
  if (w.cl->ctas.size() > 1) s += strf(" [rank %u of cluster %u]", w.cta->rank, w.cl->id);
  return s + strf(" warp %u, ", w.wid) + codeLoc(w.prog, pc);
}
void simFail(Warp& w, int code, const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  char b[3000];
  vsnprintf(b, sizeof b, fmt, ap);
  va_end(ap);
  throw SimError(strf("%s\n    at %s\n    kernel %s", b, whereStr(w, w.pc ? w.pc - 1 : 0).c_str(),
                      shortName(w.prog->fn->name).c_str()),
                 code);
}
void report(Warp& w, u32 pc, const char* kind, const std::string& msg) {
  std::string s = strf("[%s] %s\n    at %s\n    kernel %s", kind, msg.c_str(), whereStr(w, pc).c_str(),
                       shortName(w.prog->fn->name).c_str());
  if (!g_cfg.checkContinue) throw SimError(s, 719);
  Launch& L = *w.cta->L;
  u64 n = L.reports++;
  if (n < 20) fprintf(stderr, "ptxsim: %s\n", s.c_str());
  std::lock_guard<std::mutex> g(L.mu);
  if (L.error.empty()) {
    L.error = s;
    L.errCode = 719;
  }
}

// ---- divergence ----
// Values loaded from never-written memory are followed through registers and shared memory and
// reported when they reach global memory, an atomic or an address.
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
static void setReady(Frag& f) { f.st = F_READY; }
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
// Runs up to |q| instructions. Returns the number executed (0: blocked).
static u32 runWarp(Warp& w, u32 q) {
  u32 n = 0;
  const bool stats = g_cfg.stats, ck = g_cfg.ckRegs || g_cfg.ckUninit, regck = g_cfg.ckRegs && w.prog->wgCount;
  t_ctx.w = &w;
  u32 burst = 0;
  while (n < q && !w.done) {
    // choose a fragment
    if (w.frags.size() > 1) mergeFrags(w);
    int best = -1;
    for (int i = 0; i < (int)w.frags.size(); ++i) {
      Frag& f = w.frags[i];
      if (!fragRunnable(w, f)) continue;
      if (best < 0) {
        best = i;
        continue;
      }
      Frag& g = w.frags[best];
      // the lowest pc runs first (reconvergence); a fragment that has run for long yields to others
      if (f.age / 4096 != g.age / 4096 ? f.age < g.age : f.pc < g.pc) best = i;
    }
    if (best < 0) break;
    Frag& f = w.frags[best];
    setReady(f);
    w.cur = best;
    w.pc = f.pc;
    w.active = f.mask;
    w.ev = 0;
    burst = 0;
    if (w.frags.size() == 1) {
      const Inst* code = w.code;
      f.age = 0;
      while (n < q) {
        const Inst& I = code[w.pc++];
        u32 m = w.active;
        if (I.guard >= 0) m &= I.gneg ? ~w.preds[I.guard] : w.preds[I.guard];
        ++n;
        if (stats) {
          w.cls[I.cls]++;
          w.cl->st.threadInsts += (u64)__builtin_popcount(m);
        }
        if (ck && m) {
          u32 pc0 = w.pc - 1;
          if (regck) wgCheckTouch(w, pc0);
          u32 tm = w.tainted ? taintPre(w, pc0, m) : 0;
          if (tm && I.cls == C_ATOM) taintReport(w, pc0, tm, "use in an atomic a value");
          I.fn(w, I, m);
          if (w.tainted || w.taintHandled) taintPost(w, pc0, m, tm);
          if (regck) wgDirtyStep(w, pc0);
        } else if (m)
          I.fn(w, I, m);
        if (w.ev) {
          if (stats) countOnce(w, I, m);
          break;
        }
      }
    } else {
      while (n < q) {
        const Inst& I = w.code[w.pc++];
        u32 m = w.active;
        if (I.guard >= 0) m &= I.gneg ? ~w.preds[I.guard] : w.preds[I.guard];
        ++n;
        ++burst;
        if (stats) {
          w.cls[I.cls]++;
          w.cl->st.threadInsts += (u64)__builtin_popcount(m);
        }
        if (ck && m) {
          u32 pc0 = w.pc - 1;
          if (regck) wgCheckTouch(w, pc0);
          u32 tm = w.tainted ? taintPre(w, pc0, m) : 0;
          if (tm && I.cls == C_ATOM) taintReport(w, pc0, tm, "use in an atomic a value");
          I.fn(w, I, m);
          if (w.tainted || w.taintHandled) taintPost(w, pc0, m, tm);
          if (regck) wgDirtyStep(w, pc0);
        } else if (m)
          I.fn(w, I, m);
        if (w.ev) {
          if (stats) countOnce(w, I, m);
          break;
        }
        bool stop = false;
        for (int i = 0; i < (int)w.frags.size(); ++i)
          if (i != w.cur) {
            Frag& g = w.frags[i];
            if ((g.st == F_READY || g.st == F_CONV) && g.pc <= w.pc && (g.pc == w.pc || g.st == F_READY)) {
              stop = true;
              break;
            }
          }
        if (stop || burst >= 4096) break;
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
  return n ? n : 0;
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
                               "waits for the other warps of the warpgroup at wgmma.wait_group"};
static std::string dumpCluster(Cluster& c) {
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
  const bool rnd_ = g_cfg.sched;
  std::vector<u32> order(warps.size());
  for (u32 i = 0; i < order.size(); ++i) order[i] = i;
  onlyGlobalStall = false;
  while (liveWarps) {
    bool any = false;
    if (rnd_)
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rnd() % i]);
    u64 instr0 = instrs;
    for (u32 k : order) {
      Warp* w = warps[k];
      if (w->done) continue;
      u32 q = rnd_ ? 1 + (u32)(rnd() % 300) : 1024;
      if (runWarp(*w, q)) any = true;
      if (g_cfg.async == Config::RANDOM && !bulk.empty() && rnd() % 8 == 0) completeOne(true);
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

// ---- launches ----
static Cluster* makeCluster(Launch& L, u32 idx) {
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
static void freeCluster(Cluster* c) {
  if (c->race) raceFree(*c);
  for (BulkOp* o : c->bulk) delete o;
  for (auto* w : c->warps) delete w;
  for (auto* t : c->ctas) delete t;
  munmap(c->arena, c->arenaBytes);
  delete c;
}

static thread_local sigjmp_buf t_jb;
static thread_local volatile bool t_guard = false;
static struct sigaction g_oldSegv, g_oldBus;
static void onSegv(int sig, siginfo_t* si, void* uc) {
  if (t_guard) {
    t_ctx.faultAddr = (u64)si->si_addr;
    t_guard = false;
    siglongjmp(t_jb, 1);
  }
  struct sigaction& o = sig == SIGSEGV ? g_oldSegv : g_oldBus;
  if (o.sa_flags & SA_SIGINFO && o.sa_sigaction) {
    o.sa_sigaction(sig, si, uc);
    return;
  }
  signal(sig, SIG_DFL);
  raise(sig);
}
static void installHandlers() {
  static std::once_flag f;
  std::call_once(f, [] {
    struct sigaction sa = {};
    sa.sa_sigaction = onSegv;
    sa.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &sa, &g_oldSegv);
    sigaction(SIGBUS, &sa, &g_oldBus);
  });
}
// Runs a slice of a cluster; converts memory faults of simulated accesses into errors.
static bool slice(Cluster* c, u64 budget) {
  if (sigsetjmp(t_jb, 1)) {
    Warp& w = *t_ctx.w;
    throw SimError(strf("illegal memory access: address 0x%llx (%s)\n    at %s\n    kernel %s",
                        (unsigned long long)t_ctx.faultAddr, describeAddr(t_ctx.faultAddr).c_str(),
                        whereStr(w, w.pc ? w.pc - 1 : 0).c_str(), shortName(w.prog->fn->name).c_str()),
                   700);
  }
  t_guard = true;
  bool r;
  try {
    r = c->run(budget);
  } catch (...) {
    t_guard = false;
    throw;
  }
  t_guard = false;
  return r;
}

void runLaunch(Launch& L) {
  installHandlers();
  u32 n = L.cluster[0] * L.cluster[1] * L.cluster[2];
  u64 total = (u64)L.grid[0] * L.grid[1] * L.grid[2] / n;
  u32 threads = (L.block[0] * L.block[1] * L.block[2] + 31) / 32 * 32;
  u32 perSm = std::max(1u, std::min({2048u / threads, (u32)(233472 / std::max(1u, L.smemBytes)), 32u}));
  u64 cap = std::max<u64>(1, (u64)(g_cfg.a100 ? 108 : 132) * perSm / n);  // clusters resident at once
  int nt = g_cfg.threads > 0 ? g_cfg.threads : (int)std::max(1u, std::thread::hardware_concurrency());
  if (g_cfg.sched || g_cfg.async == Config::RANDOM) nt = g_cfg.threads > 0 ? nt : 1;  // reproducible by default
  nt = (int)std::min<u64>((u64)nt, total);
  std::mutex mu;
  std::deque<Cluster*> waiting;
  u64 next = 0;
  u64 resident = 0, running = 0;
  u64 stallRounds = 0;
  std::condition_variable cv;
  auto worker = [&] {
    std::vector<u8> alt(65536);
    std::unique_lock<std::mutex> lk(mu);
    for (;;) {
      if (L.failed) return;
      Cluster* c = nullptr;
      // prefer clusters that can make progress, then new ones, then stalled ones
      if (!waiting.empty() && !waiting.front()->onlyGlobalStall) {
        c = waiting.front();
        waiting.pop_front();
      } else if (next < total && resident < cap) {
        u32 idx = (u32)next++;
        ++resident;
        lk.unlock();
        try {
          c = makeCluster(L, idx);
        } catch (SimError& e) {
          lk.lock();
          L.failed = true;
          L.error = e.what();
          L.errCode = 2;
          return;
        }
        lk.lock();
      } else if (!waiting.empty()) {
        c = waiting.front();
        waiting.pop_front();
      } else {
        if (running == 0) return;
        cv.wait(lk);
        continue;
      }
      ++running;
      lk.unlock();
      bool fin = false;
      u64 pr = c->progress;
      try {
        fin = slice(c, 400000);
      } catch (SimError& e) {
        lk.lock();
        if (!L.failed) {
          L.failed = true;
          L.error = e.what();
          L.errCode = e.code;
        }
        --running;
        cv.notify_all();
        return;
      }
      lk.lock();
      --running;
      if (fin) {
        L.st.add(c->st);
        if (g_cfg.stats)
          for (CTA* t : c->ctas) {
            L.cta.load.add(t->l2Load);
            L.cta.tma.add(t->l2Tma);
            L.cta.filled.add(t->l2Load + t->filled);
          }
        L.st.insts += c->instrs;
        --resident;
        stallRounds = 0;
        lk.unlock();
        freeCluster(c);
        lk.lock();
      } else {
        if (c->progress != pr)
          stallRounds = 0;
        else
          ++stallRounds;
        if (stallRounds > 400 + 40 * resident && running == 0 && (next >= total || resident >= cap)) {
          std::string d = dumpCluster(*c);
          L.failed = true;
          L.errCode = 719;
          L.error = strf(
              "deadlock: %llu resident clusters make no progress (waiting on global memory or on each other); one of "
              "them:\n%s    kernel %s",
              (unsigned long long)resident, d.c_str(), shortName(L.prog->fn->name).c_str());
          cv.notify_all();
          return;
        }
        waiting.push_back(c);
      }
      cv.notify_all();
    }
  };
  if (nt <= 1)
    worker();
  else {
    std::vector<std::thread> ts;
    for (int i = 0; i < nt; ++i) ts.emplace_back(worker);
    for (auto& t : ts) t.join();
  }
  for (Cluster* c : waiting) freeCluster(c);  // left over after a failure
}
}  // namespace ptxsim

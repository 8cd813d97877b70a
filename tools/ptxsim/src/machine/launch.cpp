// A launch: clusters on host threads, as many at once as the device would hold; memory faults become errors.
#include "machine/machine.h"
#include <condition_variable>
#include <csetjmp>
#include <csignal>
#include <deque>
#include <thread>

namespace ptxsim {

thread_local ThreadCtx t_ctx;

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

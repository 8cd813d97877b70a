// The CUDA runtime entry points.
#include "sim.h"
#include "tmap.h"
#include <chrono>
#include <cstdio>
#include <sys/mman.h>
#define __CUDA_RUNTIME_API_H_INCLUDED_FROM_PTXSIM
#include <cuda_runtime_api.h>
#include <cuda.h>

namespace ptxsim {
struct Fat {
  std::vector<std::string> ptx;
  std::vector<int> arch;
  std::unique_ptr<Module> mod;
  bool loaded = false;
  std::string error;
  std::map<const void*, std::pair<std::string, size_t>> vars;
};
struct Kernel {
  Fat* fat;
  std::string name;
  Program* prog = nullptr;
  std::string error;
  int maxDyn = 49152;
  bool optedIn = false;
};
static std::recursive_mutex g_mu;
static std::vector<std::unique_ptr<Fat>> g_fats;
static std::map<const void*, Kernel> g_kernels;
static std::map<const void*, std::pair<Fat*, std::string>> g_vars;
static std::string g_lastReport;
static cudaError_t g_sticky = cudaSuccess;
static thread_local cudaError_t t_err = cudaSuccess;
static u64 g_launches = 0;
static int g_maxSmem() { return g_cfg.a100 ? 163 * 1024 : 227 * 1024; }
static cudaError_t E(cudaError_t e) {
  if (e != cudaSuccess && e != cudaErrorNotReady) t_err = e;
  return e;
}

static void initWindows() {
  static std::once_flag f;
  std::call_once(f, [] {
    u8* p = (u8*)mmap(nullptr, 3 * kWin, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      fprintf(stderr, "ptxsim: cannot reserve address windows\n");
      abort();
    }
    g_sharedWin = ((u64)p + kWin - 1) / kWin * kWin;
    g_localWin = g_sharedWin + kWin;
  });
}
// LZ4 block format, used by compressed fat binaries
static bool lz4(const u8* s, size_t n, std::string& out, size_t want) {
  size_t i = 0;
  out.clear();
  out.reserve(want);
  while (i < n) {
    u8 tok = s[i++];
    size_t lit = tok >> 4;
    if (lit == 15) {
      u8 b;
      do {
        if (i >= n) return false;
        b = s[i++];
        lit += b;
      } while (b == 255);
    }
    if (i + lit > n) return false;
    out.append((const char*)s + i, lit);
    i += lit;
    if (i >= n) break;
    if (i + 2 > n) return false;
    size_t off = s[i] | s[i + 1] << 8;
    i += 2;
    size_t len = tok & 15;
    if (len == 15) {
      u8 b;
      do {
        if (i >= n) return false;
        b = s[i++];
        len += b;
      } while (b == 255);
    }
    len += 4;
    if (off == 0 || off > out.size()) return false;
    size_t p = out.size() - off;
    for (size_t k = 0; k < len; ++k) out.push_back(out[p + k]);
  }
  return out.size() == want;
}
static void parseFat(Fat& f, const u8* p) {
  u32 magic;
  memcpy(&magic, p, 4);
  if (magic != 0xBA55ED50) {
    f.error = "unknown fat binary format";
    return;
  }
  u16 hs;
  u64 size;
  memcpy(&hs, p + 6, 2);
  memcpy(&size, p + 8, 8);
  const u8* q = p + hs;
  const u8* end = q + size;
  bool zipped = false, elf = false;
  while (q + 64 <= end) {
    u16 kind;
    u32 h, comp, arch;
    u64 sz, flags, raw;
    memcpy(&kind, q, 2);
    memcpy(&h, q + 4, 4);
    memcpy(&sz, q + 8, 8);
    memcpy(&comp, q + 16, 4);
    memcpy(&arch, q + 28, 4);
    memcpy(&flags, q + 40, 8);
    memcpy(&raw, q + 56, 8);
    if (h < 64 || q + h + sz > end) break;
    if (kind == 1) {
      const u8* d = q + h;
      if (comp == 0 && sz > 8 && memchr(d, '.', (size_t)std::min<u64>(sz, 4096)) && !(flags & 0xe000)) {
        f.ptx.emplace_back((const char*)d, sz);
        f.arch.push_back((int)arch);
      } else {
        std::string o;
        if ((flags & 0x2000) && lz4(d, comp ? comp : sz, o, raw)) {
          f.ptx.push_back(o);
          f.arch.push_back((int)arch);
        } else
          zipped = true;
      }
    } else
      elf = true;
    q += h + sz;
  }
  if (f.ptx.empty())
    f.error = zipped ? "its PTX is compressed: build with -no-compress (or -Xfatbin -compress=false)"
              : elf  ? "it holds only SASS: build with -gencode arch=compute_XX,code=compute_XX so that PTX is embedded"
                     : "it holds no device code";
}
static Module* moduleOf(Fat& f) {
  if (f.loaded) return f.mod.get();
  f.loaded = true;
  if (f.ptx.empty()) return nullptr;
  int dev = g_cfg.a100 ? 80 : 90;
  int best = -1;
  for (size_t i = 0; i < f.ptx.size(); ++i)
    if (f.arch[i] <= dev && (best < 0 || f.arch[i] >= f.arch[(size_t)best])) best = (int)i;
  if (best < 0) {
    f.error = strf("its PTX is for compute_%d, the simulated device is sm_%d", f.arch[0], dev);
    return nullptr;
  }
  try {
    initWindows();
    f.mod = std::make_unique<Module>(f.ptx[(size_t)best]);
    // place global and constant variables
    for (Var* v : f.mod->varOrder) {
      if (v->space == Space::SHARED || v->isExtern) continue;
      u8* p = (u8*)devAlloc(std::max<u64>(v->size, 1));
      memset(p, 0, v->size);
      if (!v->init.empty()) memcpy(p, v->init.data(), v->init.size());
      v->addr = (u64)p;
      v->placed = true;
      markInit((u64)p, v->size);
    }
    for (Var* v : f.mod->varOrder)
      for (auto& r : v->relocs) {
        auto it = f.mod->vars.find(r.sym);
        if (it == f.mod->vars.end() || !it->second->placed) {
          continue;
        }
        u64 x = it->second->addr + (u64)r.add;
        memcpy((u8*)v->addr + r.off, &x, (size_t)std::min(8, r.bytes));
      }
  } catch (SimError& e) {
    f.error = e.what();
    f.mod.reset();
  }
  return f.mod.get();
}
static Program* programOf(Kernel& k) {
  if (k.prog) return k.prog;
  if (!k.error.empty()) return nullptr;
  Module* m = moduleOf(*k.fat);
  if (!m) {
    k.error = strf("ptxsim: no usable device code for kernel %s: %s", k.name.c_str(), k.fat->error.c_str());
    return nullptr;
  }
  auto it = m->funcs.find(k.name);
  if (it == m->funcs.end() || !it->second->entry) {
    k.error = strf("ptxsim: kernel %s not found in its PTX module", k.name.c_str());
    return nullptr;
  }
  try {
    k.prog = translate(*m, *it->second);
  } catch (SimError& e) {
    k.error = e.what();
  }
  return k.prog;
}
static void setReport(const std::string& s) {
  g_lastReport = s;
  fprintf(stderr, "ptxsim: %s\n", s.c_str());
  fflush(stderr);
}

// ---- counters ----
struct Totals {
  u64 launches = 0;
  Stats s;
  Launch::PerCta c;
};
static std::map<std::string, Totals> g_totals;  // by kernel
static std::vector<std::string> g_nodes;        // stream operations in order, as JSON
static std::map<std::string, u64> g_nodeCount;
static unsigned long long U(u64 x) { return x; }
static std::string insJson(const u64* cls) {
  u64 g[G_COUNT] = {}, n = 0;
  for (int i = 0; i < C_COUNT; ++i) {
    g[clsGroup(i)] += cls[i];
    n += cls[i];
  }
  auto list = [](const u64* v, const char* const* name, int c) {
    std::string o;
    for (int i = 0; i < c; ++i)
      if (v[i]) o += strf("%s\"%s\":%llu", o.empty() ? "" : ",", name[i], U(v[i]));
    return o;
  };
  return strf("\"warp_instructions\":%llu,\"groups\":{%s},\"classes\":{%s}", U(n), list(g, kGrpName, G_COUNT).c_str(),
              list(cls, kClsName, C_COUNT).c_str());
}
static std::string spreadJson(const Launch::Spread& s) {
  return strf("{\"min\":%llu,\"mean\":%.1f,\"max\":%llu}", U(s.n ? s.min : 0), s.n ? (double)s.sum / (double)s.n : 0.0,
              U(s.max));
}
static std::string statsJson(const Stats& s, const Launch::PerCta& c) {
  u64 all[C_COUNT] = {};
  for (auto& r : s.cls)
    for (int i = 0; i < C_COUNT; ++i) all[i] += r[i];
  std::string j = strf("%s,\"thread_instructions\":%llu,\"regions\":{", insJson(all).c_str(), U(s.threadInsts));
  bool first = true;
  for (int r = 1; r < kRegions; ++r) {
    bool any = false;
    for (u64 x : s.cls[r]) any |= x != 0;
    if (any) {
      j += strf("%s\"%d\":{%s}", first ? "" : ",", r, insJson(s.cls[r]).c_str());
      first = false;
    }
  }
  j += strf("},\n  \"mma_macs\":%llu,\"wgmma_macs\":%llu,", U(s.mmaMacs), U(s.wgmmaMacs));
  auto eff = [](u64 b, u64 sec) { return sec ? (double)b / (32.0 * (double)sec) : 1.0; };
  j += strf("\"global_load\":{\"bytes\":%llu,\"sectors\":%llu,\"requests\":%llu,\"efficiency\":%.4f},", U(s.gld),
            U(s.gldSectors), U(s.gldReq), eff(s.gld, s.gldSectors));
  j += strf("\"global_store\":{\"bytes\":%llu,\"sectors\":%llu,\"requests\":%llu,\"efficiency\":%.4f},\n", U(s.gst),
            U(s.gstSectors), U(s.gstReq), eff(s.gst, s.gstSectors));
  j += strf(
      "  "
      "\"cp_async_bytes\":%llu,\"tma_load_bytes\":%llu,\"tma_store_bytes\":%llu,\"dsmem_bytes\":%llu,\"prefetch_"
      "bytes\":%llu,",
      U(s.cpAsyncBytes), U(s.tmaLoad), U(s.tmaStore), U(s.dsmem), U(s.prefetch));
  j += strf(
      "\"l2_to_sm\":{\"load_bytes\":%llu,\"load_unique_bytes\":%llu,\"cp_async_bytes\":%llu,\"tma_bytes\":%llu,\"tma_"
      "delivered_bytes\":%llu,\"per_cta\":{\"load\":%s,\"tma\":%s,\"arrived\":%s}},\n",
      U(s.l2Load), U(s.l2Unique), U(s.l2CpAsync), U(s.l2Tma), U(s.tmaDelivered), spreadJson(c.load).c_str(),
      spreadJson(c.tma).c_str(), spreadJson(c.filled).c_str());
  return j + strf(
                 "  "
                 "\"shared\":{\"requests\":%llu,\"load_bytes\":%llu,\"store_bytes\":%llu,\"wavefronts\":%llu,\"bank_"
                 "conflict_factor\":%.4f},\"atomics\":%llu,\"barriers\":%llu}",
                 U(s.smemReq), U(s.smemLd), U(s.smemSt), U(s.smemWavefronts),
                 s.smemIdeal ? (double)s.smemWavefronts / (double)s.smemIdeal : 1.0, U(s.atomics), U(s.barriers));
}
static std::string summaryJson() {
  std::string j = "{\"counts\":{";
  bool first = true;
  for (auto& [k, n] : g_nodeCount) {
    j += strf("%s\"%s\":%llu", first ? "" : ",", k.c_str(), U(n));
    first = false;
  }
  j += "},\n\"kernels\":{";
  first = true;
  for (auto& [k, t] : g_totals) {
    j += strf("%s\n\"%s\":{\"launches\":%llu,", first ? "" : ",", k.c_str(), U(t.launches)) + statsJson(t.s, t.c);
    first = false;
  }
  j += "},\n\"nodes\":[";
  first = true;
  for (auto& n : g_nodes) {
    j += first ? "\n" : ",\n";
    j += n;
    first = false;
  }
  return j + "]}\n";
}
static void writeSummary() {
  if (!g_cfg.summary || g_cfg.summaryFile.empty()) return;
  if (FILE* o = fopen(g_cfg.summaryFile.c_str(), "w")) {
    std::string s = summaryJson();
    fwrite(s.data(), 1, s.size(), o);
    fclose(o);
  }
}
// The list of launches in PTXSIM_STATS: a new file name starts a new list.
static void writeStats(const std::string& j) {
  static std::string name;
  const char* n = g_cfg.statsFile.c_str();
  if (!*n) return;
  FILE* o = name == g_cfg.statsFile ? fopen(n, "r+") : nullptr;
  const bool more = o != nullptr;
  if (!o) o = fopen(n, "w");
  if (!o) return;
  name = g_cfg.statsFile;
  if (more) {
    fseek(o, -3, SEEK_END);
    fprintf(o, ",\n%s\n]\n", j.c_str());
  } else
    fprintf(o, "[\n%s\n]\n", j.c_str());
  fclose(o);
}
static u64 streamId(cudaStream_t s) {
  u64 h = (u64)s;
  return h < 16 ? 0 : h / 16 - 0x1000;
}  // 0: a default stream; others in order of creation
static void node(const char* kind, cudaStream_t st, const std::string& more) {
  if (!g_cfg.stats) return;
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_nodeCount[kind]++;
  g_nodes.push_back(
      strf("{\"node\":\"%s\",\"stream\":%llu%s%s}", kind, U(streamId(st)), more.empty() ? "" : ",", more.c_str()));
  static std::once_flag once;
  if (g_cfg.summary) std::call_once(once, [] { atexit(writeSummary); });
}
static std::string attrJson(const cudaLaunchAttribute* a, unsigned n) {
  static const std::map<int, const char*> names = {
      {cudaLaunchAttributeAccessPolicyWindow, "access_policy_window"},
      {cudaLaunchAttributeCooperative, "cooperative"},
      {cudaLaunchAttributeClusterDimension, "cluster_dimension"},
      {cudaLaunchAttributeClusterSchedulingPolicyPreference, "cluster_scheduling_policy"},
      {cudaLaunchAttributeProgrammaticStreamSerialization, "programmatic_stream_serialization"},
      {cudaLaunchAttributeProgrammaticEvent, "programmatic_event"},
      {cudaLaunchAttributePriority, "priority"},
      {cudaLaunchAttributeMemSyncDomainMap, "mem_sync_domain_map"},
      {cudaLaunchAttributeMemSyncDomain, "mem_sync_domain"},
      {cudaLaunchAttributePreferredClusterDimension, "preferred_cluster_dimension"},
      {cudaLaunchAttributeLaunchCompletionEvent, "launch_completion_event"},
      {cudaLaunchAttributePreferredSharedMemoryCarveout, "preferred_shared_memory_carveout"}};
  std::string j;
  for (unsigned i = 0; i < n; ++i) {
    int id = (int)a[i].id;
    if (id == cudaLaunchAttributeIgnore) continue;
    auto it = names.find(id);
    const auto& v = a[i].val;
    std::string val = id == cudaLaunchAttributeClusterDimension
                          ? strf("[%u,%u,%u]", v.clusterDim.x, v.clusterDim.y, v.clusterDim.z)
                      : id == cudaLaunchAttributeProgrammaticStreamSerialization
                          ? (v.programmaticStreamSerializationAllowed ? "true" : "false")
                      : id == cudaLaunchAttributeCooperative ? (v.cooperative ? "true" : "false")
                      : id == cudaLaunchAttributePriority    ? strf("%d", v.priority)
                                                             : "true";
    j += strf("%s\"%s\":%s", j.empty() ? "" : ",", it == names.end() ? strf("attribute_%d", id).c_str() : it->second,
              val.c_str());
  }
  return "{" + j + "}";
}

static cudaError_t launch(const void* func, dim3 g, dim3 b, void** args, size_t smem, dim3 cl, cudaStream_t stream,
                          const std::string& attrs = "{}") {
  std::lock_guard<std::recursive_mutex> lk(g_mu);
  if (g_sticky != cudaSuccess) return E(g_sticky);
  auto it = g_kernels.find(func);
  if (it == g_kernels.end()) return E(cudaErrorInvalidDeviceFunction);
  Kernel& k = it->second;
  Program* P = programOf(k);
  if (!P) {
    setReport(k.error);
    return E(cudaErrorNoKernelImageForDevice);
  }
  Launch L;
  L.prog = P;
  L.grid[0] = g.x;
  L.grid[1] = g.y;
  L.grid[2] = g.z;
  L.block[0] = b.x;
  L.block[1] = b.y;
  L.block[2] = b.z;
  L.cluster[0] = cl.x;
  L.cluster[1] = cl.y;
  L.cluster[2] = cl.z;
  if (P->fn->reqCluster[0])
    for (int i = 0; i < 3; ++i) L.cluster[i] = (u32)P->fn->reqCluster[i];
  u64 threads = (u64)b.x * b.y * b.z, cn = (u64)L.cluster[0] * L.cluster[1] * L.cluster[2];
  auto bad = [&](const std::string& s) {
    setReport("invalid launch of " + k.name + ": " + s);
    return E(cudaErrorInvalidConfiguration);
  };
  if (!threads || threads > 1024 || !g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535)
    return bad(strf("grid (%u,%u,%u) block (%u,%u,%u)", g.x, g.y, g.z, b.x, b.y, b.z));
  if (cn > 16) return bad("cluster of more than 16 CTAs");
  for (int i = 0; i < 3; ++i)
    if (L.grid[i] % L.cluster[i]) return bad("grid is not a multiple of the cluster");
  int mt = P->fn->maxntid[0] * P->fn->maxntid[1] * P->fn->maxntid[2];
  if (mt && threads > (u64)mt)
    return bad(strf("%llu threads, the kernel was compiled for at most %d (__launch_bounds__)",
                    (unsigned long long)threads, mt));
  int rt = P->fn->reqntid[0] * P->fn->reqntid[1] * P->fn->reqntid[2];
  if (rt && threads != (u64)rt) return bad(strf("the kernel requires %d threads", rt));
  const int dynMax = k.optedIn ? k.maxDyn : std::max(0, 49152 - (int)P->staticSmem);
  if ((int)smem > dynMax)
    return bad(
        strf("%zu bytes of dynamic shared memory without cudaFuncSetAttribute(MaxDynamicSharedMemorySize) (limit %d)",
             smem, dynMax));
  if ((int)(smem + P->staticSmem) > g_maxSmem())
    return bad(strf("%zu bytes of shared memory exceed the device limit %d", smem + P->staticSmem, g_maxSmem()));
  L.dynSmem = (u32)smem;
  L.smemBytes = kSmemBase + P->staticSmem + (u32)smem;
  L.gridId = ++g_launches;
  for (size_t i = 0; i < P->paramOff.size(); ++i) memcpy(P->params + P->paramOff[i], args[i], P->paramSize[i]);
  auto t0 = std::chrono::steady_clock::now();
  runLaunch(L);
  double sec = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
  if (g_cfg.verbose)
    fprintf(stderr,
            "ptxsim: %.90s grid (%u,%u,%u) block (%u,%u,%u) cluster (%u,%u,%u): %llu warp instructions, %.3f s\n",
            k.name.c_str(), g.x, g.y, g.z, b.x, b.y, b.z, L.cluster[0], L.cluster[1], L.cluster[2],
            (unsigned long long)L.st.insts, sec);
  if (g_cfg.stats) {
    std::string head = strf(
        "\"kernel\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"cluster\":[%u,%u,%u],\"smem\":%u,\"attributes\":%"
        "s",
        k.name.c_str(), L.grid[0], L.grid[1], L.grid[2], L.block[0], L.block[1], L.block[2], L.cluster[0], L.cluster[1],
        L.cluster[2], L.smemBytes - kSmemBase, attrs.c_str());
    node("kernel", stream, head);
    Totals& t = g_totals[k.name];
    t.launches++;
    t.s.add(L.st);
    t.c.add(L.cta);
    if (!g_cfg.statsFile.empty())
      writeStats(strf("{%s,\"stream\":%llu,\"host_seconds\":%.6f,\n  ", head.c_str(), U(streamId(stream)), sec) +
                 statsJson(L.st, L.cta));
  }
  if (!L.error.empty()) {
    setReport(L.error);
    if (L.errCode == 710 || L.errCode == 700 || L.errCode == 716 || L.errCode == 719)
      g_sticky = (cudaError_t)L.errCode;
    else
      g_sticky = cudaErrorLaunchFailure;
    return cudaSuccess;
  }
  return cudaSuccess;
}
struct CallCfg {
  dim3 g, b;
  size_t s;
  cudaStream_t st;
};
static thread_local std::vector<CallCfg> t_cfg;
struct Event {
  std::chrono::steady_clock::time_point t;
};
}  // namespace ptxsim
using namespace ptxsim;
#define API extern "C" __attribute__((visibility("default")))

// ---- extra entry points of the simulator ----
API const char* ptxsim_last_report() { return g_lastReport.c_str(); }
API void ptxsim_reset() {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_sticky = cudaSuccess;
  t_err = cudaSuccess;
  g_lastReport.clear();
}
API int ptxsim_register(void* p, size_t n) {
  regHost(p, n);
  return 0;
}
API int ptxsim_unregister(void* p) {
  unregHost(p);
  return 0;
}
API int ptxsim_config(const char* name, const char* value) {  // same names as the environment variables
  std::lock_guard<std::recursive_mutex> l(g_mu);
  if (value)
    setenv(name, value, 1);
  else
    unsetenv(name);
  Config c;
  if (c.summaryFile != g_cfg.summaryFile) writeSummary();
  g_cfg = c;
  return 0;
}
API const char* ptxsim_summary() {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  static std::string s;
  s = summaryJson();
  return s.c_str();
}
API void ptxsim_summary_reset() {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_totals.clear();
  g_nodes.clear();
  g_nodeCount.clear();
}

// ---- registration ----
API void** __cudaRegisterFatBinary(void* w) {
  struct Wrap {
    int magic, version;
    const void* data;
    void* f;
  };
  std::lock_guard<std::recursive_mutex> l(g_mu);
  auto f = std::make_unique<Fat>();
  auto* W = (Wrap*)w;
  if (W->magic == 0x466243b1)
    parseFat(*f, (const u8*)W->data);
  else
    f->error = "unknown fat binary wrapper";
  g_fats.push_back(std::move(f));
  return (void**)g_fats.back().get();
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void** h, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_kernels[host] = Kernel{(Fat*)h, name, nullptr, "", 49152, false};
}
API void __cudaRegisterVar(void** h, char* host, char*, const char* name, int, size_t, int, int) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_vars[host] = {(Fat*)h, name};
}
API void __cudaRegisterManagedVar(void**, void**, char*, const char* name, int, size_t, int, int) {
  fprintf(stderr, "ptxsim: __managed__ variable %s is not supported\n", name);
}
API void __cudaRegisterHostVar(void**, const char*, char*, size_t) {}
API void __cudaRegisterUnifiedTable(void**, void*) {}
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st* st) {
  t_cfg.push_back({g, b, s, (cudaStream_t)st});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* st) {
  if (t_cfg.empty()) return cudaErrorMissingConfiguration;
  auto& c = t_cfg.back();
  *g = c.g;
  *b = c.b;
  *s = c.s;
  *(cudaStream_t*)st = c.st;
  t_cfg.pop_back();
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t s, cudaStream_t st) {
  return launch((const void*)k, g, b, a, s, dim3(1, 1, 1), st);
}
API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t s, cudaStream_t st) {
  return launch((const void*)k, g, b, a, s, dim3(1, 1, 1), st);
}
API cudaError_t cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t s, cudaStream_t st) {
  return launch(f, g, b, a, s, dim3(1, 1, 1), st);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t s, cudaStream_t st) {
  return launch(f, g, b, a, s, dim3(1, 1, 1), st, "{\"cooperative\":true}");
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  dim3 cl(1, 1, 1);
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cl = dim3(c->attrs[i].val.clusterDim.x, c->attrs[i].val.clusterDim.y, c->attrs[i].val.clusterDim.z);
  return launch(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, cl, c->stream,
                g_cfg.stats ? attrJson(c->attrs, c->numAttrs) : "{}");
}
// ---- errors ----
API cudaError_t cudaGetLastError() {
  cudaError_t e = g_sticky != cudaSuccess ? g_sticky : t_err;
  t_err = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return g_sticky != cudaSuccess ? g_sticky : t_err; }
static const struct {
  cudaError_t e;
  const char *n, *s;
} kErr[] = {{cudaSuccess, "cudaSuccess", "no error"},
            {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
            {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
            {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
            {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
            {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
             "no kernel image is available for execution on the device"},
            {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
            {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
            {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
            {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
            {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
            {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
            {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
            {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
            {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration", "missing configuration"},
            {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"}};
API const char* cudaGetErrorName(cudaError_t e) {
  for (auto& k : kErr)
    if (k.e == e) return k.n;
  return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t e) {
  for (auto& k : kErr)
    if (k.e == e) return k.s;
  return "unknown error";
}
// ---- memory ----
static cudaError_t S() { return E(g_sticky); }
API cudaError_t cudaMalloc(void** p, size_t n) {
  if (g_sticky) return S();
  initWindows();
  *p = n ? devAlloc(n) : nullptr;
  return n && !*p ? E(cudaErrorMemoryAllocation) : cudaSuccess;
}
API cudaError_t cudaFree(void* p) { return devFree(p) ? S() : E(cudaErrorInvalidValue); }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t s) {
  node("malloc", s, strf("\"bytes\":%zu", n));
  return cudaMalloc(p, n);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
  node("free", s, "");
  return cudaFree(p);
}
API cudaError_t cudaMallocHost(void** p, size_t n) {
  *p = devAlloc(n);
  if (*p) {
    markInit((u64)*p, n);
  }
  return *p ? cudaSuccess : E(cudaErrorMemoryAllocation);
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return cudaMallocHost(p, n); }
API cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
API cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) { return cudaMallocHost(p, n); }
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  regHost(p, n);
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  unregHost(p);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  *d = h;
  return cudaSuccess;
}
static void copyNode(size_t n, cudaMemcpyKind k, cudaStream_t st) {
  static const char* nm[] = {"host_to_host", "host_to_device", "device_to_host", "device_to_device", "default"};
  if (n) node("memcpy", st, strf("\"bytes\":%zu,\"kind\":\"%s\"", n, (unsigned)k < 5 ? nm[k] : "?"));
}
static cudaError_t copy(void* d, const void* s, size_t n, int) {
  if (g_sticky) return S();
  if (!n) return cudaSuccess;
  Alloc* a = findAlloc((u64)d);
  if (a && (u64)d + n > a->base + a->size) {
    setReport(strf("cudaMemcpy writes past the end of a device allocation of %llu bytes", (unsigned long long)a->size));
    return E(cudaErrorInvalidValue);
  }
  a = findAlloc((u64)s);
  if (a && (u64)s + n > a->base + a->size) {
    setReport(strf("cudaMemcpy reads past the end of a device allocation of %llu bytes", (unsigned long long)a->size));
    return E(cudaErrorInvalidValue);
  }
  memmove(d, s, n);
  markInit((u64)d, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) {
  copyNode(n, k, nullptr);
  return copy(d, s, n, k);
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) {
  copyNode(n, k, st);
  return copy(d, s, n, k);
}
static cudaError_t fill(void* d, int v, size_t n) {
  if (g_sticky) return S();
  if (!n) return cudaSuccess;
  Alloc* a = findAlloc((u64)d);
  if (a && (u64)d + n > a->base + a->size) {
    setReport("cudaMemset past the end of a device allocation");
    return E(cudaErrorInvalidValue);
  }
  memset(d, v, n);
  markInit((u64)d, n);
  return cudaSuccess;
}
static void fillNode(size_t n, cudaStream_t st) {
  if (n) node("memset", st, strf("\"bytes\":%zu", n));
}
API cudaError_t cudaMemset(void* d, int v, size_t n) {
  fillNode(n, nullptr);
  return fill(d, v, n);
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
  fillNode(n, st);
  return fill(d, v, n);
}
static cudaError_t copy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k,
                          cudaStream_t st) {
  copyNode(w * h, k, st);
  for (size_t i = 0; i < h; ++i) {
    cudaError_t e = copy((char*)d + i * dp, (const char*)s + i * sp, w, k);
    if (e) return e;
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k) {
  return copy2D(d, dp, s, sp, w, h, k, nullptr);
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k,
                                  cudaStream_t st) {
  return copy2D(d, dp, s, sp, w, h, k, st);
}
API cudaError_t cudaMemset2DAsync(void* d, size_t p, int v, size_t w, size_t h, cudaStream_t st) {
  fillNode(w * h, st);
  for (size_t i = 0; i < h; ++i) {
    cudaError_t e = fill((char*)d + i * p, v, w);
    if (e) return e;
  }
  return cudaSuccess;
}
API cudaError_t cudaMemset2D(void* d, size_t p, int v, size_t w, size_t h) {
  return cudaMemset2DAsync(d, p, v, w, h, nullptr);
}
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *t = 141ull << 30;
  *f = 140ull << 30;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  Alloc* x = findAlloc((u64)p);
  a->type = x ? (x->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice) : cudaMemoryTypeUnregistered;
  a->devicePointer = x ? (void*)p : nullptr;
  a->hostPointer = (void*)p;
  return cudaSuccess;
}
static void* symAddr(const void* s, size_t* n) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  auto it = g_vars.find(s);
  if (it == g_vars.end()) return nullptr;
  Module* m = moduleOf(*it->second.first);
  if (!m) {
    setReport(
        strf("no usable device code for symbol %s: %s", it->second.second.c_str(), it->second.first->error.c_str()));
    return nullptr;
  }
  auto v = m->vars.find(it->second.second);
  if (v == m->vars.end()) return nullptr;
  if (n) *n = v->second->size;
  return (void*)v->second->addr;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* s) {
  *p = symAddr(s, nullptr);
  return *p ? cudaSuccess : E(cudaErrorInvalidSymbol);
}
API cudaError_t cudaGetSymbolSize(size_t* n, const void* s) {
  return symAddr(s, n) ? cudaSuccess : E(cudaErrorInvalidSymbol);
}
API cudaError_t cudaMemcpyToSymbolAsync(const void* s, const void* d, size_t n, size_t o, cudaMemcpyKind k,
                                        cudaStream_t st) {
  void* p = symAddr(s, nullptr);
  copyNode(n, k, st);
  return p ? copy((char*)p + o, d, n, k) : E(cudaErrorInvalidSymbol);
}
API cudaError_t cudaMemcpyToSymbol(const void* s, const void* d, size_t n, size_t o, cudaMemcpyKind k) {
  return cudaMemcpyToSymbolAsync(s, d, n, o, k, nullptr);
}
API cudaError_t cudaMemcpyFromSymbolAsync(void* d, const void* s, size_t n, size_t o, cudaMemcpyKind k,
                                          cudaStream_t st) {
  void* p = symAddr(s, nullptr);
  copyNode(n, k, st);
  return p ? copy(d, (char*)p + o, n, k) : E(cudaErrorInvalidSymbol);
}
API cudaError_t cudaMemcpyFromSymbol(void* d, const void* s, size_t n, size_t o, cudaMemcpyKind k) {
  return cudaMemcpyFromSymbolAsync(d, s, n, o, k, nullptr);
}
API cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) {
  return cudaSuccess;
}
// ---- devices ----
API cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : E(cudaErrorInvalidDevice); }
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  node("device_synchronize", nullptr, "");
  return S();
}
API cudaError_t cudaDeviceReset() {
  ptxsim_reset();
  return cudaSuccess;
}
API cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
API cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
API cudaError_t cudaGetDeviceFlags(unsigned* f) {
  *f = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
API cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) {
  *v = 1 << 20;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) {
  if (a) *a = 0;
  if (b) *b = -5;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  bool A = g_cfg.a100;
  int r = 0;
  switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: r = 1024; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: r = 1024; break;
    case cudaDevAttrMaxBlockDimZ: r = 64; break;
    case cudaDevAttrMaxGridDimX: r = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: r = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: r = 49152; break;
    case cudaDevAttrTotalConstantMemory: r = 65536; break;
    case cudaDevAttrWarpSize: r = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: r = 65536; break;
    case cudaDevAttrClockRate: r = A ? 1410000 : 1980000; break;
    case cudaDevAttrMultiProcessorCount: r = A ? 108 : 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: r = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: r = A ? 8 : 9; break;
    case cudaDevAttrComputeCapabilityMinor: r = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: r = A ? 164 * 1024 : 228 * 1024; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: r = 65536; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: r = g_maxSmem(); break;
    case cudaDevAttrL2CacheSize: r = A ? 40 << 20 : 50 << 20; break;
    case cudaDevAttrMemoryClockRate: r = A ? 1215000 : 3201000; break;
    case cudaDevAttrGlobalMemoryBusWidth: r = A ? 5120 : 6144; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrAsyncEngineCount: r = 1; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: r = 1024; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: r = 32; break;
    case cudaDevAttrClusterLaunch: r = !A; break;
    case cudaDevAttrMaxPersistingL2CacheSize: r = 32 << 20; break;
    case cudaDevAttrMaxAccessPolicyWindowSize: r = 128 << 20; break;
    default: r = 0;
  }
  *v = r;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  bool A = g_cfg.a100;
  snprintf(p->name, sizeof p->name, "ptxsim (%s)", A ? "A100" : "H200");
  p->totalGlobalMem = 141ull << 30;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = A ? 8 : 9;
  p->minor = 0;
  p->multiProcessorCount = A ? 108 : 132;
  p->l2CacheSize = A ? 40 << 20 : 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = A ? 164 * 1024 : 228 * 1024;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = (size_t)g_maxSmem();
  p->reservedSharedMemPerBlock = 1024;
  p->maxBlocksPerMultiProcessor = 32;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->cooperativeLaunch = 1;
  p->clusterLaunch = !A;
  p->memoryBusWidth = A ? 5120 : 6144;
  return cudaSuccess;
}
// ---- functions and occupancy ----
static Kernel* kern(const void* f) {
  auto it = g_kernels.find(f);
  return it == g_kernels.end() ? nullptr : &it->second;
}
API cudaError_t cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int v) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  Kernel* k = kern(f);
  if (!k) return E(cudaErrorInvalidDeviceFunction);
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (v > g_maxSmem()) return E(cudaErrorInvalidValue);
    k->maxDyn = std::max(v, 0);
    k->optedIn = true;
  }
  return cudaSuccess;
}
API cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* f) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  Kernel* k = kern(f);
  if (!k) return E(cudaErrorInvalidDeviceFunction);
  Program* P = programOf(*k);
  if (!P) {
    setReport(k->error);
    return E(cudaErrorNoKernelImageForDevice);
  }
  memset(a, 0, sizeof *a);
  a->sharedSizeBytes = P->staticSmem;
  a->localSizeBytes = P->localBytes;
  int mt = P->fn->maxntid[0] * P->fn->maxntid[1] * P->fn->maxntid[2];
  a->maxThreadsPerBlock = mt ? mt : 1024;
  a->numRegs = mt ? std::min(255, 65536 / mt / 8 * 8) : 64;
  a->ptxVersion = a->binaryVersion = g_cfg.a100 ? 80 : 90;
  a->maxDynamicSharedSizeBytes = k->maxDyn;
  return cudaSuccess;
}
static int blocksPerSm(Kernel* k, int threads, size_t dyn) {
  Program* P = programOf(*k);
  size_t s = dyn + (P ? P->staticSmem : 0) + 1024;
  int r =
      std::min({2048 / std::max(32, (threads + 31) / 32 * 32), 32, (int)((size_t)(g_cfg.a100 ? 164 : 228) * 1024 / s)});
  return std::max(r, 0);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int t, size_t d) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  Kernel* k = kern(f);
  if (!k) return E(cudaErrorInvalidDeviceFunction);
  *n = blocksPerSm(k, t, d);
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int t, size_t d,
                                                                       unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, t, d);
}
API cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t* d, const void*, int n, int) {
  *d = (size_t)g_maxSmem() / (size_t)std::max(1, n);
  return cudaSuccess;
}
static unsigned clusterSize(const cudaLaunchConfig_t* c) {
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
      return c->attrs[i].val.clusterDim.x * c->attrs[i].val.clusterDim.y * c->attrs[i].val.clusterDim.z;
  return 1;
}
API cudaError_t cudaOccupancyMaxActiveClusters(int* n, const void* f, const cudaLaunchConfig_t* c) {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  Kernel* k = kern(f);
  if (!k) return E(cudaErrorInvalidDeviceFunction);
  *n = blocksPerSm(k, (int)(c->blockDim.x * c->blockDim.y * c->blockDim.z), c->dynamicSmemBytes) *
       (g_cfg.a100 ? 108 : 132) / (int)clusterSize(c);
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxPotentialClusterSize(int* n, const void*, const cudaLaunchConfig_t*) {
  *n = 8;
  return cudaSuccess;
}
// ---- streams and events ----
static long g_handle = 0x1000;
#define NEWH(T, p) *(p) = (T)(++g_handle * 16)
API cudaError_t cudaStreamCreate(cudaStream_t* s) {
  NEWH(cudaStream_t, s);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  NEWH(cudaStream_t, s);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  NEWH(cudaStream_t, s);
  return cudaSuccess;
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  node("stream_synchronize", s, "");
  return S();
}
API cudaError_t cudaStreamQuery(cudaStream_t) { return S(); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t, unsigned) {
  node("event_wait", s, "");
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* f) {
  *f = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaStreamAttrID, const cudaStreamAttrValue*) {
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* u) {
  node("host_function", s, "");
  f(u);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  f(s, g_sticky, u);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = (cudaEvent_t) new Event{std::chrono::steady_clock::now()};
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  node("event_record", s, "");
  ((Event*)e)->t = std::chrono::steady_clock::now();
  return S();
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  node("event_synchronize", nullptr, "");
  return S();
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return S(); }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::chrono::duration<float, std::milli>(((Event*)b)->t - ((Event*)a)->t).count();
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
// ---- driver entry points ----
API CUresult ptxsim_cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType dt, cuuint32_t rank, void* base,
                                           const cuuint64_t* gd, const cuuint64_t* gs, const cuuint32_t* box,
                                           const cuuint32_t* es, CUtensorMapInterleave il, CUtensorMapSwizzle sw,
                                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  auto bad = [&](const std::string& s) {
    setReport("cuTensorMapEncodeTiled: " + s);
    return CUDA_ERROR_INVALID_VALUE;
  };
  static const u8 esz[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if ((int)dt > 12) return bad(strf("data type %d is not supported", (int)dt));
  if (rank < 1 || rank > 5) return bad("rank");
  if ((u64)base & 15) return bad("the global address is not 16-byte aligned");
  if (il != CU_TENSOR_MAP_INTERLEAVE_NONE) return bad("interleaved layouts are not supported");
  if ((int)sw > 3) return bad(strf("swizzle mode %d is not supported", (int)sw));
  TMap t = {};
  t.magic = kTMapMagic;
  t.dtype = (u8)dt;
  t.rank = (u8)rank;
  t.swizzle = (u8)sw;
  t.oobNan = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  t.esize = esz[dt];
  t.base = (u64)base;
  for (u32 i = 0; i < rank; ++i) {
    if (gd[i] == 0 || gd[i] > (1ull << 32)) return bad(strf("dimension %u is %llu", i, (unsigned long long)gd[i]));
    if (box[i] == 0 || box[i] > 256) return bad(strf("box dimension %u is %u (1 to 256)", i, box[i]));
    if (es[i] != 1) return bad("element strides other than 1 are not supported");
    t.dim[i] = (u32)std::min<u64>(gd[i], 0xffffffffu);
    t.box[i] = (u16)box[i];
    t.estride[i] = (u8)es[i];
    if (i) {
      if (gs[i - 1] % 16 || gs[i - 1] >= (1ull << 40))
        return bad(strf("stride %u is %llu bytes (a multiple of 16 is required)", i, (unsigned long long)gs[i - 1]));
      t.stride[i - 1] = gs[i - 1];
    }
  }
  u32 inner = box[0] * t.esize;
  if (inner % 16) return bad(strf("inner box is %u bytes (a multiple of 16 is required)", inner));
  static const u32 span[] = {1u << 30, 32, 64, 128};
  if (inner > span[sw]) return bad(strf("inner box of %u bytes exceeds the swizzle span", inner));
  memset(m, 0, sizeof *m);
  memcpy(m, &t, sizeof t);
  return CUDA_SUCCESS;
}
API CUresult ptxsim_cuTensorMapReplaceAddress(CUtensorMap* m, void* a) {
  TMap t;
  memcpy(&t, m, sizeof t);
  t.base = (u64)a;
  memcpy(m, &t, sizeof t);
  return CUDA_SUCCESS;
}
API CUresult ptxsim_cuGetErrorString(CUresult r, const char** s) {
  *s = r == CUDA_SUCCESS ? "no error" : "error";
  return CUDA_SUCCESS;
}
static void* entry(const char* s) {
  std::string n = s;
  if (n == "cuTensorMapEncodeTiled") return (void*)ptxsim_cuTensorMapEncodeTiled;
  if (n == "cuTensorMapReplaceAddress") return (void*)ptxsim_cuTensorMapReplaceAddress;
  if (n == "cuGetErrorString" || n == "cuGetErrorName") return (void*)ptxsim_cuGetErrorString;
  fprintf(stderr, "ptxsim: driver entry point %s is not available\n", s);
  return nullptr;
}
API cudaError_t cudaGetDriverEntryPoint(const char* s, void** p, unsigned long long,
                                        cudaDriverEntryPointQueryResult* q) {
  *p = entry(s);
  if (q) *q = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *p ? cudaSuccess : E(cudaErrorNotSupported);
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* s, void** p, unsigned, unsigned long long f,
                                                 cudaDriverEntryPointQueryResult* q) {
  return cudaGetDriverEntryPoint(s, p, f, q);
}

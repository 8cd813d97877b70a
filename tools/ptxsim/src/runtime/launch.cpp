// Launches, with their attributes.
#include "runtime/state.h"

namespace ptxsim {

static u64 g_launches = 0;

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
  auto held = std::make_shared<std::vector<std::vector<u8>>>();
  for (size_t i = 0; i < P->paramOff.size(); ++i)
    held->emplace_back((const u8*)args[i], (const u8*)args[i] + P->paramSize[i]);
  auto again = [=](cudaStream_t on) {
    std::vector<void*> own;
    for (auto& value : *held) own.push_back(value.data());
    return launch(func, g, b, own.data(), smem, cl, on, attrs);
  };
  cudaError_t e;
  if (capture(stream, again, &e)) return e;
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
  return launch(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, cl, c->stream, attrJson(c->attrs, c->numAttrs));
}

}  // namespace ptxsim

// Attributes and occupancy of kernels.
#include "runtime/state.h"

namespace ptxsim {

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

}  // namespace ptxsim

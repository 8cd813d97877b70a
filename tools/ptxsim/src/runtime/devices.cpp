// The device and its properties.
#include "runtime/state.h"

namespace ptxsim {

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
  if (cudaError_t e = uncapturable("cudaDeviceSynchronize", true)) return e;
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

}  // namespace ptxsim

// Memory: allocations, copies, fills, symbols.
#include "runtime/state.h"

namespace ptxsim {

API cudaError_t cudaMalloc(void** p, size_t n) {
  if (cudaError_t e = uncapturable("cudaMalloc", false)) return e;
  if (g_sticky) return S();
  initWindows();
  *p = n ? devAlloc(n) : nullptr;
  return n && !*p ? E(cudaErrorMemoryAllocation) : cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  if (cudaError_t e = uncapturable("cudaFree", false)) return e;
  return devFree(p) ? S() : E(cudaErrorInvalidValue);
}
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
  if (cudaError_t e = uncapturable("cudaMemcpy", true)) return e;
  copyNode(n, k, nullptr);
  return copy(d, s, n, k);
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) {
  cudaError_t e;
  if (capture(st, [=](cudaStream_t on) { return cudaMemcpyAsync(d, s, n, k, on); }, &e)) return e;
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
  cudaError_t e;
  if (capture(st, [=](cudaStream_t on) { return cudaMemsetAsync(d, v, n, on); }, &e)) return e;
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

}  // namespace ptxsim

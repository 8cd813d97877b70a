// Device memory: every allocation lies between inaccessible guard pages and ends at a page boundary
// (rounded to 256 bytes), so that most out-of-bounds accesses fault even without PTXSIM_CHECK.
#include "machine/machine.h"
#include <atomic>
#include <map>
#include <shared_mutex>
#include <sys/mman.h>

namespace ptxsim {
static std::shared_mutex g_allocsMutex;
static std::map<u64, Alloc> g_allocs;  // by base
static std::atomic<u64> g_gen{1};
u64 allocGen() { return g_gen; }

void* devAlloc(size_t bytes) {
  size_t sz = std::max<size_t>(bytes, 1), body = (sz + 255) / 256 * 256, pages = (body + 4095) / 4096 * 4096,
         guard = 16u << 20;
  u8* m = (u8*)mmap(nullptr, pages + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return nullptr;
  if (mprotect(m + guard, pages, PROT_READ | PROT_WRITE)) {
    munmap(m, pages + 2 * guard);
    return nullptr;
  }
  u8* p = m + guard + (pages - body);
  if (pages <= (64u << 20)) memset(m + guard, 0xcd, pages);
  Alloc a{(u64)p, bytes, m, pages + 2 * guard, false, {}, g_cfg.ckUninit};
  if (g_cfg.ckUninit) a.init.assign(bytes, 0);
  std::unique_lock<std::shared_mutex> l(g_allocsMutex);
  g_allocs[(u64)p] = std::move(a);
  ++g_gen;
  return p;
}
bool devFree(void* p) {
  if (!p) return true;
  std::unique_lock<std::shared_mutex> l(g_allocsMutex);
  auto it = g_allocs.find((u64)p);
  if (it == g_allocs.end() || it->second.host) return false;
  munmap(it->second.map, it->second.mapBytes);
  g_allocs.erase(it);
  ++g_gen;
  return true;
}
void regHost(void* p, size_t bytes) {
  std::unique_lock<std::shared_mutex> l(g_allocsMutex);
  g_allocs[(u64)p] = Alloc{(u64)p, bytes, nullptr, 0, true, {}, false};
  ++g_gen;
}
void unregHost(void* p) {
  std::unique_lock<std::shared_mutex> l(g_allocsMutex);
  auto it = g_allocs.find((u64)p);
  if (it != g_allocs.end() && it->second.host) {
    g_allocs.erase(it);
    ++g_gen;
  }
}
static Alloc* lookup(u64 addr) {
  auto it = g_allocs.upper_bound(addr);
  if (it == g_allocs.begin()) return nullptr;
  --it;
  return addr - it->second.base < std::max<u64>(it->second.size, 1) ? &it->second : nullptr;
}
Alloc* findAlloc(u64 addr) {
  std::shared_lock<std::shared_mutex> l(g_allocsMutex);
  return lookup(addr);
}
void markInit(u64 addr, u64 bytes) {
  if (!g_cfg.ckUninit) return;
  Alloc* a = findAlloc(addr);
  if (!a || a->init.empty()) return;
  u64 o = addr - a->base;
  memset(&a->init[o], 1, std::min(bytes, a->size - o));
}
std::string describeAddr(u64 addr) {
  std::shared_lock<std::shared_mutex> l(g_allocsMutex);
  if (g_allocs.empty()) return "no device allocations exist";
  auto it = g_allocs.upper_bound(addr);
  if (it != g_allocs.begin()) {
    auto p = std::prev(it);
    u64 o = addr - p->second.base;
    if (o < p->second.size)
      return strf("inside the allocation of %llu bytes at 0x%llx", (unsigned long long)p->second.size,
                  (unsigned long long)p->second.base);
    if (o - p->second.size < (1 << 20))
      return strf("%llu bytes past the end of the allocation of %llu bytes at 0x%llx",
                  (unsigned long long)(o - p->second.size), (unsigned long long)p->second.size,
                  (unsigned long long)p->second.base);
  }
  if (it != g_allocs.end() && it->second.base - addr < (1 << 20))
    return strf("%llu bytes before the allocation of %llu bytes at 0x%llx",
                (unsigned long long)(it->second.base - addr), (unsigned long long)it->second.size,
                (unsigned long long)it->second.base);
  return "not near any device allocation";
}
void checkGlobal(Warp& w, u64 addr, u32 bytes, bool write, int lane) {
  static thread_local Alloc* last = nullptr;
  static thread_local u64 gen = 0;
  if (gen != g_gen || !last || addr - last->base >= last->size) {
    last = findAlloc(addr);
    gen = g_gen;
  }
  if (!last || addr + bytes - last->base > last->size) {
    last = nullptr;
    if ((u64)w.prog->params <= addr && addr + bytes <= (u64)w.prog->params + w.prog->paramBytes) return;
    simFail(w, 700, "out of bounds: lane %d %s %u bytes at 0x%llx (%s)", lane, write ? "writes" : "reads", bytes,
            (unsigned long long)addr, describeAddr(addr).c_str());
  }
  if (!last->init.empty()) {
    u8* in = &last->init[addr - last->base];
    if (write)
      memset(in, 1, bytes);
    else
      for (u32 i = 0; i < bytes; ++i)
        if (!in[i]) {
          w.taintNext = true;
          w.taintWhat = strf("global memory (byte %llu of the allocation of %llu bytes)",
                             (unsigned long long)(addr + i - last->base), (unsigned long long)last->size);
          w.taintPc = w.pc ? w.pc - 1 : 0;
          break;
        }
  }
}
}  // namespace ptxsim

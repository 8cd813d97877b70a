// Fat binaries: the PTX in them, its modules and kernels; registration.
#include "runtime/state.h"
#include <sys/mman.h>

namespace ptxsim {

std::recursive_mutex g_mu;
std::vector<std::unique_ptr<Fat>> g_fats;
std::map<const void*, Kernel> g_kernels;
std::map<const void*, std::pair<Fat*, std::string>> g_vars;

void initWindows() {
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
void parseFat(Fat& f, const u8* p) {
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
Module* moduleOf(Fat& f) {
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
Program* programOf(Kernel& k) {
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

}  // namespace ptxsim

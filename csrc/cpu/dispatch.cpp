// Which instruction set runs: the best one that the machine has, that PYQUANT_CPU_ISA allows and that passed its
// self-test.
#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace pyquant::cpu {
namespace {

constexpr std::array<Isa, 4> kBestFirst{Isa::amx_int8, Isa::avx512_vnni, Isa::avx2, Isa::scalar};

#if defined(__x86_64__)
bool has_amx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  // Linux grants the 8 KiB of tile state to a process that asks once.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// What was found at first use.
struct Choice {
  std::array<bool, 4> available{}, tested{}, passed{};
  Isa cap = Isa::amx_int8, chosen = Isa::scalar;
};

Isa cap_from_environment() {
  const char* text = std::getenv("PYQUANT_CPU_ISA");
  if (!text || !*text) return Isa::amx_int8;
  for (Isa isa : kBestFirst)
    if (std::string(text) == name_of(isa)) return isa;
  throw std::invalid_argument(std::string("argument 'PYQUANT_CPU_ISA': got '") + text +
                              "'; allowed: scalar, avx2, avx512_vnni, amx_int8");
}

Choice choose() {
  Choice c;
  c.cap = cap_from_environment();
  bool found = false;
  for (Isa isa : kBestFirst) {
    const auto i = static_cast<size_t>(isa);
    c.available[i] = machine_has(isa);
    if (found || !c.available[i] || isa > c.cap) continue;
    c.tested[i] = true;
    c.passed[i] = isa == Isa::scalar || self_test(*kernels_of(isa));
    if (!c.passed[i]) continue;
    c.chosen = isa;
    found = true;
  }
  return c;
}

const Choice& choice() {
  static const Choice c = choose();
  return c;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels* kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx_int8: return &kernels_amx_int8();
    case Isa::avx512_vnni: return &kernels_avx512_vnni();
    case Isa::avx2: return &kernels_avx2();
#else
    case Isa::amx_int8:
    case Isa::avx512_vnni:
    case Isa::avx2: return nullptr;
#endif
    case Isa::scalar: return &kernels_scalar();
  }
  return nullptr;
}

// __builtin_cpu_supports reads cpuid and, through xgetbv, whether the system saves the registers.
bool machine_has(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vnni");
  switch (isa) {
    case Isa::amx_int8: return vnni && has_amx();
    case Isa::avx512_vnni: return vnni;
    case Isa::avx2: return avx2;
    case Isa::scalar: return true;
  }
#endif
  return isa == Isa::scalar;
}

const Kernels& kernels() {
  const Kernels* k = in_use.load(std::memory_order_acquire);
  if (k) return *k;
  k = kernels_of(choice().chosen);
  in_use.store(k, std::memory_order_release);
  return *k;
}

bool use_isa(Isa isa) {
  if (!machine_has(isa)) return false;
  in_use.store(kernels_of(isa), std::memory_order_release);
  return true;
}

Isa isa() { return kernels().isa; }

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::amx_int8: return "amx_int8";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::avx2: return "avx2";
    case Isa::scalar: return "scalar";
  }
  return "unknown";
}

std::string isa_report() {
  const Choice& c = choice();
  const Isa used = isa();
  std::string text;
  for (Isa isa : kBestFirst) {
    const auto i = static_cast<size_t>(isa);
    text += std::string(name_of(isa)) + ": " + (c.available[i] ? "available" : "not available");
    if (c.available[i] && isa > c.cap) text += ", above PYQUANT_CPU_ISA=" + std::string(name_of(c.cap));
    if (c.tested[i])
      text += isa == Isa::scalar ? ", the reference" : c.passed[i] ? ", self-test passed" : ", self-test FAILED";
    else if (c.available[i] && isa <= c.cap)
      text += ", self-test not needed";
    if (isa == used) text += ", in use";
    text += "\n";
  }
  return text;
}

}  // namespace pyquant::cpu

// Which instruction set runs: the best one that the machine has, that PYQUANT_CPU_ISA allows and that passed its
// self-test.
#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "core/float_state.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace pyquant::cpu {
namespace {

constexpr Isa kBest = static_cast<Isa>(kIsas - 1);

// Best first.
template <class Body>
void each_isa(Body body) {
  for (int32_t i = kIsas - 1; i >= 0; --i) body(static_cast<Isa>(i));
}

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
  // Linux grants the 8 KiB of tile state to a process that requests it once.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#else
  return false;
#endif
}
#endif

// Result of the probe at first use.
struct Choice {
  std::array<bool, kIsas> available{}, tested{}, passed{};
  Isa cap = kBest, chosen = Isa::scalar;
};

Isa cap_from_environment() {
  const char* text = std::getenv("PYQUANT_CPU_ISA");
  if (!text || !*text) return kBest;
  std::string allowed;
  for (int32_t i = 0; i < kIsas; ++i) {
    const char* name = name_of(static_cast<Isa>(i));
    if (std::string(text) == name) return static_cast<Isa>(i);
    allowed += std::string(i ? ", " : "") + name;
  }
  throw std::invalid_argument(std::string("argument 'PYQUANT_CPU_ISA': got '") + text + "'; allowed: " + allowed);
}

Choice choose() {
  const DefaultFloats floats;  // the verdict is for good, whoever asks first
  Choice c;
  c.cap = cap_from_environment();
  bool found = false;
  each_isa([&](Isa isa) {
    const auto i = static_cast<size_t>(isa);
    c.available[i] = machine_has(isa);
    if (found || !c.available[i] || isa > c.cap) return;
    c.tested[i] = true;
    c.passed[i] = isa == Isa::scalar || self_test(kernels_of(isa));
    if (!c.passed[i]) return;
    c.chosen = isa;
    found = true;
  });
  return c;
}

const Choice& choice() {
  static const Choice c = choose();
  return c;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#define PYQ_CASE(name, condition) \
  case Isa::name: return kernels_##name();
    PYQUANT_CPU_ISAS(PYQ_CASE)
#undef PYQ_CASE
  }
  return kernels_scalar();
}

bool machine_has(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  switch (isa) {
#define PYQ_CASE(name, condition) \
  case Isa::name: return condition;
    PYQUANT_CPU_ISAS(PYQ_CASE)
#undef PYQ_CASE
  }
  return false;
}

const Kernels& kernels() {
  const Kernels* k = in_use.load(std::memory_order_acquire);
  if (k) return *k;
  k = &kernels_of(choice().chosen);
  in_use.store(k, std::memory_order_release);
  return *k;
}

bool use_isa(Isa isa) {
  if (!machine_has(isa)) return false;
  in_use.store(&kernels_of(isa), std::memory_order_release);
  return true;
}

Isa isa() { return kernels().isa; }

const char* name_of(Isa isa) {
  switch (isa) {
#define PYQ_CASE(name, condition) \
  case Isa::name: return #name;
    PYQUANT_CPU_ISAS(PYQ_CASE)
#undef PYQ_CASE
  }
  return "unknown";
}

std::string isa_report() {
  const Choice& c = choice();
  const Isa used = isa();
  std::string text;
  each_isa([&](Isa isa) {
    const auto i = static_cast<size_t>(isa);
    text += std::string(name_of(isa)) + ": " + (c.available[i] ? "available" : "not available");
    if (c.available[i] && isa > c.cap) text += ", above PYQUANT_CPU_ISA=" + std::string(name_of(c.cap));
    if (c.tested[i])
      text += isa == Isa::scalar ? ", the reference" : c.passed[i] ? ", self-test passed" : ", self-test FAILED";
    else if (c.available[i] && isa <= c.cap)
      text += ", self-test not needed";
    if (isa == used) text += ", in use";
    text += "\n";
  });
  return text;
}

}  // namespace pyquant::cpu

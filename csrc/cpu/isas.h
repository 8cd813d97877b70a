// The instruction sets, each better than the one above it: isa_<name>.cpp and a line here with what a machine must
// have. The head of that file says for which processors it is compiled, and with which flags (sources.cmake reads it).
#pragma once
#include <cstdint>

// clang-format off
#if defined(__x86_64__)
// __builtin_cpu_supports reads cpuid and, through xgetbv, whether the system saves the registers.
#define PYQ_CPU_HAS(feature) (__builtin_cpu_supports(feature) != 0)
#define PYQ_CPU_HAS_AVX2 (PYQ_CPU_HAS("avx2") && PYQ_CPU_HAS("fma") && PYQ_CPU_HAS("f16c"))
#define PYQ_CPU_HAS_VNNI (PYQ_CPU_HAS_AVX2 && PYQ_CPU_HAS("avx512f") && PYQ_CPU_HAS("avx512bw") && \
                          PYQ_CPU_HAS("avx512vl") && PYQ_CPU_HAS("avx512dq") && PYQ_CPU_HAS("avx512vnni"))
#define PYQ_CPU_HAS_BF16 (PYQ_CPU_HAS_VNNI && PYQ_CPU_HAS("avx512bf16"))
#define PYQUANT_CPU_ISAS(X)         \
  X(scalar, true)                   \
  X(avx2, PYQ_CPU_HAS_AVX2)         \
  X(avx512_vnni, PYQ_CPU_HAS_VNNI)  \
  X(avx512_bf16, PYQ_CPU_HAS_BF16)  \
  X(amx_int8, PYQ_CPU_HAS_BF16 && has_amx())
#elif defined(__aarch64__)
#define PYQUANT_CPU_ISAS(X) \
  X(scalar, true)           \
  X(neon_dotprod, has_dotprod())
#else
#define PYQUANT_CPU_ISAS(X) \
  X(scalar, true)
#endif
// clang-format on

namespace pyquant::cpu {

#define PYQ_NAME(name, condition) name,
enum class Isa : int32_t { PYQUANT_CPU_ISAS(PYQ_NAME) };
#undef PYQ_NAME
#define PYQ_COUNT(name, condition) +1
constexpr int32_t kIsas = 0 PYQUANT_CPU_ISAS(PYQ_COUNT);
#undef PYQ_COUNT

}  // namespace pyquant::cpu

// The floating-point state in which the bits of docs/numerics.md hold: to the nearest, subnormal numbers kept, no
// traps. A caller may have another one (fesetround, feenableexcept, torch.set_flush_denormal), and the threads of a
// pool the one that they began with, so that results would depend on who computed them.
#pragma once
#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyquant {

// For as long as it lives, on the thread that made it.
class DefaultFloats {
 public:
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

#if defined(__x86_64__)
  DefaultFloats() : before_(_mm_getcsr()) {
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloats() {
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlags = 0x3f, kDefault = 0x1f80;  // what has happened; all exceptions masked
  const unsigned before_;
#elif defined(__aarch64__)
  DefaultFloats() : before_(state()) {
    if (before_ != kDefault) set(kDefault);
  }
  ~DefaultFloats() {
    if (before_ != kDefault) set(before_);
  }

 private:
  static uint64_t state() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void set(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
  static constexpr uint64_t kDefault = 0;  // rounding, flushing, traps, one NaN for all: FPCR has nothing else
  const uint64_t before_;
#else
  DefaultFloats() : before_(std::fegetround()) {
    if (before_ != FE_TONEAREST) std::fesetround(FE_TONEAREST);
  }
  ~DefaultFloats() {
    if (before_ != FE_TONEAREST) std::fesetround(before_);
  }

 private:
  const int before_;
#endif
};

}  // namespace pyquant

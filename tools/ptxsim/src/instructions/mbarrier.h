// The state of an mbarrier: 64 bits in shared memory.
#pragma once
#include "translate/translator.h"

namespace ptxsim {

// 64-bit state: pending[0..19] expected[20..39] tx[40..60] (signed) phase[61] valid[62]
inline u32 mbPend(u64 s) { return (u32)(s & 0xfffff); }
inline u32 mbExp(u64 s) { return (u32)(s >> 20 & 0xfffff); }
inline s32 mbTx(u64 s) { return (s32)((s64)(s << 3) >> 43); }
inline u32 mbPhase(u64 s) { return (u32)(s >> 61 & 1); }
inline u64 mbMake(u32 p, u32 e, s32 tx, u32 ph) {
  return (u64)(p & 0xfffff) | (u64)(e & 0xfffff) << 20 | ((u64)tx & 0x1fffff) << 40 | (u64)ph << 61 | 1ull << 62;
}

u64* mbPtr(Warp& w, u32 addr, const char* what);
void mbArrive(Warp& w, u32 addr, u32 count, s32 expectTx, bool drop, u64* stateOut);

}  // namespace ptxsim

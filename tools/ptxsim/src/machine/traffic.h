// Counters of memory accesses: sectors, wavefronts, bytes.
#pragma once
#include "machine/warp.h"

namespace ptxsim {

void statShared(Warp& w, const u32* addr, u32 mask, u32 bytes, bool write);
enum GlobalUse { GU_LOAD, GU_STORE, GU_ASYNC };
void statGlobal(Warp& w, const u64* addr, u32 mask, u32 bytes, GlobalUse use);

}  // namespace ptxsim

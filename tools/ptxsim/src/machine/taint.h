// Values that come from never-written memory, followed through registers (PTXSIM_CHECK=uninit).
#pragma once
#include "machine/warp.h"

namespace ptxsim {

u32 taintPre(Warp& w, u32 pc, u32 m);
void taintPost(Warp& w, u32 pc, u32 m, u32 tm);
void setTaint(Warp& w, s32 slot, u32 lanes, u32 m);
inline u32 getTaint(const Warp& w, s32 slot) { return slot >= 0 && !w.taint.empty() ? w.taint[(size_t)slot / 32] : 0; }
void taintReport(Warp& w, u32 pc, u32 lanes, const char* use);

}  // namespace ptxsim

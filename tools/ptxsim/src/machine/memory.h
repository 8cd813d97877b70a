// From the addresses of a warp to bytes, with the checks of an access.
#pragma once
#include "machine/config.h"
#include "machine/race.h"
#include "machine/reports.h"
#include "machine/warp.h"

namespace ptxsim {

u8* smemPtr(Warp& w, u32 addr, u32 bytes, const char* what);
u8* resolve(Warp& w, int lane, Space sp, u64 addr, u32 bytes, bool write);
CTA* ctaOfSmem(Warp& w, u32 addr);
void checkGlobal(Warp& w, u64 addr, u32 bytes, bool write, int lane);
void markShared(CTA& c, u32 off, u32 bytes);

[[noreturn]] void misaligned(Warp& w, int lane, u64 a, u32 n);
// what: the reader in words, for a report at once; null: a load, whose value is reported when it is used.
void readShared(Warp& w, CTA& c, u32 off, u32 bytes, u32 pc, const char* what);

inline void noteShared(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc) {
  if (!g_cfg.check) return;
  if (write)
    markShared(c, off, bytes);
  else
    readShared(w, c, off, bytes, pc, nullptr);
  if (w.cl->race) raceAccess(w, c, off, bytes, write, pc);
}

}  // namespace ptxsim

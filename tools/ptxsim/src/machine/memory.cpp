// Addresses of the state spaces, their bounds, and what was written before.
#include "machine/machine.h"

namespace ptxsim {

u64 g_sharedWin, g_localWin;

CTA* ctaOfSmem(Warp& w, u32 addr) {
  u32 r = addr >> 24;
  if (r == 0) return w.cta;
  if (r - 1 >= w.cl->ctas.size())
    simFail(w, 700, "shared::cluster address 0x%x names CTA rank %u of a cluster of %zu", addr, r - 1,
            w.cl->ctas.size());
  return w.cl->ctas[r - 1];
}
u8* smemPtr(Warp& w, u32 addr, u32 bytes, const char* what) {
  CTA* c = ctaOfSmem(w, addr);
  u32 off = addr & 0xffffff;
  if (off < kSmemBase || off + bytes > c->smemSize)
    simFail(w, 700,
            "%s: shared memory access out of bounds: offset %d (%u bytes), CTA has %u bytes (static %u + dynamic %u)",
            what, (int)off - (int)kSmemBase, bytes, c->smemSize - kSmemBase, w.prog->staticSmem, c->L->dynSmem);
  return c->smem + off;
}
void markShared(CTA& c, u32 off, u32 bytes) {
  if (!c.init.empty()) memset(&c.init[off], 1, bytes);
}
void readShared(Warp& w, CTA& c, u32 off, u32 bytes, u32 pc, const char* what) {
  if (c.init.empty()) return;
  for (u32 i = 0; i < bytes; ++i)
    if (!c.init[off + i]) {
      if (!what) {
        w.taintNext = true;
        w.taintWhat = strf("shared memory (offset %u)", off - kSmemBase);
        w.taintPc = pc;
        return;
      }  // a register load: reported when the value is used
      memset(&c.init[off], 1, bytes);  // one report per place
      report(w, pc, "uninitialised",
             strf("%s reads shared memory that was never written: offset %u (%u bytes)", what, off - kSmemBase, bytes));
      return;
    }
}

u8* resolve(Warp& w, int lane, Space sp, u64 addr, u32 bytes, bool write) {
  switch (sp) {
    case Space::GENERIC:
    case Space::PARAM:
      if (addr - g_sharedWin < kWin) {
        addr -= g_sharedWin;
        goto shared;
      }
      if (addr - g_localWin < kWin) {
        addr -= g_localWin;
        goto local;
      }
      [[fallthrough]];
    case Space::GLOBAL:
    case Space::CONST:
      if (g_cfg.ckOob)
        checkGlobal(w, addr, bytes, write, lane);
      else if (addr < 4096)
        simFail(w, 700, "lane %d: %s of address 0x%llx (null pointer?)", lane, write ? "store" : "load",
                (unsigned long long)addr);
      return (u8*)addr;
    case Space::SHARED:
    case Space::SHARED_CLUSTER:
    shared:
      {
        u8* p = smemPtr(w, (u32)addr, bytes, write ? "store" : "load");
        if (g_cfg.check) {
          CTA* c = ctaOfSmem(w, (u32)addr);
          noteShared(w, *c, (u32)addr & 0xffffff, bytes, write, w.pc - 1);
        }
        return p;
      }
    case Space::LOCAL:
    local:
      if (addr + bytes > w.localBytes)
        simFail(w, 700, "lane %d: local memory access out of bounds: offset %lld of %u bytes", lane, (long long)addr,
                w.localBytes);
      return w.local + (size_t)lane * w.localBytes + addr;
    default: simFail(w, 719, "bad state space");
  }
}

[[noreturn]] void misaligned(Warp& w, int lane, u64 a, u32 n) {
  simFail(w, 716, "lane %d: misaligned address 0x%llx for a %u-byte access", lane, (unsigned long long)a, n);
}

}  // namespace ptxsim

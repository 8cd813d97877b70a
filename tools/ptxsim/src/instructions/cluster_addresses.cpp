// Addresses in the shared memory of another CTA.
#include "instructions/memory_operands.h"

namespace ptxsim {

OP(mapa) {
  bool sh = t.has("shared::cluster");
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u64 x = I.t ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
      u32 r = srcw(w, I.b)[i];
      u64 base = I.fl ? 0 : g_sharedWin;
      if (r >= w.cl->ctas.size()) simFail(w, 719, "mapa: CTA rank %u outside the cluster of %zu", r, w.cl->ctas.size());
      u64 o = base + ((u64)(r + 1) << 24 | ((x - base) & 0xffffff));
      if (I.t)
        dst<u64>(w, I.d)[i] = o;
      else
        w.regs[I.d + i] = (u32)o;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.d = d;
  I.t = tyBits(ty) == 64;
  I.fl = sh;
}
OP(getctarank) {
  bool sh = t.has("shared::cluster");
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u64 x = I.t ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
      u32 o = (u32)(x - (I.fl ? 0 : g_sharedWin));
      w.regs[I.d + i] = o >> 24 ? (o >> 24) - 1 : w.cta->rank;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.t = tyBits(ty) == 64;
  I.fl = sh;
}

}  // namespace ptxsim

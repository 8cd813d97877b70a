// Tensor maps changed on the device.
#include "machine/tensor_map.h"
#include "instructions/memory_operands.h"

namespace ptxsim {

OP(tensormap) {  // tensormap.replace.tile.field.space.b1024.type [addr], {ord,} value ; tensormap.cp_fenceproxy ...
  if (t.has("cp_fenceproxy")) {
    for (auto& u : t.used) u = 1;
    s32 ds;
    s64 dof;
    bool d8;
    bulkAddr(t, t.op(0), ds, dof, d8);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      if (!converge(w, m, w.live)) return;
      int i = ffs32(m);
      u64 d = (I.fl ? src<u64>(w, I.d)[i] : srcw(w, I.d)[i]) + (u64)(s64)I.c;
      u32 s = (u32)laneAddr(w, I, i);
      memcpy(resolve(w, i, Space::GENERIC, d, 128, true), smemPtr(w, s, 128, "tensormap.cp_fenceproxy"), 128);
    };
    Inst& I = t.out(h, C_TMA);
    I.d = ds;
    I.c = (s32)dof;
    I.fl = d8;
    t.addr(I, t.op(1));
    return;
  }
  t.has("replace");
  t.has("tile");
  t.has("b1024");
  Space sp = parseSpace(t);
  static const char* fn[] = {"global_address", "rank",     "box_dim",           "global_dim",   "global_stride",
                             "element_stride", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"};
  int f = -1;
  for (int i = 0; i < 10; ++i)
    if (t.has(fn[i])) f = i;
  if (f < 0) t.err("tensormap field");
  Ty ty = t.type();
  int ord = 0;
  size_t vi = 1;
  if (f >= 2 && f <= 5) {
    ord = (int)t.op(1).imm;
    vi = 2;
  }
  s32 v = t.S(vi, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u64 a = laneAddr(w, I, (int)i);
      u64 v = I.t ? src<u64>(w, I.b)[i] : srcw(w, I.b)[i];
      TMap t;
      u8* p = resolve(w, (int)i, (Space)I.e, a, 128, true);
      memcpy(&t, p, sizeof t);
      int o = I.c;
      switch (I.fl) {
        case 0: t.base = v; break;
        case 1: t.rank = (u8)(v + 1); break;
        case 2: t.box[o] = (u16)v; break;
        case 3: t.dim[o] = (u32)v; break;
        case 4: t.stride[o] = v; break;
        case 5: t.estride[o] = (u8)v; break;
        default: simFail(w, 719, "tensormap.replace field is not supported");
      }
      memcpy(p, &t, sizeof t);
    }
  };
  Inst& I = t.out(h, C_TMA);
  I.b = v;
  I.c = ord;
  I.fl = (u32)f;
  I.t = tyBits(ty) > 32;
  I.e = (int)sp;
  t.addr(I, t.op(0));
}

}  // namespace ptxsim

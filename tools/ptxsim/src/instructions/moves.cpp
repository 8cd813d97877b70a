// Moves, special registers, addresses.
#include "instructions/rounding.h"
#include "ptx/special_registers.h"
#include "translate/elementwise.h"
#include <chrono>

namespace ptxsim {

// ---- moves ----
static void hmovS(Warp& w, const Inst& I, u32 m);
static void emitMov(Tr& t, s32 d, s32 a, int bytes) {
  auto f32 = [](u32 x) { return x; };
  auto f64 = [](u64 x) { return x; };
  Inst& I = t.out(bytes == 8 ? (Handler)h1<u64, decltype(f64)> : (Handler)h1<u32, decltype(f32)>, C_MOV);
  I.a = a;
  I.d = d;
}
OP(mov) {
  Ty ty = t.type();
  const Operand &d = t.op(0), &s = t.op(1);
  if (ty == Ty::PRED) {
    bool n;
    s32 a = t.pred(s, n), dd = t.predD(d);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      w.preds[I.d] = (w.preds[I.d] & ~m) | ((w.preds[I.a] ^ (I.fl ? ~0u : 0)) & m);
    };
    Inst& I = t.out(h, C_MOV);
    I.a = a;
    I.d = dd;
    I.fl = n;
    return;
  }
  if (s.k == Operand::SREG) {
    Inst I0;
    int bytes = tyBits(ty) > 32 ? 8 : 4;
    Inst& I = t.out(hmovS, C_MOV);
    I.fl = (u32)s.sreg;
    I.d = t.D(0, bytes);
    I.t = bytes == 8;
    return;
  }
  if (s.k == Operand::VEC || d.k == Operand::VEC) {  // pack or unpack
    int bits = tyBits(ty);
    const auto& vec = s.k == Operand::VEC ? s.v : d.v;
    int n = (int)vec.size(), eb = bits / n;
    Ty et = eb == 64 ? Ty::B64 : eb == 32 ? Ty::B32 : eb == 16 ? Ty::B16 : Ty::B8;
    if (bits == 128) {
      const Operand& big = s.k == Operand::VEC ? d : s;
      if (big.k != Operand::REG || t.regTy[big.reg] != Ty::B128) t.err("128-bit register expected");
      s32 bs = t.slot[big.reg];
      std::vector<s32> v;
      for (auto& o : vec) v.push_back(s.k == Operand::VEC ? t.S(o, et) : t.D(o, eb == 64 ? 8 : 4));
      if (n != 2) t.err("128-bit mov of 2 elements expected");
      auto hp = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) for (int k = 0; k < 2; ++k) memcpy(w.regs + I.d + i * 4 + k * 2, &src<u64>(w, I.v[k])[i], 8);
      };
      auto hu = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) for (int k = 0; k < 2; ++k) memcpy(&dst<u64>(w, I.v[k])[i], w.regs + I.a + i * 4 + k * 2, 8);
      };
      const s32* av = t.aux(v);
      Inst& I = t.out(s.k == Operand::VEC ? (Handler)hp : (Handler)hu, C_MOV);
      I.v = av;
      I.d = bs;
      I.a = bs;
      return;
    }
    if (s.k == Operand::VEC && d.k == Operand::VEC) t.err("vector to vector mov");
    std::vector<s32> v;
    if (s.k == Operand::VEC) {
      for (auto& o : s.v) v.push_back(t.S(o, et));
      const s32* av = t.aux(v);
      s32 dd = t.D(0, bits > 32 ? 8 : 4);
      auto h = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) {
          u64 r = 0;
          for (int k = 0; k < I.n; ++k) {
            u64 x = srcw(w, I.v[k])[i];
            x &= I.imm;
            r |= x << (k * I.t2);
          }
          if (I.t)
            dst<u64>(w, I.d)[i] = r;
          else
            dst<u32>(w, I.d)[i] = (u32)r;
        }
      };
      Inst& I = t.out(h, C_MOV);
      I.v = av;
      I.d = dd;
      I.n = (u8)n;
      I.t2 = (u8)eb;
      I.t = bits > 32;
      I.imm = (s64)((1ull << eb) - 1);
    } else {
      for (auto& o : d.v) v.push_back(o.k == Operand::SINK ? -1 : t.D(o, 4));
      const s32* av = t.aux(v);
      s32 a = t.S(s, ty);
      auto h = [](Warp& w, const Inst& I, u32 m) {
        FOR_LANES(i, m) {
          u64 x = I.t ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
          for (int k = 0; k < I.n; ++k)
            if (I.v[k] >= 0) w.regs[I.v[k] + i] = (u32)((x >> (k * I.t2)) & (u64)I.imm);
        }
      };
      Inst& I = t.out(h, C_MOV);
      I.v = av;
      I.a = a;
      I.n = (u8)n;
      I.t2 = (u8)eb;
      I.t = bits > 32;
      I.imm = (s64)((1ull << eb) - 1);
    }
    return;
  }
  if (ty == Ty::B128) {
    if (s.k != Operand::REG || d.k != Operand::REG) t.err("128-bit mov operand");
    auto h = [](Warp& w, const Inst& I, u32 m) {
      FOR_LANES(i, m) memcpy(w.regs + I.d + i * 4, w.regs + I.a + i * 4, 16);
    };
    Inst& I = t.out(h, C_MOV);
    I.a = t.slot[s.reg];
    I.d = t.slot[d.reg];
    return;
  }
  int bytes = tyBits(ty) > 32 ? 8 : 4;
  s32 a = t.S(1, ty), dd = t.D(0, bytes);
  emitMov(t, dd, a, bytes);
}
static void hmovS(Warp& w, const Inst& I, u32 m) {
  u32 v = 0;
  u64 v64 = 0;
  const CTA& c = *w.cta;
  const Launch& L = *c.L;
  const u32* per = nullptr;
  u32 tmp[32];
  auto each = [&](auto f) {
    for (u32 i = 0; i < 32; ++i) tmp[i] = f(i);
    per = tmp;
  };
  static std::atomic<u64> timer{1};
  switch (I.fl) {
    case SR_TID_X: per = w.tid[0]; break;
    case SR_TID_Y: per = w.tid[1]; break;
    case SR_TID_Z: per = w.tid[2]; break;
    case SR_NTID_X:
    case SR_NTID_Y:
    case SR_NTID_Z: v = L.block[I.fl - SR_NTID_X]; break;
    case SR_CTAID_X:
    case SR_CTAID_Y:
    case SR_CTAID_Z: v = c.id[I.fl - SR_CTAID_X]; break;
    case SR_NCTAID_X:
    case SR_NCTAID_Y:
    case SR_NCTAID_Z: v = L.grid[I.fl - SR_NCTAID_X]; break;
    case SR_LANEID: each([](u32 i) { return i; }); break;
    case SR_WARPID: v = w.wid; break;
    case SR_NWARPID: v = 64; break;
    case SR_SMID: v = (w.cl->id * (u32)w.cl->ctas.size() + c.rank) % (g_cfg.a100 ? 108 : 132); break;
    case SR_NSMID: v = g_cfg.a100 ? 108 : 132; break;
    case SR_GRIDID:
      v = (u32)L.gridId;
      v64 = L.gridId;
      break;
    case SR_CLUSTERID_X:
    case SR_CLUSTERID_Y:
    case SR_CLUSTERID_Z: v = w.cl->cid[I.fl - SR_CLUSTERID_X]; break;
    case SR_NCLUSTERID_X:
    case SR_NCLUSTERID_Y:
    case SR_NCLUSTERID_Z: {
      int k = (int)I.fl - SR_NCLUSTERID_X;
      v = L.grid[k] / L.cluster[k];
      break;
    }
    case SR_CLUSTER_CTAID_X:
    case SR_CLUSTER_CTAID_Y:
    case SR_CLUSTER_CTAID_Z: {
      int k = (int)I.fl - SR_CLUSTER_CTAID_X;
      v = c.id[k] % L.cluster[k];
      break;
    }
    case SR_CLUSTER_NCTAID_X:
    case SR_CLUSTER_NCTAID_Y:
    case SR_CLUSTER_NCTAID_Z: v = L.cluster[I.fl - SR_CLUSTER_NCTAID_X]; break;
    case SR_CLUSTER_CTARANK: v = c.rank; break;
    case SR_CLUSTER_NCTARANK: v = (u32)w.cl->ctas.size(); break;
    case SR_IS_EXPLICIT_CLUSTER: v = w.cl->ctas.size() > 1; break;
    case SR_LANEMASK_EQ: each([](u32 i) { return 1u << i; }); break;
    case SR_LANEMASK_LT: each([](u32 i) { return (1u << i) - 1; }); break;
    case SR_LANEMASK_LE: each([](u32 i) { return (u32)((2ull << i) - 1); }); break;
    case SR_LANEMASK_GT: each([](u32 i) { return ~(u32)((2ull << i) - 1); }); break;
    case SR_LANEMASK_GE: each([](u32 i) { return ~((1u << i) - 1); }); break;
    case SR_CLOCK: v = (u32)(w.cl->instrs * 4 + w.instCount); break;
    case SR_CLOCK_HI: v = (u32)((w.cl->instrs * 4) >> 32); break;
    case SR_CLOCK64:
      v64 = w.cl->instrs * 4 + w.instCount;
      v = (u32)v64;
      break;
    case SR_GLOBALTIMER:
    case SR_GLOBALTIMER_LO:
    case SR_GLOBALTIMER_HI:
      v64 = timer.fetch_add(100) + w.cl->instrs * 32;
      v = I.fl == SR_GLOBALTIMER_HI ? (u32)(v64 >> 32) : (u32)v64;
      break;
    case SR_DYNAMIC_SMEM_SIZE: v = L.dynSmem; break;
    case SR_TOTAL_SMEM_SIZE: v = L.smemBytes - kSmemBase; break;
    case SR_AGGR_SMEM_SIZE: v = L.smemBytes; break;
    default: simFail(w, 719, "special register %u is not supported", I.fl);
  }
  if (I.t) {
    if (!v64) v64 = per ? 0 : v;
    FOR_LANES(i, m) dst<u64>(w, I.d)[i] = per ? per[i] : v64;
  } else {
    u32* d = w.regs + I.d;
    FOR_LANES(i, m) d[i] = per ? per[i] : v;
  }
}

OP(cvta) {
  bool to = t.has("to");
  Ty ty = t.type();
  u64 win = 0;
  if (t.has("shared") || t.has("shared::cta") || t.has("shared::cluster"))
    win = g_sharedWin;
  else if (t.has("local"))
    win = g_localWin;
  else
    t.ignore({"global", "const", "param", "param::entry"});
  s32 a = t.S(1, ty), d = t.D(0, ty);
  if (win && t.op(1).k == Operand::INT && t.op(1).rsp == Space::PARAM) win = 0;
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* a = src<u64>(w, I.a);
    auto* d = dst<u64>(w, I.d);
    FOR_LANES(i, m) d[i] = a[i] + (u64)I.imm;
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.imm = (s64)(to ? 0 - win : win);
}
OP(isspacep) {
  int k = 0;
  if (t.has("shared") || t.has("shared::cta") || t.has("shared::cluster"))
    k = 1;
  else if (t.has("local"))
    k = 2;
  else if (t.has("global"))
    k = 3;
  else
    t.err("isspacep space");
  s32 a = t.S(1, Ty::B64), d = t.predD(t.op(0));
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 r = 0;
    auto* a = src<u64>(w, I.a);
    FOR_LANES(i, m) {
      bool s = a[i] - g_sharedWin < kWin, l = a[i] - g_localWin < kWin;
      r |= (u32)(I.fl == 1 ? s : I.fl == 2 ? l : !s && !l) << i;
    }
    w.preds[I.d] = (w.preds[I.d] & ~m) | r;
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.fl = (u32)k;
}
OP(createpolicy) {
  for (size_t i = 1; i < t.in->mods.size(); ++i) t.used[i] = 1;
  auto h = [](Warp& w, const Inst& I, u32 m) { FOR_LANES(i, m) dst<u64>(w, I.d)[i] = 0x14f0000000000000ull; };
  s32 d = t.D(0, 8);
  Inst& I = t.out(h, C_OTHER);
  I.d = d;
}

}  // namespace ptxsim

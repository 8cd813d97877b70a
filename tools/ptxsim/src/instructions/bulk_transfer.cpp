// Bulk and tensor copies and reductions in flight: issue, read, write, complete.
#include "instructions/atomics.h"
#include "instructions/bulk_copy.h"

namespace ptxsim {

static u32 swz(u32 a, int mode) {
  switch (mode) {
    case 1: return a ^ ((a >> 3) & 0x10);
    case 2: return a ^ ((a >> 3) & 0x30);
    case 3: return a ^ ((a >> 3) & 0x70);
  }
  return a;
}
static void redMem(u8* g, const u8* s, u32 bytes, u8 op, Ty ty) {
  u32 eb = (u32)tyBits(ty) / 8;
  for (u32 o = 0; o < bytes; o += eb) {
    u64 v = 0;
    memcpy(&v, s + o, eb);
    if (eb == 8)
      atomMem<u64>(g + o, op, ty, v, 0);
    else if (eb == 4)
      atomMem<u32>(g + o, op, ty, v, 0);
    else
      atomMem<u16>(g + o, op, ty, v, 0);
  }
}
u64 boxInside(const TMap& t, const int* coord) {  // bytes of a tile that lie inside the tensor
  u64 b = t.esize;
  for (int i = 0; i < t.rank; ++i) {
    s64 lo = std::max<s64>(coord[i], 0), hi = std::min<s64>((s64)coord[i] + t.box[i], t.dim[i]);
    b *= (u64)std::max<s64>(hi - lo, 0);
  }
  return b;
}
u32 boxBytes(const TMap& t) {
  u32 b = t.esize;
  for (int i = 0; i < t.rank; ++i) b *= t.box[i];
  return b;
}
// visit all 16-byte (or smaller) pieces of a tile: f(smemOffset, globalAddr or 0, bytes)
template <class F>
static void tileWalk(const TMap& t, const int* coord, u32 sbase, F f) {
  int idx[5] = {};
  const u32 row = (u32)t.box[0] * t.esize;
  u32 lin = 0;
  for (;;) {
    bool in = true;
    u64 g = t.base;
    for (int d = 1; d < t.rank; ++d) {
      s64 c = (s64)coord[d] + idx[d];
      if (c < 0 || c >= (s64)t.dim[d]) in = false;
      g += (u64)(c * (s64)t.stride[d - 1]);
    }
    s64 lo = std::max<s64>(0, -(s64)coord[0]), hi = std::min<s64>(t.box[0], (s64)t.dim[0] - coord[0]);
    if (!in || hi < lo) {
      lo = 0;
      hi = 0;
    }
    s64 lob = lo * t.esize, hib = hi * t.esize;
    u64 g0 = g + (u64)((s64)coord[0] * t.esize);
    for (u32 b = 0; b < row; b += 16) {
      u32 n = std::min(16u, row - b);
      u32 sa = swz(sbase + lin + b, t.swizzle);
      // split into outside / inside / outside
      s64 a0 = std::clamp<s64>(lob, b, b + n), a1 = std::clamp<s64>(hib, b, b + n);
      if (a0 > b) f(sa, (u64)0, (u32)(a0 - b));
      if (a1 > a0) f(sa + (u32)(a0 - b), g0 + (u64)a0, (u32)(a1 - a0));
      if (a1 < (s64)b + n && a1 >= a0) f(sa + (u32)(a1 - b), (u64)0, (u32)(b + n - a1));
    }
    lin += row;
    int d = 1;
    for (; d < t.rank; ++d) {
      if (++idx[d] < t.box[d]) break;
      idx[d] = 0;
    }
    if (d >= t.rank) break;
  }
}
void bulkRead(BulkOp& op) {  // shared -> staging
  if (op.readDone) return;
  op.readDone = true;
  u32 n = op.bytes;
  op.staged.resize(n);
  if (op.kind == BK_T_STORE || op.kind == BK_T_RED) {
    const TMap& t = *(const TMap*)op.tmap;
    u32 o = 0;
    tileWalk(t, op.coord, op.src, [&](u32 sa, u64 g, u32 b) {
      if (g && op.srcCta->init.size()) readShared(*op.w, *op.srcCta, sa, b, op.pc, "a tensor store");
      memcpy(&op.staged[o], op.srcCta->smem + sa, b);
      o += b;
    });
  } else {
    if (op.srcCta->init.size()) readShared(*op.w, *op.srcCta, op.src, n, op.pc, "a bulk copy");
    memcpy(op.staged.data(), op.srcCta->smem + op.src, n);
  }
}
static void bulkWrite(BulkOp& op) {
  Warp& w = *op.w;
  (void)w;
  const TMap& t = *(const TMap*)op.tmap;
  switch (op.kind) {
    case BK_T_LOAD: {
      tileWalk(t, op.coord, op.dst, [&](u32 sa, u64 g, u32 b) {
        if (g) {
          if (g_cfg.ckOob) checkGlobal(w, g, b, false, op.lane);
          memcpy(op.dstCta->smem + sa, (const void*)g, b);
        }
        if (w.taintNext) {
          w.taintNext = false;
          if (!op.dstCta->init.empty()) {
            memset(&op.dstCta->init[sa], 0, b);
          }
          return;
        }
        if (g) {
        } else if (t.oobNan) {
          for (u32 k = 0; k < b; ++k) op.dstCta->smem[sa + k] = 0xff;
        } else
          memset(op.dstCta->smem + sa, 0, b);
        markShared(*op.dstCta, sa, b);
      });
      break;
    }
    case BK_T_STORE:
    case BK_T_RED: {
      bulkRead(op);
      u32 o = 0;
      tileWalk(t, op.coord, op.src, [&](u32, u64 g, u32 b) {
        if (g) {
          if (g_cfg.ckOob) checkGlobal(w, g, b, true, op.lane);
          if (op.kind == BK_T_STORE)
            memcpy((void*)g, &op.staged[o], b);
          else
            redMem((u8*)g, &op.staged[o], b, op.redOp, (Ty)op.redTy);
        }
        o += b;
      });
      break;
    }
    case BK_G2S:
      if (g_cfg.ckOob) checkGlobal(w, op.gaddr, op.bytes, false, op.lane);
      memcpy(op.dstCta->smem + op.dst, (const void*)op.gaddr, op.bytes);
      markShared(*op.dstCta, op.dst, op.bytes);
      break;
    case BK_S2S:
      bulkRead(op);
      memcpy(op.dstCta->smem + op.dst, op.staged.data(), op.bytes);
      markShared(*op.dstCta, op.dst, op.bytes);
      break;
    case BK_RED_S2S:
      bulkRead(op);
      if (op.dstCta->init.size()) readShared(w, *op.dstCta, op.dst, op.bytes, op.pc, "a bulk reduction");
      redMem(op.dstCta->smem + op.dst, op.staged.data(), op.bytes, op.redOp, (Ty)op.redTy);
      markShared(*op.dstCta, op.dst, op.bytes);
      break;
    case BK_S2G:
      bulkRead(op);
      if (g_cfg.ckOob) checkGlobal(w, op.gaddr, op.bytes, true, op.lane);
      memcpy((void*)op.gaddr, op.staged.data(), op.bytes);
      break;
    case BK_RED_S2G:
      bulkRead(op);
      if (g_cfg.ckOob) checkGlobal(w, op.gaddr, op.bytes, true, op.lane);
      redMem((u8*)op.gaddr, op.staged.data(), op.bytes, op.redOp, (Ty)op.redTy);
      break;
    default: break;
  }
  op.w->cl->progress++;
}
void bulkExecute(BulkOp& op) {
  bulkWrite(op);
  if (op.hasMbar) {
    if (op.w->cl->race) raceMbarComplete(*op.mbarCta, op.mbar, op.w, op.clk, op.vc);
    mbarCompleteTx(*op.mbarCta, op.mbar, op.bytes, op.w);
  }
}
void bulkIssue(Warp& w, BulkOp* op) {
  op->w = &w;
  op->pc = w.pc - 1;
  const TMap& t = *(const TMap*)op->tmap;
  bool ld = op->kind == BK_T_LOAD || op->kind == BK_G2S;
  if (ld && !g_cfg.stats) {
  } else if (ld) {
    u64 n = op->kind == BK_T_LOAD ? boxInside(t, op->coord) : op->bytes;
    w.cl->st.tmaLoad += op->bytes;
    w.cl->st.tmaDelivered += n;
    op->dstCta->filled += n;
  } else if (op->dstCta)
    w.cl->st.dsmem += op->bytes;
  else
    w.cl->st.tmaStore += op->bytes;
  // bounds of the shared side
  if (op->dstCta && (op->dst < kSmemBase || op->dst + op->bytes > op->dstCta->smemSize))
    simFail(w, 700, "bulk copy writes shared memory out of bounds: offset %d, %u bytes", (int)op->dst - (int)kSmemBase,
            op->bytes);
  if (op->srcCta && (op->src < kSmemBase || op->src + op->bytes > op->srcCta->smemSize))
    simFail(w, 700, "bulk copy reads shared memory out of bounds: offset %d, %u bytes", (int)op->src - (int)kSmemBase,
            op->bytes);
  u32 al = (op->kind == BK_T_LOAD || op->kind == BK_T_STORE || op->kind == BK_T_RED) ? 128 : 16;
  if (op->dstCta && (op->dst & (al - 1))) misaligned(w, op->lane, op->dst, al);
  if (op->srcCta && (op->src & (al - 1))) misaligned(w, op->lane, op->src, al);
  if (w.cl->race) {
    op->clk = raceIssueAsync(w, op->vc, op->pvc);
    if (op->dstCta && op->kind != BK_RED_S2S)
      raceAsyncAccess(w, *op->dstCta, op->dst, op->bytes, true, op->pc, op->clk, op->vc, op->pvc, true);
    if (op->srcCta) raceAsyncAccess(w, *op->srcCta, op->src, op->bytes, false, op->pc, op->clk, op->vc, op->pvc, true);
  }
  if (g_cfg.async == Config::EAGER) {
    bulkExecute(*op);
    if (op->grouped && w.cl->race) {
      op->readDone = true;
      op->staged.clear();
      op->kind = BK_T_GATHER;
      w.cl->bulk.push_back(op);
    }  // kept for its clock only
    else
      delete op;
    return;
  }
  w.cl->bulk.push_back(op);
  if (g_cfg.async == Config::RANDOM && w.cl->rnd() % 3 == 0) w.cl->completeOne(true);
}

}  // namespace ptxsim

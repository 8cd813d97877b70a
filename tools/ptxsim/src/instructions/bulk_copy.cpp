// cp.async.bulk and cp.reduce.async.bulk, with and without tensor maps.
#include "instructions/atomics.h"
#include "instructions/bulk_copy.h"
#include "instructions/memory_operands.h"

namespace ptxsim {

static const TMap& loadTmap(Warp& w, u64 a, BulkOp& op) {
  if (a & 63) misaligned(w, 0, a, 64);
  u8* p = resolve(w, op.lane, Space::GENERIC, a, 128, false);
  memcpy(op.tmap, p, 128);
  const TMap& t = *(const TMap*)op.tmap;
  if (t.magic != kTMapMagic)
    simFail(w, 719, "tensor copy: 0x%llx does not hold a tensor map made by cuTensorMapEncodeTiled of this runtime",
            (unsigned long long)a);
  return t;
}
// t: BulkKind, n: dims, v: [coords...], a/imm: first address; b: second address slot; d: mbar slot; c: size or mask
// slot
struct BulkX {
  s32 dstS = -1, srcS = -1, mbarS = -1, maskS = -1, sizeS = -1;
  s64 dstO = 0, srcO = 0, mbarO = 0;
  bool dst8 = false, src8 = false, mbar8 = false;
  std::vector<s32> coord;
  u8 redOp = 0;
  Ty redTy = Ty::NONE;
};
static void hbulk(Warp& w, const Inst& I, u32 m) {
  const BulkX& X = *(const BulkX*)I.x;
  auto ad = [&](s32 s, s64 o, bool w8, u32 i) -> u64 { return (w8 ? src<u64>(w, s)[i] : (u64)srcw(w, s)[i]) + (u64)o; };
  auto sh = [&](u64 a, bool w8) -> u32 { return (u32)(w8 && a - g_sharedWin < kWin ? a - g_sharedWin : a); };
  // A warp whose lanes carry the same operands issues one copy (the instruction is warp-uniform in hardware).
  auto same = [&](u32 i, u32 j) {
    auto eq = [&](s32 s, bool w8) {
      return s == -1 || (w8 ? src<u64>(w, s)[i] == src<u64>(w, s)[j] : srcw(w, s)[i] == srcw(w, s)[j]);
    };
    if (!eq(X.dstS, X.dst8) || !eq(X.srcS, X.src8) || !eq(X.mbarS, X.mbar8) || !eq(X.maskS, false) ||
        !eq(X.sizeS, false))
      return false;
    for (s32 c : X.coord)
      if (!eq(c, false)) return false;
    return w.bulkGroup[i] == w.bulkGroup[j];
  };
  const u32 lead = (u32)ffs32(m);
  FOR_LANES(i, m) {
    if (i != lead && same(i, lead)) continue;
    BulkKind k = (BulkKind)I.t;
    u64 A = ad(X.dstS, X.dstO, X.dst8, i), B = ad(X.srcS, X.srcO, X.src8, i);
    auto mk = [&] {
      auto* o = new BulkOp;
      o->kind = k;
      o->lane = (u8)i;
      o->redOp = X.redOp;
      o->redTy = (u8)X.redTy;
      return o;
    };
    auto setM = [&](BulkOp* o, CTA* c, u32 mb) {
      o->hasMbar = true;
      o->mbarCta = c;
      o->mbar = mb & 0xffffff;
    };
    if (k == BK_T_LOAD || k == BK_G2S || k == BK_S2S || k == BK_RED_S2S) {
      BulkOp proto;
      proto.kind = k;
      proto.lane = (u8)i;
      proto.redOp = X.redOp;
      proto.redTy = (u8)X.redTy;
      u32 da = sh(A, X.dst8), mb = sh(ad(X.mbarS, X.mbarO, X.mbar8, i), X.mbar8);
      if (k == BK_T_LOAD) {
        const TMap& t = loadTmap(w, B, proto);
        if (t.rank != I.n) simFail(w, 719, "tensor copy with %d coordinates on a tensor map of rank %d", I.n, t.rank);
        for (int d = 0; d < I.n; ++d) proto.coord[d] = (s32)srcw(w, X.coord[d])[i];
        proto.bytes = boxBytes(t);
        proto.dims = I.n;
      } else {
        proto.bytes = srcw(w, X.sizeS)[i];
        if (proto.bytes & 15) simFail(w, 716, "bulk copy size %u is not a multiple of 16", proto.bytes);
        if (k == BK_G2S) {
          proto.gaddr = B;
          if (B & 15) misaligned(w, (int)i, B, 16);
        } else {
          proto.srcCta = w.cta;
          proto.src = sh(B, X.src8) & 0xffffff;
        }
      }
      if (g_cfg.stats && (k == BK_T_LOAD || k == BK_G2S)) {
        u64 n = k == BK_T_LOAD ? boxInside(*(const TMap*)proto.tmap, proto.coord) : proto.bytes;
        w.cl->st.l2Tma += n;
        w.cta->l2Tma += n;
      }  // L2 is read once, however many CTAs receive
      if (X.maskS != -1) {
        u32 mask = srcw(w, X.maskS)[i] & 0xffff;
        for (u32 r = 0; r < 16; ++r)
          if (mask >> r & 1) {
            if (r >= w.cl->ctas.size())
              simFail(w, 719, "multicast mask 0x%x exceeds the cluster of %zu CTAs", mask, w.cl->ctas.size());
            BulkOp* o = new BulkOp(proto);
            o->dstCta = w.cl->ctas[r];
            o->dst = da & 0xffffff;
            setM(o, o->dstCta, mb);
            bulkIssue(w, o);
          }
      } else {
        BulkOp* o = new BulkOp(proto);
        o->dstCta = ctaOfSmem(w, da);
        o->dst = da & 0xffffff;
        CTA* mc = ctaOfSmem(w, mb);
        setM(o, mc, mb);
        bulkIssue(w, o);
      }
    } else {
      BulkOp* o = mk();
      o->grouped = true;
      o->group = w.bulkGroup[i];
      o->srcCta = w.cta;
      o->src = sh(B, X.src8) & 0xffffff;
      if (k == BK_T_STORE || k == BK_T_RED) {
        const TMap& t = loadTmap(w, A, *o);
        if (t.rank != I.n) simFail(w, 719, "tensor copy with %d coordinates on a tensor map of rank %d", I.n, t.rank);
        for (int d = 0; d < I.n; ++d) o->coord[d] = (s32)srcw(w, X.coord[d])[i];
        o->bytes = boxBytes(t);
        o->dims = I.n;
        if (k == BK_T_RED) {
          static const Ty dt[] = {Ty::U8,  Ty::U16, Ty::U32,  Ty::S32, Ty::U64, Ty::S64, Ty::F16,
                                  Ty::F32, Ty::F64, Ty::BF16, Ty::F32, Ty::F32, Ty::F32};
          o->redTy = (u8)dt[t.dtype < 13 ? t.dtype : 2];
        }
      } else {
        o->gaddr = A;
        o->bytes = srcw(w, X.sizeS)[i];
        if ((o->bytes & 15) || (A & 15))
          simFail(w, 716, "bulk copy: size %u / address 0x%llx not 16-byte aligned", o->bytes, (unsigned long long)A);
      }
      bulkIssue(w, o);
    }
  }
}
static void hbulkWait(Warp& w, const Inst& I, u32 m) {  // fl: read, imm: N
  FOR_LANES(i, m) {
    auto& q = w.cl->bulk;
    for (size_t k = 0; k < q.size();) {
      BulkOp* op = q[k];
      if (op->grouped && op->w == &w && op->lane == i && (s64)op->group < (s64)w.bulkGroup[i] - I.imm) {
        if (w.cl->race) raceAcquireAsync(w, op->clk);
        if (op->kind == BK_T_GATHER) {
          q.erase(q.begin() + (long)k);
          delete op;
          continue;
        }
        if (I.fl) {
          bulkRead(*op);
          ++k;
          continue;
        }
        q.erase(q.begin() + (long)k);
        bulkExecute(*op);
        delete op;
        continue;
      }
      ++k;
    }
  }
}
void emitBulk(Tr& t, bool red) {
  t.has("async");
  t.has("bulk");
  if (t.has("commit_group")) {
    auto h = [](Warp& w, const Inst&, u32 m) { FOR_LANES(i, m) w.bulkGroup[i]++; };
    t.out(h, C_TMA);
    return;
  }
  if (t.has("wait_group")) {
    u32 rd = t.has("read");
    if (t.op(0).k != Operand::INT) t.err("constant expected");
    s64 n = t.op(0).imm;
    Inst& I = t.out(hbulkWait, C_TMA);
    I.fl = rd;
    I.imm = n;
    return;
  }
  if (t.has("prefetch")) {  // no effect but the checks of its operands
    bool tensor = t.has("tensor");
    t.ignore({"L2", "global", "tile", "L2::cache_hint"});
    int dims = 0;
    for (int d = 1; d <= 5; ++d)
      if (t.has(strf("%dd", d).c_str())) dims = d;
    for (const char* b : {"im2col", "im2col::w", "tile::gather4"})
      if (t.has(b)) t.err("tensor copy mode is not supported");
    auto X = new BulkX;
    bulkAddr(t, t.op(0), X->srcS, X->srcO, X->src8);
    if (tensor) {
      const Operand& to = t.op(0);
      if (!dims || to.v.size() != 2 || to.v[1].k != Operand::VEC || (int)to.v[1].v.size() != dims)
        t.err("tensor coordinates");
      for (auto& c : to.v[1].v) X->coord.push_back(t.S(c, Ty::S32));
    } else
      X->sizeS = t.S(1, Ty::U32);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      const BulkX& X = *(const BulkX*)I.x;
      int i = ffs32(m);
      u64 a = (X.src8 ? src<u64>(w, X.srcS)[i] : srcw(w, X.srcS)[i]) + (u64)X.srcO;
      if (I.n) {
        BulkOp op;
        op.lane = (u8)i;
        const TMap& t = loadTmap(w, a, op);
        if (t.rank != I.n)
          simFail(w, 719, "tensor prefetch with %d coordinates on a tensor map of rank %d", I.n, t.rank);
        int c[5] = {};
        for (int d = 0; d < I.n; ++d) c[d] = (s32)srcw(w, X.coord[(size_t)d])[i];
        w.cl->st.prefetch += boxInside(t, c);
      } else {
        u32 n = srcw(w, X.sizeS)[i];
        if (n & 15) simFail(w, 716, "bulk prefetch size %u is not a multiple of 16", n);
        if (a & 15) misaligned(w, i, a, 16);
        w.cl->st.prefetch += n;
      }
    };
    Inst& I = t.out(h, C_TMA);
    I.n = (u8)dims;
    I.x = X;
    return;
  }
  bool tensor = t.has("tensor");
  int dims = 0;
  bool hint = t.has("L2::cache_hint"), mc = t.has("multicast::cluster");
  if (tensor) {
    for (int d = 1; d <= 5; ++d)
      if (t.has(strf("%dd", d).c_str())) dims = d;
    t.has("tile");
    for (const char* b : {"im2col", "im2col_no_offs", "tile::gather4", "tile::scatter4", "im2col::w"})
      if (t.has(b)) t.err("tensor copy mode is not supported");
  }
  // source/destination order: first state space is the destination
  std::string d1, s1;
  for (size_t i = 1; i < t.in->mods.size(); ++i) {
    auto& m = t.in->mods[i];
    if (m == "global" || m == "shared::cta" || m == "shared::cluster" || m == "shared") {
      t.used[i] = 1;
      if (d1.empty())
        d1 = m;
      else
        s1 = m;
    }
  }
  auto X = new BulkX;  // lives as long as the program (small)
  bool mbar = t.has("mbarrier::complete_tx::bytes"), grp = t.has("bulk_group");
  (void)grp;
  if (red) {
    static const struct {
      const char* n;
      u8 op;
    } nm[] = {{"add", A_ADD}, {"min", A_MIN}, {"max", A_MAX}, {"and", A_AND},
              {"or", A_OR},   {"xor", A_XOR}, {"inc", A_INC}, {"dec", A_DEC}};
    bool ok = false;
    for (auto& e : nm)
      if (t.has(e.n)) {
        X->redOp = e.op;
        ok = true;
      }
    t.has("noftz");
    if (!ok) t.err("reduction operation");
    if (!tensor) X->redTy = t.type();
  }
  BulkKind k;
  size_t nx;
  if (tensor) {
    bool load = d1 != "global";
    const Operand& to = t.op(load ? 1 : 0);
    if (to.v.size() != 2 || to.v[1].k != Operand::VEC || (int)to.v[1].v.size() != dims) t.err("tensor coordinates");
    for (auto& c : to.v[1].v) X->coord.push_back(t.S(c, Ty::S32));
    bulkAddr(t, t.op(0), X->dstS, X->dstO, X->dst8);
    bulkAddr(t, t.op(1), X->srcS, X->srcO, X->src8);
    k = load ? BK_T_LOAD : red ? BK_T_RED : BK_T_STORE;
    nx = 2;
  } else {
    bulkAddr(t, t.op(0), X->dstS, X->dstO, X->dst8);
    bulkAddr(t, t.op(1), X->srcS, X->srcO, X->src8);
    X->sizeS = t.S(2, Ty::U32);
    nx = 3;
    k = d1 == "global" ? (red ? BK_RED_S2G : BK_S2G) : s1 == "global" ? BK_G2S : red ? BK_RED_S2S : BK_S2S;
    if (red && s1 == "global") t.err("bulk reduction from global memory");
    if (k == BK_RED_S2S && tyFloat(X->redTy)) t.err("bulk reduction into shared memory exists for integers only");
  }
  if (mbar) {
    bulkAddr(t, t.op(nx), X->mbarS, X->mbarO, X->mbar8);
    ++nx;
  }
  if (mc) {
    const Operand& mo = t.op(nx++);
    X->maskS = mo.k == Operand::REG ? t.slot[mo.reg] : t.S(mo, Ty::U16);
  }
  if (hint) ++nx;
  if (t.nops() != nx) t.err("operand count of bulk copy");
  Inst& I = t.out(hbulk, C_TMA);
  I.t = (u8)k;
  I.n = (u8)dims;
  I.x = X;
}

}  // namespace ptxsim

// cp.async: copies of a thread; and the word cp, under which bulk copies stand too.
#include "instructions/bulk_copy.h"
#include "instructions/memory_operands.h"
#include "instructions/mbarrier.h"

namespace ptxsim {

// ---- cp.async (per-thread copies) ----
static void cpRun(Warp& w, CpOp& op) {
  for (auto& e : op.e) {
    if (e.srcSize) {
      if (g_cfg.ckOob) checkGlobal(w, e.src, e.srcSize, false, e.lane);
      memcpy(e.dst, (const void*)e.src, e.srcSize);
    }
    if (e.srcSize < e.size) memset(e.dst + e.srcSize, 0, e.size - e.srcSize);
    if (g_cfg.check) {
      u32 o = (u32)(e.dst - w.cta->smem);
      markShared(*w.cta, o, e.size);
      if (w.taintNext) {
        w.taintNext = false;
        if (!w.cta->init.empty()) memset(&w.cta->init[o], 0, e.size);
      }
    }
  }
  w.cl->progress++;
}
static void cpRunEntry(Warp& w, CpEntry& e) {
  CpOp o;
  o.e.push_back(e);
  cpRun(w, o);
}
static void hcpasync(
    Warp& w, const Inst& I,
    u32 m) {  // d: dst slot, imm2 in e; a: src; c: size; b: src-size slot or -1; fl bit0: ignore-src pred in e..
  const u32 size = (u32)I.c;
  CpOp op;
  op.group = w.cpGroup;
  op.pc = w.pc - 1;
  u64 ga[32];
  u32 sa[32];
  u32 gm = 0;
  const u32 ign = I.fl & 2 ? w.preds[I.e] ^ (I.fl & 4 ? ~0u : 0) : 0;
  if (w.cl->race) {
    std::vector<u64> vc, pvc;
    op.clk = raceIssueAsync(w, vc, pvc);
    FOR_LANES(i, m) {
      u32 da = srcw(w, I.d)[i] + (u32)(I.fl >> 8);
      raceAsyncAccess(w, *w.cta, da & 0xffffff, size, true, w.pc - 1, op.clk, vc, pvc, false);
    }
  }
  FOR_LANES(i, m) {
    u32 da = srcw(w, I.d)[i] + (u32)(I.fl >> 8);
    u64 s = laneAddr(w, I, (int)i);
    u32 n = size;
    if (I.fl & 1) {
      n = srcw(w, I.b)[i];
      if (n > size) n = size;
    }
    if (ign >> i & 1) n = 0;
    if (da & (size - 1)) misaligned(w, (int)i, da, size);
    if (n && (s & (size - 1))) misaligned(w, (int)i, s, size);
    u8* d = smemPtr(w, da, size, "cp.async");
    op.e.push_back({d, da, s, (u16)size, (u16)n, (u8)i});
    ga[i] = s;
    sa[i] = da;
    if (n) gm |= 1u << i;
  }
  if (g_cfg.stats) {
    if (gm) statGlobal(w, ga, gm, size, GU_ASYNC);
    statShared(w, sa, m, size, true);
    w.cl->st.cpAsyncBytes += (u64)__builtin_popcount(gm) * size;
  }
  if (g_cfg.async == Config::EAGER) {
    cpRun(w, op);
    op.e.clear();
    if (w.cl->race) w.cp.push_back(std::move(op));
    return;
  }
  w.cp.push_back(std::move(op));
  if (g_cfg.async == Config::RANDOM && (w.cl->rnd() & 3) == 0) {  // finish a random entry of a random operation early
    CpOp& o = w.cp[w.cl->rnd() % w.cp.size()];
    if (!o.e.empty()) {
      size_t k = w.cl->rnd() % o.e.size();
      cpRunEntry(w, o.e[k]);
      o.e.erase(o.e.begin() + (long)k);
    }
  }
}
void cpWait(Warp& w, u32, u32 keep) {
  while (!w.cp.empty() && (s64)w.cp.front().group < (s64)w.cpGroup - (s64)keep) {
    cpRun(w, w.cp.front());
    if (w.cl->race) raceAcquireAsync(w, w.cp.front().clk);
    w.cp.pop_front();
  }
}
void cpRunAll(Warp& w) {
  for (auto& o : w.cp) {
    cpRun(w, o);
    if (w.cl->race) raceAcquireAsync(w, o.clk);
  }
  w.cp.clear();
}

OP(cp) {
  if (t.in->mods.size() > 1 && t.in->mods[1] == "reduce") {
    t.has("reduce");
    emitBulk(t, true);
    return;
  }
  if (t.in->mods.size() > 2 && t.in->mods[2] == "bulk") {
    emitBulk(t, false);
    return;
  }
  t.has("async");
  if (t.has("commit_group")) {
    auto h = [](Warp& w, const Inst&, u32) { w.cpGroup++; };
    t.out(h, C_CPASYNC);
    return;
  }
  if (t.has("wait_group")) {
    if (t.op(0).k != Operand::INT) t.err("constant expected");
    s64 n = t.op(0).imm;
    auto h = [](Warp& w, const Inst& I, u32 m) { cpWait(w, m, (u32)I.imm); };
    Inst& I = t.out(h, C_CPASYNC);
    I.imm = n;
    return;
  }
  if (t.has("wait_all")) {
    auto h = [](Warp& w, const Inst&, u32) { cpRunAll(w); };
    t.out(h, C_CPASYNC);
    return;
  }
  if (t.has("mbarrier")) {
    t.has("arrive");
    bool noinc = t.has("noinc");
    t.ignore({"shared", "shared::cta", "b64"});
    // completes when this thread's earlier copies have completed: run them and arrive
    auto h = [](Warp& w, const Inst& I, u32 m) {
      cpRunAll(w);
      FOR_LANES(i, m) {
        u32 a = (u32)laneAddr(w, I, (int)i);
        if (!I.fl) {
          u64* p = mbPtr(w, a, "cp.async.mbarrier.arrive");
          *p = mbMake(mbPend(*p) + 1, mbExp(*p), mbTx(*p), mbPhase(*p));
        }
        mbArrive(w, a, 1, 0, false, nullptr);
      }
    };
    Inst& I = t.out(h, C_CPASYNC);
    I.fl = noinc;
    t.addr(I, t.op(0));
    return;
  }
  t.ignore({"ca", "cg", "shared", "shared::cta", "global"});
  bool hint = t.has("L2::cache_hint");
  for (size_t i = 1; i < t.in->mods.size(); ++i)
    if (t.in->mods[i].rfind("L2::", 0) == 0) t.used[i] = 1;
  const Operand& d = t.op(0);
  s32 ds;
  s64 doff;
  bool w8;
  bulkAddr(t, d, ds, doff, w8);
  if (w8) t.err("cp.async destination must be a 32-bit shared address");
  if (t.op(2).k != Operand::INT) t.err("cp.async size");
  u32 size = (u32)t.op(2).imm, fl = 0;
  s32 b = 0, e = 0;
  size_t lim = t.nops() - (hint ? 1 : 0);
  if (lim > 3) {
    const Operand& o = t.op(3);
    bool n;
    if (o.k == Operand::REG && t.regTy[o.reg] == Ty::PRED) {
      e = t.pred(o, n);
      fl |= 2 | (n ? 4u : 0);
    } else {
      b = t.S(o, Ty::U32);
      fl |= 1;
    }
  }
  if (doff < 0 || doff >= (1 << 23)) t.err("cp.async destination offset");
  Inst& I = t.out(hcpasync, C_CPASYNC);
  I.d = ds;
  I.c = (s32)size;
  I.b = b;
  I.e = e;
  I.fl = fl | (u32)doff << 8;
  t.addr(I, t.op(1));
}

}  // namespace ptxsim

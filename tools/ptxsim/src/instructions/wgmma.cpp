// wgmma: descriptors, operands, groups in flight, and the checks of registers in use.
#include "instructions/tensor_elements.h"

namespace ptxsim {

struct WgX {
  int N, K;
  Ty dt, at, bt;
  bool sat = false, rs = false, negA = false, negB = false, trA = false, trB = false;
  std::vector<s32> d, a;
  std::vector<u16> idD, idA;
  s32 descA = 0, descB = 0, scaleP = 0;
  bool scaleNeg = false;
};
struct Desc {
  u32 start, lbo, sbo;
  int mode;
  u32 base;
};
static Desc decodeDesc(u64 d) {
  Desc r;
  r.start = (u32)(d & 0x3fff) << 4;
  r.lbo = (u32)(d >> 16 & 0x3fff) << 4;
  r.sbo = (u32)(d >> 32 & 0x3fff) << 4;
  int m = (int)(d >> 62);
  r.mode = m == 1 ? 3 : m == 2 ? 2 : m == 3 ? 1 : 0;
  r.base = (u32)(d >> 49 & 7);
  return r;
}
// Address (shared offset) of 16-byte chunk c of row i for a K-major operand: rows are M/N, chunks run along K.
static inline u32 kmajor(const Desc& d, u32 i, u32 c) {
  u32 a;
  if (d.mode == 0)
    a = d.start + (i & 7) * 16 + (i >> 3) * d.sbo + c * d.lbo;
  else {
    u32 pitch = 16u << d.mode;
    a = d.start + (i & 7) * pitch + (i >> 3) * d.sbo + c * 16;
  }
  return a;
}
// MN-major: chunk j (8 16-bit elements along M/N) of K row k.
static inline u32 mnmajor(const Desc& d, u32 k, u32 j) {
  if (d.mode == 0) return d.start + (k & 7) * 16 + j * d.sbo + (k >> 3) * d.lbo;
  u32 per = 1u << d.mode, pitch = 16u << d.mode;
  return d.start + (j & (per - 1)) * 16 + (j / per) * d.lbo + (k & 7) * pitch + (k >> 3) * d.sbo;
}
static u32 swizzle(u32 a, const Desc& d) {
  u32 r = (a >> 7) - d.base;  // 128-byte row inside the repeating pattern
  switch (d.mode) {
    case 3: return a ^ ((r & 7) << 4);
    case 2: return a ^ ((r & 3) << 4);
    case 1: return a ^ ((r & 1) << 4);
  }
  return a;
}
static const u8* chunk(Warp& w, const WgmmaOp& op, u32 a) {
  CTA& c = *w.cta;
  a &= 0x3ffff;
  if (a < kSmemBase || a + 16 > c.smemSize) {
    w.pc = op.pc + 1;
    simFail(
        w, 700, "wgmma reads shared memory out of bounds: offset %d, CTA has %u bytes (descriptor A 0x%llx, B 0x%llx)",
        (int)a - (int)kSmemBase, c.smemSize - kSmemBase, (unsigned long long)op.descA, (unsigned long long)op.descB);
  }
  return c.smem + a;
}
// visit every chunk address of an operand (rows x 32 bytes of K)
template <class F>
static void visitOperand(const Desc& d, bool mn, u32 row0, u32 rows, F f) {
  if (!mn)
    for (u32 i = row0; i < row0 + rows; ++i)
      for (u32 c = 0; c < 2; ++c) f(i, c, swizzle(kmajor(d, i, c), d));
  else
    for (u32 k = 0; k < 16; ++k)
      for (u32 j = row0 / 8; j < (row0 + rows) / 8; ++j) f(j, k, swizzle(mnmajor(d, k, j), d));
}
template <class ST>
static void loadOperandT(Warp& w, const WgmmaOp& op, u64 desc, bool mn, Ty ty, u32 row0, u32 rows, ST store) {
  Desc d = decodeDesc(desc);
  visitOperand(d, mn, row0, rows, [&](u32 i, u32 c, u32 a) {
    const u8* p = chunk(w, op, a);
    if (mn) {
      u16 v[8];
      memcpy(v, p, 16);
      for (int e = 0; e < 8; ++e) store(i * 8 + (u32)e, c, ty == Ty::F16 ? (double)h2f(v[e]) : (double)b2f(v[e]));
    } else
      switch (ty) {
        case Ty::F16: {
          u16 v[8];
          memcpy(v, p, 16);
          for (int e = 0; e < 8; ++e) store(i, c * 8 + (u32)e, (double)h2f(v[e]));
          break;
        }
        case Ty::BF16: {
          u16 v[8];
          memcpy(v, p, 16);
          for (int e = 0; e < 8; ++e) store(i, c * 8 + (u32)e, (double)b2f(v[e]));
          break;
        }
        case Ty::TF32: {
          u32 v[4];
          memcpy(v, p, 16);
          for (int e = 0; e < 4; ++e) store(i, c * 4 + (u32)e, (double)tf32Trunc(v[e]));
          break;
        }
        case Ty::E4M3:
          for (int e = 0; e < 16; ++e) store(i, c * 16 + (u32)e, (double)g_fp8.e4m3[p[e]]);
          break;
        default:
          for (int e = 0; e < 16; ++e) store(i, c * 16 + (u32)e, (double)g_fp8.e5m2[p[e]]);
          break;
      }
  });
}
static void loadOperandI(Warp& w, const WgmmaOp& op, u64 desc, Ty ty, u32 row0, u32 rows, s16 (*out)[32]) {
  Desc d = decodeDesc(desc);
  visitOperand(d, false, row0, rows, [&](u32 i, u32 c, u32 a) {
    const u8* p = chunk(w, op, a);
    s16* o = out[i - row0] + c * 16;
    if (ty == Ty::S8)
      for (int e = 0; e < 16; ++e) o[e] = (s8)p[e];
    else
      for (int e = 0; e < 16; ++e) o[e] = p[e];
  });
}
void wgExec(Warp& w, WgmmaOp& op) {
  if (op.done) return;
  op.done = true;
  const WgX& X = *(const WgX*)op.I->x;
  const u32 r0 = (w.wid & 3) * 16, N = (u32)X.N, K = (u32)X.K;
  if (X.dt == Ty::S32) {
    alignas(32) static thread_local s16 A[16][32], B[256][32];
    if (X.rs) {
      for (int r = 0; r < 4; ++r) {
        const u32* s = w.regs + X.a[r];
        for (int l = 0; l < 32; ++l)
          for (int e = 0; e < 4; ++e) A[l / 4 + 8 * (r & 1)][(l % 4) * 4 + (r >> 1) * 16 + e] = elemI(X.at, s[l], e);
      }
    } else
      loadOperandI(w, op, op.descA, X.at, r0, 16, A);
    loadOperandI(w, op, op.descB, X.bt, 0, N, B);
    for (u32 j = 0; j < N / 8; ++j) {
      s32 P[16][8];
      for (u32 i = 0; i < 16; ++i) dots8<32>(A[i], B[j * 8], 32, P[i]);
      for (u32 r = 0; r < 4; ++r) {
        u32* d = w.regs + X.d[j * 4 + r];
        for (u32 l = 0; l < 32; ++l) {
          s64 v = (s64)P[l / 4 + 8 * (r >> 1)][(l % 4) * 2 + (r & 1)] + (op.scaleD ? (s64)(s32)d[l] : 0);
          d[l] = X.sat ? (u32)(s32)std::clamp<s64>(v, INT32_MIN, INT32_MAX) : (u32)v;
        }
      }
    }
  } else {
    alignas(32) static thread_local double A[16][32], B[32][256], C[16][256];
    const double sa = X.negA ? -1 : 1, sb = X.negB ? -1 : 1;
    if (X.rs) {
      const int E = 32 / tyBits(X.at);
      for (int r = 0; r < 4; ++r) {
        const u32* s = w.regs + X.a[r];
        for (int l = 0; l < 32; ++l)
          for (int e = 0; e < E; ++e)
            A[l / 4 + 8 * (r & 1)][(l % 4) * E + (r >> 1) * 4 * E + e] = sa * elemF(X.at, s[l], e);
      }
    } else
      loadOperandT(w, op, op.descA, X.trA, X.at, r0, 16, [&](u32 i, u32 k, double v) { A[i - r0][k] = sa * v; });
    loadOperandT(w, op, op.descB, X.trB, X.bt, 0, N, [&](u32 i, u32 k, double v) { B[k][i] = sb * v; });
    for (u32 i = 0; i < 16; ++i) {
      double* c = C[i];
      for (u32 n = 0; n < N; ++n) c[n] = 0;
      for (u32 k = 0; k < K; ++k) {
        const double a = A[i][k];
        const double* b = B[k];
        for (u32 n = 0; n < N; ++n) c[n] = __builtin_fma(a, b[n], c[n]);
      }
    }
    if (X.dt == Ty::F32) {
      for (u32 j = 0; j < N / 8; ++j)
        for (u32 r = 0; r < 4; ++r) {
          u32* d = w.regs + X.d[j * 4 + r];
          for (u32 l = 0; l < 32; ++l) {
            double v = C[l / 4 + 8 * (r >> 1)][j * 8 + (l % 4) * 2 + (r & 1)];
            if (op.scaleD) v += (double)bitsf(d[l]);
            d[l] = fbits(canonNan((float)v));
          }
        }
    } else {
      for (u32 j = 0; j < N / 8; ++j)
        for (u32 r = 0; r < 2; ++r) {
          u32* d = w.regs + X.d[j * 2 + r];
          for (u32 l = 0; l < 32; ++l) {
            double v0 = C[l / 4 + 8 * r][j * 8 + (l % 4) * 2], v1 = C[l / 4 + 8 * r][j * 8 + (l % 4) * 2 + 1];
            if (op.scaleD) {
              v0 += h2f((u16)d[l]);
              v1 += h2f((u16)(d[l] >> 16));
            }
            d[l] = (u32)d2h(v0) | (u32)d2h(v1) << 16;
          }
        }
    }
  }
  w.cl->progress++;
}
static void wgFree(Warp& w, const WgmmaOp& op) {
  const WgX& X = *(const WgX*)op.I->x;
  if (g_cfg.ckRegs) {
    for (u16 i : X.idD) w.wgBusyD[i]--;
    for (u16 i : X.idA) w.wgBusyA[i]--;
  }
}
void wgWait(Warp& w, u32 keep) {
  while (!w.wg.empty() && (s64)w.wg.front().group < (s64)w.wgGroup - (s64)keep) {
    WgmmaOp& op = w.wg.front();
    wgExec(w, op);
    wgFree(w, op);
    if (w.cl->race) raceAcquireAsync(w, op.clk);
    w.wg.pop_front();
    w.wgInflight--;
  }
}
void wgCheckTouch(Warp& w, u32 pc) {
  const auto& v = w.prog->wgTouch[pc];
  if (v.empty()) return;
  for (u16 x : v) {
    u16 id = x & 0x7fff;
    bool wr = x & 0x8000;
    if (w.wgBusyD[id] || (wr && w.wgBusyA[id]))
      report(
          w, pc, "wgmma-register",
          strf("%s a register of a wgmma still in flight (no wgmma.wait_group in between)", wr ? "writes" : "reads"));
  }
}
// Compiler-made copies after the fence are harmless: a move hands on the state of its source.
void wgDirtyStep(Warp& w, u32 pc) {
  const Program& P = *w.prog;
  if (P.regWr[pc].empty()) return;
  u8 d = 1;
  if (P.isMov[pc]) {
    d = 0;
    for (s32 s : P.regRd[pc]) d |= w.wgDirty[(size_t)s / 32];
  }
  for (s32 s : P.regWr[pc]) w.wgDirty[(size_t)s / 32] = d;
}
bool wgPeersReady(Warp& w, u32 target) {
  for (u32 k = w.wid & ~3u; k < (w.wid | 3u) + 1 && k < w.cta->warps.size(); ++k) {
    Warp& p = *w.cta->warps[k];
    if (!p.done && p.wgGroup < target) return false;
  }
  return true;
}
static void hwgmma(Warp& w, const Inst& I, u32 m) {
  if (!converge(w, m, w.live)) return;
  const WgX& X = *(const WgX*)I.x;
  WgmmaOp op;
  op.I = &I;
  op.pc = w.pc - 1;
  op.group = w.wgGroup;
  op.descA = X.rs ? 0 : src<u64>(w, X.descA)[0];
  op.descB = src<u64>(w, X.descB)[0];
  u32 p = (w.preds[X.scaleP] ^ (X.scaleNeg ? ~0u : 0)) & w.active;
  op.scaleD = p != 0;
  if (p && p != w.active) simFail(w, 719, "wgmma scale-d predicate differs between lanes");
  w.cl->st.wgmmaMacs += (u64)16 * X.N * X.K;
  if (g_cfg.ckRegs) {
    for (s32 d : X.d)
      if (w.wgDirty[(size_t)d / 32])
        report(w, w.pc - 1, "wgmma-fence", "accumulator register was modified without a wgmma.fence before this wgmma");
    for (u16 i : X.idD) w.wgBusyD[i]++;
    for (s32 a : X.a)
      if (w.wgDirty[(size_t)a / 32])
        report(w, w.pc - 1, "wgmma-fence", "A register was modified without a wgmma.fence before this wgmma");
    for (u16 i : X.idA) w.wgBusyA[i]++;
  }
  if (g_cfg.check) {
    std::vector<u64> vc, pvc;
    if (w.cl->race) op.clk = raceIssueAsync(w, vc, pvc);
    auto chk = [&](u64 desc, bool mn, u32 r0, u32 rows) {
      Desc d = decodeDesc(desc);
      visitOperand(d, mn, r0, rows, [&](u32, u32, u32 a) {
        a &= 0x3ffff;
        chunk(w, op, a);
        CTA& c = *w.cta;
        if (c.init.size())
          for (int k = 0; k < 16; ++k)
            if (!c.init[a + (u32)k]) {
              memset(&c.init[a], 1, 16);
              report(w, op.pc, "uninitialised",
                     strf("wgmma reads shared memory that was never written: offset %u", a - kSmemBase));
              break;
            }
        if (w.cl->race) raceAsyncAccess(w, c, a, 16, false, op.pc, op.clk, vc, pvc, true);
      });
    };
    if (w.tainted) {
      for (s32 r : X.a)
        if (getTaint(w, r)) taintReport(w, w.pc - 1, getTaint(w, r), "feed wgmma a value");
      for (s32 d : X.d) setTaint(w, d, 0, ~0u);
    }
    if (!X.rs) chk(op.descA, X.trA, (w.wid & 3) * 16, 16);
    chk(op.descB, X.trB, 0, (u32)X.N);
  }
  if (g_cfg.async == Config::EAGER) wgExec(w, op);
  w.wg.push_back(op);
  w.wgInflight++;
  if (g_cfg.async == Config::RANDOM && (w.cl->rnd() & 1)) {
    size_t n = w.cl->rnd() % (w.wg.size() + 1);
    for (size_t k = 0; k < n; ++k) wgExec(w, w.wg[k]);
  }
}
OP(wgmma) {
  std::string k = t.mod(1);
  t.ignore({"sync", "aligned"});
  if (k == "fence") {
    auto h = [](Warp& w, const Inst&, u32 m) {
      if (!converge(w, m, w.live)) return;
      if (g_cfg.ckRegs) std::fill(w.wgDirty.begin(), w.wgDirty.end(), 0);
    };
    t.out(h, C_WGSYNC);
    return;
  }
  if (k == "commit_group") {
    auto h = [](Warp& w, const Inst&, u32 m) {
      if (!converge(w, m, w.live)) return;
      w.wgGroup++;
      if (w.cl->race) w.wgCommitClk.push_back((u32)raceAsyncClk(w));
    };
    t.out(h, C_WGSYNC);
    return;
  }
  if (k == "wait_group") {
    s64 n = t.op(0).imm;
    auto h = [](Warp& w, const Inst& I, u32 m) {
      if (!converge(w, m, w.live)) return;
      s64 target = (s64)w.wgGroup - I.imm;
      if (target > 0) {
        // wgmma is an operation of four warps: a group is complete only when all of them have issued it
        if (!wgPeersReady(w, (u32)target)) {
          w.frags[w.cur].need = (u32)target;
          w.pc--;
          blockFrag(w, F_WG);
          return;
        }
        for (u32 k = w.wid & ~3u; k < (w.wid | 3u) + 1 && k < w.cta->warps.size(); ++k) {
          Warp& p = *w.cta->warps[k];
          for (auto& op : p.wg) {
            if ((s64)op.group >= target) break;
            wgExec(p, op);
          }
          if (w.cl->race && p.wgCommitClk.size() >= (size_t)target)
            raceAcquirePeer(w, p, p.wgCommitClk[(size_t)target - 1]);
        }
      }
      wgWait(w, (u32)I.imm);
    };
    Inst& I = t.out(h, C_WGSYNC);
    I.imm = n;
    return;
  }
  if (k != "mma_async") t.err("wgmma operation (sparse forms are not supported)");
  if (t.has("sp")) t.err("sparse wgmma is not supported");
  auto* X = new WgX;
  int M = 0;
  bool ok = false;
  for (size_t i = 1; i < t.in->mods.size(); ++i)
    if (parseShape(t.in->mods[i], M, X->N, X->K)) {
      t.used[i] = 1;
      ok = true;
    }
  if (!ok || M != 64 || X->N % 8 || X->N > 256) t.err("wgmma shape");
  X->sat = t.has("satfinite");
  auto ty = t.types();
  if (ty.size() != 3) t.err("wgmma types");
  X->dt = ty[0];
  X->at = ty[1];
  X->bt = ty[2];
  if (X->at == Ty::B1) t.err("single-bit wgmma is not supported");
  {
    auto fp8 = [](Ty x) { return x == Ty::E4M3 || x == Ty::E5M2; };
    auto i8 = [](Ty x) { return x == Ty::S8 || x == Ty::U8; };
    bool ok = X->dt == Ty::S32 ? i8(X->at) && i8(X->bt)
              : X->dt == Ty::F32
                  ? (fp8(X->at) && fp8(X->bt)) ||
                        (X->at == X->bt && (X->at == Ty::F16 || X->at == Ty::BF16 || X->at == Ty::TF32))
                  : X->dt == Ty::F16 && ((fp8(X->at) && fp8(X->bt)) || (X->at == Ty::F16 && X->bt == Ty::F16));
    if (!ok) t.err("wgmma types");
    if (X->dt == Ty::S32 && X->N > 24 && X->N % 16)
      t.err(strf("integer wgmma has no N of %d: 8, 24 and multiples of 16", X->N));
  }
  if (X->K * tyBits(X->at) != 256) t.err("wgmma shape");
  for (auto& o : t.op(0).v) {
    X->d.push_back(t.D(o, 4));
    X->idD.push_back((u16)t.wgReg[o.reg]);
  }
  if ((int)X->d.size() != X->N / (X->dt == Ty::F16 ? 4 : 2)) t.err("wgmma accumulator count");
  const Operand& a = t.op(1);
  if (a.k == Operand::VEC) {
    X->rs = true;
    for (auto& o : a.v) {
      X->a.push_back(t.S(o, Ty::B32));
      if (o.k == Operand::REG) X->idA.push_back((u16)t.wgReg[o.reg]);
    }
    if (X->a.size() != 4) t.err("wgmma A registers");
    for (s32 s : X->a)
      if (s < 0) t.err("wgmma A operand must be registers");
  } else
    X->descA = t.S(a, Ty::B64);
  X->descB = t.S(2, Ty::B64);
  X->scaleP = t.pred(t.op(3), X->scaleNeg);
  size_t q = 4;
  auto imm = [&](size_t i) {
    const Operand& o = t.op(i);
    if (o.k != Operand::INT) t.err("immediate expected");
    return o.imm;
  };
  if (X->dt != Ty::S32 && t.nops() > 4) {
    X->negA = imm(q++) == -1;
    X->negB = imm(q++) == -1;
    if (tyBits(X->at) == 16) {
      if (!X->rs) X->trA = imm(q++) == 1;
      X->trB = imm(q++) == 1;
    }
  }
  if (q != t.nops()) t.err("wgmma operand count");
  Inst& I = t.out(hwgmma, C_WGMMA);
  I.x = X;
}

}  // namespace ptxsim

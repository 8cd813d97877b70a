// mma.sync.
#include "instructions/tensor_elements.h"

namespace ptxsim {

struct MmaX {
  int M, N, K;
  Ty dt, at, bt, ct;
  bool sat = false;
  int bop = 0;
  std::vector<s32> d, a, b, c;
};

// Spread never-written lanes: A rows and B columns reach the results of those rows and columns.
static void mmaTaint(Warp& w, const MmaX& X) {
  w.taintHandled = true;
  u32 out[4] = {};
  const bool packed = X.d.size() == 2 && X.dt == Ty::F16;
  auto grp = [](u32 m) {
    u32 r = 0;
    for (int g = 0; g < 8; ++g)
      if (m >> (4 * g) & 15) r |= 15u << (4 * g);
    return r;
  };
  for (size_t r = 0; r < X.a.size(); ++r) {
    u32 g = grp(getTaint(w, X.a[r]));
    if (X.M == 16) {
      if (packed)
        out[r & 1] |= g;
      else {
        out[(r & 1) * 2] |= g;
        out[(r & 1) * 2 + 1] |= g;
      }
    } else {
      out[0] |= g;
      out[1] |= g;
    }
  }
  for (size_t r = 0; r < X.b.size(); ++r) {
    u32 g = getTaint(w, X.b[r]);
    for (int n = 0; n < 8; ++n)
      if (g >> (4 * n) & 15) {
        u32 lanes = 0x11111111u << (n / 2);
        if (packed) {
          out[0] |= lanes;
          out[1] |= lanes;
        } else {
          out[n & 1] |= lanes;
          out[2 + (n & 1)] |= lanes;
        }
      }
  }
  for (size_t r = 0; r < X.c.size(); ++r) out[r] |= getTaint(w, X.c[r]);
  for (size_t r = 0; r < X.d.size(); ++r) setTaint(w, X.d[r], out[r], ~0u);
}
static void hmmaF(Warp& w, const Inst& I, u32 m) {
  if (!converge(w, m, w.live)) return;
  const MmaX& X = *(const MmaX*)I.x;
  if (w.tainted) mmaTaint(w, X);
  const int E = 32 / tyBits(X.at), K = X.K;
  double A[16][64], B[64][8], C[16][8];
  for (size_t r = 0; r < X.a.size(); ++r) {
    const u32* s = srcw(w, X.a[r]);
    for (int l = 0; l < 32; ++l) {
      int row = l / 4 + 8 * (r & 1), k0 = (l % 4) * E + (int)(r >> 1) * 4 * E;
      for (int e = 0; e < E; ++e) A[row][k0 + e] = elemF(X.at, s[l], e);
    }
  }
  for (size_t r = 0; r < X.b.size(); ++r) {
    const u32* s = srcw(w, X.b[r]);
    for (int l = 0; l < 32; ++l) {
      int k0 = (l % 4) * E + (int)r * 4 * E;
      for (int e = 0; e < E; ++e) B[k0 + e][l / 4] = elemF(X.bt, s[l], e);
    }
  }
  const bool h = X.ct == Ty::F16;
  if (!h) {
    for (int r = 0; r < 4; ++r) {
      const u32* s = srcw(w, X.c[r]);
      for (int l = 0; l < 32; ++l) C[l / 4 + 8 * (r >> 1)][(l % 4) * 2 + (r & 1)] = bitsf(s[l]);
    }
  } else
    for (int r = 0; r < 2; ++r) {
      const u32* s = srcw(w, X.c[r]);
      for (int l = 0; l < 32; ++l) {
        C[l / 4 + 8 * r][(l % 4) * 2] = h2f((u16)s[l]);
        C[l / 4 + 8 * r][(l % 4) * 2 + 1] = h2f((u16)(s[l] >> 16));
      }
    }
  for (int i = 0; i < 16; ++i) {
    double acc[8] = {};
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < 8; ++n) acc[n] = __builtin_fma(A[i][k], B[k][n], acc[n]);
    for (int n = 0; n < 8; ++n) C[i][n] += acc[n];
  }
  if (X.dt == Ty::F32) {
    for (int r = 0; r < 4; ++r)
      for (int l = 0; l < 32; ++l)
        w.regs[X.d[r] + l] = fbits(canonNan((float)C[l / 4 + 8 * (r >> 1)][(l % 4) * 2 + (r & 1)]));
  } else
    for (int r = 0; r < 2; ++r)
      for (int l = 0; l < 32; ++l)
        w.regs[X.d[r] + l] = (u32)d2h(C[l / 4 + 8 * r][(l % 4) * 2]) | (u32)d2h(C[l / 4 + 8 * r][(l % 4) * 2 + 1])
                                                                           << 16;
  w.cl->st.mmaMacs += (u64)X.M * X.N * K;
}
static void hmmaI(Warp& w, const Inst& I, u32 m) {
  if (!converge(w, m, w.live)) return;
  const MmaX& X = *(const MmaX*)I.x;
  if (w.tainted) mmaTaint(w, X);
  const int E = 32 / tyBits(X.at), K = X.K;
  alignas(32) s16 A[16][64], B[8][64];
  for (size_t r = 0; r < X.a.size(); ++r) {
    const u32* s = srcw(w, X.a[r]);
    for (int i = 0; i < 8; ++i)
      widen(X.at, s + 4 * i, &A[X.M == 8 ? i : i + 8 * (int)(r & 1)][(X.M == 8 ? (int)r : (int)(r >> 1)) * 4 * E]);
  }
  for (size_t r = 0; r < X.b.size(); ++r) {
    const u32* s = srcw(w, X.b[r]);
    for (int i = 0; i < 8; ++i) widen(X.bt, s + 4 * i, &B[i][(int)r * 4 * E]);
  }
  s32 P[16][8];
  for (int i = 0; i < X.M; ++i) dots8<64>(A[i], B[0], K, P[i]);
  u32 out[4][32];
  for (size_t r = 0; r < X.c.size(); ++r) {
    const u32* s = srcw(w, X.c[r]);
    for (int l = 0; l < 32; ++l) {
      const s32 p = P[l / 4 + 8 * (int)(r >> 1)][(l % 4) * 2 + (int)(r & 1)];
      out[r][l] = X.sat ? (u32)(s32)std::clamp<s64>((s64)(s32)s[l] + p, INT32_MIN, INT32_MAX) : s[l] + (u32)p;
    }
  }
  for (size_t r = 0; r < X.d.size(); ++r) memcpy(w.regs + X.d[r], out[r], 128);
  w.cl->st.mmaMacs += (u64)X.M * X.N * K;
}
static void hmmaB(Warp& w, const Inst& I, u32 m) {  // single-bit
  if (!converge(w, m, w.live)) return;
  const MmaX& X = *(const MmaX*)I.x;
  if (w.tainted) mmaTaint(w, X);
  u32 A[16][8], B[8][8];
  const int W = X.K / 32;
  for (size_t r = 0; r < X.a.size(); ++r) {
    const u32* s = srcw(w, X.a[r]);
    for (int l = 0; l < 32; ++l) {
      int row = X.M == 8 ? l / 4 : l / 4 + 8 * (int)(r & 1);
      A[row][(l % 4) + (X.M == 8 ? 0 : (int)(r >> 1)) * 4] = s[l];
    }
  }
  for (size_t r = 0; r < X.b.size(); ++r) {
    const u32* s = srcw(w, X.b[r]);
    for (int l = 0; l < 32; ++l) B[l / 4][(l % 4) + (int)r * 4] = s[l];
  }
  u32 out[4][32];
  for (size_t r = 0; r < X.c.size(); ++r) {
    const u32* s = srcw(w, X.c[r]);
    for (int l = 0; l < 32; ++l) {
      u32 v = s[l];
      int i = l / 4 + 8 * (int)(r >> 1), n = (l % 4) * 2 + (int)(r & 1);
      for (int q = 0; q < W; ++q) v += (u32)__builtin_popcount(X.bop ? A[i][q] & B[n][q] : A[i][q] ^ B[n][q]);
      out[r][l] = v;
    }
  }
  for (size_t r = 0; r < X.d.size(); ++r) memcpy(w.regs + X.d[r], out[r], 128);
  w.cl->st.mmaMacs += (u64)X.M * X.N * X.K;
}
static void hmmaD(Warp& w, const Inst& I, u32 m) {  // m8n8k4 f64
  if (!converge(w, m, w.live)) return;
  const MmaX& X = *(const MmaX*)I.x;
  if (w.tainted) mmaTaint(w, X);
  double A[8][4], B[4][8];
  for (int l = 0; l < 32; ++l) {
    A[l / 4][l % 4] = bitsd(src<u64>(w, X.a[0])[l]);
    B[l % 4][l / 4] = bitsd(src<u64>(w, X.b[0])[l]);
  }
  u64 out[2][32];
  for (int r = 0; r < 2; ++r)
    for (int l = 0; l < 32; ++l) {
      double v = bitsd(src<u64>(w, X.c[r])[l]);
      for (int k = 0; k < 4; ++k) v = __builtin_fma(A[l / 4][k], B[k][(l % 4) * 2 + r], v);
      out[r][l] = dbits(v);
    }
  for (int r = 0; r < 2; ++r) memcpy(dst<u64>(w, X.d[r]), out[r], 256);
}
OP(mma) {
  if (t.in->mods.size() > 1 && t.in->mods[1].rfind("sp", 0) == 0) t.err("sparse mma is not supported");
  t.ignore({"sync", "aligned"});
  auto* X = new MmaX;
  bool ok = false;
  for (size_t i = 1; i < t.in->mods.size(); ++i)
    if (parseShape(t.in->mods[i], X->M, X->N, X->K)) {
      t.used[i] = 1;
      ok = true;
    }
  if (!ok) t.err("mma shape");
  if (!t.has("row") || !t.has("col")) t.err("only mma .row.col is supported");
  X->sat = t.has("satfinite");
  if (t.has("and")) X->bop = 1;
  t.ignore({"xor", "popc"});
  auto ty = t.types();
  if (ty.size() != 4) t.err("mma types");
  X->dt = ty[0];
  X->at = ty[1];
  X->bt = ty[2];
  X->ct = ty[3];
  auto srcs = [&](size_t k, Ty e, std::vector<s32>& v) {
    const Operand& o = t.op(k);
    if (o.k == Operand::VEC)
      for (auto& x : o.v) v.push_back(t.S(x, e));
    else
      v.push_back(t.S(o, e));
  };
  bool f64 = X->dt == Ty::F64;
  Ty rt = f64 ? Ty::F64 : Ty::B32;
  {
    const Operand& o = t.op(0);
    if (o.k == Operand::VEC)
      for (auto& x : o.v) X->d.push_back(t.D(x, f64 ? 8 : 4));
    else
      X->d.push_back(t.D(o, f64 ? 8 : 4));
  }
  srcs(1, rt, X->a);
  srcs(2, rt, X->b);
  {
    const Operand& o = t.op(3);
    auto one = [&](const Operand& x) {
      X->c.push_back(x.k == Operand::INT && X->ct == Ty::F32 && x.imm == 0
                         ? t.konst(0, 4)
                         : t.S(x, x.k == Operand::FLT ? Ty::F32 : rt));
    };
    if (o.k == Operand::VEC)
      for (auto& x : o.v) one(x);
    else
      one(o);
  }
  Handler h;
  size_t na, nb, nc;
  if (f64) {
    if (X->M != 8 || X->N != 8 || X->K != 4) t.err("f64 mma shape");
    h = hmmaD;
    na = nb = 1;
    nc = 2;
  } else {
    int bits = tyBits(X->at);
    if (bits != tyBits(X->bt)) t.err("mma operand types");
    na = (size_t)(X->M * X->K * bits / 1024);
    nb = (size_t)(X->N * X->K * bits / 1024);
    if (X->N != 8 || (X->M != 16 && X->M != 8) || na == 0 || nb == 0) t.err("mma shape is not supported");
    bool fl = X->at == Ty::F16 || X->at == Ty::BF16 || X->at == Ty::TF32 || X->at == Ty::E4M3 || X->at == Ty::E5M2;
    if (fl && X->M != 16) t.err("mma shape is not supported");
    nc = X->dt == Ty::F16 ? 2 : (size_t)X->M / 4;
    h = fl ? hmmaF : X->at == Ty::B1 ? hmmaB : hmmaI;
    if (fl && X->dt != X->ct) t.err("mma with different C and D types is not supported");
  }
  if (X->a.size() != na || X->b.size() != nb || X->c.size() != nc || X->d.size() != nc) t.err("mma operand count");
  Inst& I = t.out(h, C_MMA);
  I.x = X;
}

}  // namespace ptxsim

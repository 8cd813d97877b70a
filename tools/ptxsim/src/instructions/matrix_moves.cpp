// ldmatrix, stmatrix, movmatrix.
#include "instructions/memory_operands.h"

namespace ptxsim {

// ---- ldmatrix / stmatrix ----
static void hldmatrix(Warp& w, const Inst& I, u32 m) {
  if (!converge(w, m, w.live)) return;
  u32 addr[32];
  FOR_LANES(i, m) addr[i] = (u32)laneAddr(w, I, (int)i);
  u32 tmp[4][32], bad[4] = {};
  const int nm = I.n;
  for (int q = 0; q < nm; ++q) {
    u8 mat[8][16];
    for (int r = 0; r < 8; ++r) {
      u32 a = addr[q * 8 + r];
      if (a & 15) misaligned(w, q * 8 + r, a, 16);
      u8* p = smemPtr(w, a, 16, "ldmatrix");
      if (g_cfg.check) {
        noteShared(w, *ctaOfSmem(w, a), a & 0xffffff, 16, false, w.pc - 1);
        if (w.taintNext) {
          w.taintNext = false;
          bad[q] |= I.fl ? 0x11111111u << (r / 2) : 15u << (r * 4);
        }
      }
      memcpy(mat[r], p, 16);
    }
    for (int l = 0; l < 32; ++l) {
      if (!I.fl)
        memcpy(&tmp[q][l], &mat[l / 4][(l % 4) * 4], 4);
      else {
        u16 lo, hi;
        memcpy(&lo, &mat[(l % 4) * 2][(l / 4) * 2], 2);
        memcpy(&hi, &mat[(l % 4) * 2 + 1][(l / 4) * 2], 2);
        tmp[q][l] = lo | (u32)hi << 16;
      }
    }
    if (g_cfg.stats) {
      u32 aa[32];
      for (int r = 0; r < 8; ++r) aa[r] = addr[q * 8 + r];
      statShared(w, aa, 0xff, 16, false);
    }
  }
  for (int q = 0; q < nm; ++q)
    if (I.v[q] >= 0) memcpy(w.regs + I.v[q], tmp[q], 128);
  if (g_cfg.ckUninit) {
    bool any = w.tainted;
    for (u32 b : bad) any |= b != 0;
    if (any) {
      for (int q = 0; q < nm; ++q) setTaint(w, I.v[q], bad[q], ~0u);
      w.taintHandled = true;
    }
  }
}
static void hstmatrix(Warp& w, const Inst& I, u32 m) {
  if (!converge(w, m, w.live)) return;
  const int nm = I.n;
  for (int q = 0; q < nm; ++q) {
    u8 mat[8][16];
    const u32* s = srcw(w, I.v[q]);
    for (int l = 0; l < 32; ++l) {
      if (!I.fl)
        memcpy(&mat[l / 4][(l % 4) * 4], &s[l], 4);
      else {
        u16 lo = (u16)s[l], hi = (u16)(s[l] >> 16);
        memcpy(&mat[(l % 4) * 2][(l / 4) * 2], &lo, 2);
        memcpy(&mat[(l % 4) * 2 + 1][(l / 4) * 2], &hi, 2);
      }
    }
    u32 aa[32];
    for (int r = 0; r < 8; ++r) {
      u32 a = (u32)laneAddr(w, I, q * 8 + r);
      aa[r] = a;
      if (a & 15) misaligned(w, q * 8 + r, a, 16);
      u8* p = smemPtr(w, a, 16, "stmatrix");
      if (g_cfg.check) noteShared(w, *ctaOfSmem(w, a), a & 0xffffff, 16, true, w.pc - 1);
      memcpy(p, mat[r], 16);
      if (w.tainted)
        if (u32 tt = getTaint(w, I.v[q])) {
          CTA* c = ctaOfSmem(w, a);
          for (int l = 0; l < 32 && !c->init.empty(); ++l)
            if (tt >> l & 1) {
              if (!I.fl && l / 4 == r) memset(&c->init[(a & 0xffffff) + (u32)(l % 4) * 4], 0, 4);
              if (I.fl && (l % 4) == r / 2) memset(&c->init[(a & 0xffffff) + (u32)(l / 4) * 2], 0, 2);
            }
        }
    }
    if (g_cfg.stats) statShared(w, aa, 0xff, 16, true);
  }
  w.cl->progress++;
}
static void hmovmatrix(Warp& w, const Inst& I,
                       u32 m) {  // transpose of an 8x8 matrix of 16-bit elements held in fragments
  if (!converge(w, m, w.live)) return;
  if (w.active != ~0u) simFail(w, 719, "movmatrix with lanes %s only", laneStr(w.active).c_str());
  const u32* s = srcw(w, I.a);
  u32 o[32];
  auto el = [&](int r, int c) { return s[r * 4 + c / 2] >> (16 * (c & 1)) & 0xffff; };
  for (int l = 0; l < 32; ++l) o[l] = el((l % 4) * 2, l / 4) | el((l % 4) * 2 + 1, l / 4) << 16;
  if (w.tainted) {
    const u32 t = getTaint(w, I.a);
    u32 x = 0;
    for (int l = 0; l < 32; ++l) x |= (u32)((t >> ((l % 4) * 8 + l / 8) | t >> ((l % 4) * 8 + 4 + l / 8)) & 1) << l;
    setTaint(w, I.d, x, ~0u);
    w.taintHandled = true;
  }
  memcpy(w.regs + I.d, o, 128);
}
OP(movmatrix) {
  t.ignore({"sync", "aligned", "b16"});
  if (!t.has("m8n8") || !t.has("trans")) t.err("only movmatrix .m8n8.trans.b16 exists");
  s32 a = t.S(1, Ty::B32), d = t.D(0, 4);
  Inst& I = t.out(hmovmatrix, C_MOVMATRIX);
  I.a = a;
  I.d = d;
}
static int matCount(Tr& t) {
  for (const char* s : {"m16n16", "m8n16", "m16n8"})
    if (t.has(s)) t.err(strf("matrix shape .%s needs sm_100", s));
  t.ignore({"sync", "aligned", "m8n8", "shared", "shared::cta", "b16"});
  if (t.has("x4")) return 4;
  if (t.has("x2")) return 2;
  t.has("x1");
  return 1;
}
OP(ldmatrix) {
  int n = matCount(t);
  bool tr = t.has("trans");
  std::vector<s32> v;
  const Operand& d = t.op(0);
  if (d.k == Operand::VEC)
    for (auto& o : d.v) v.push_back(o.k == Operand::SINK ? -1 : t.D(o, 4));
  else
    v.push_back(t.D(d, 4));
  if ((int)v.size() != n) t.err("ldmatrix operand count");
  const s32* av = t.aux(v);
  Inst& I = t.out(hldmatrix, C_LDMATRIX);
  I.v = av;
  I.n = (u8)n;
  I.fl = tr;
  t.addr(I, t.op(1));
}
OP(stmatrix) {
  int n = matCount(t);
  bool tr = t.has("trans");
  std::vector<s32> v;
  const Operand& d = t.op(1);
  if (d.k == Operand::VEC)
    for (auto& o : d.v) v.push_back(t.S(o, Ty::B32));
  else
    v.push_back(t.S(d, Ty::B32));
  if ((int)v.size() != n) t.err("stmatrix operand count");
  const s32* av = t.aux(v);
  Inst& I = t.out(hstmatrix, C_STMATRIX);
  I.v = av;
  I.n = (u8)n;
  I.fl = tr;
  t.addr(I, t.op(0));
}

}  // namespace ptxsim

// State spaces, cache operators and addresses of memory instructions.
#pragma once
#include "translate/translator.h"

namespace ptxsim {

inline Space parseSpace(Tr& t) {
  if (t.hasAny({"global"})) return Space::GLOBAL;
  if (t.hasAny({"shared", "shared::cta"})) return Space::SHARED;
  if (t.has("shared::cluster")) return Space::SHARED_CLUSTER;
  if (t.has("local")) return Space::LOCAL;
  if (t.hasAny({"param", "param::entry", "param::func"})) return Space::PARAM;
  if (t.has("const")) return Space::CONST;
  return Space::GENERIC;
}
inline bool cacheMods(Tr& t) {  // returns true for accesses another thread may be changing
  bool v = t.hasAny({"volatile", "acquire", "relaxed", "release", "mmio"});
  t.ignore({"weak", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "gpu", "cta", "sys", "cluster"});
  for (size_t i = 1; i < t.in->mods.size(); ++i) {
    auto& m = t.in->mods[i];
    if (m.rfind("L1::", 0) == 0 || m.rfind("L2::", 0) == 0) t.used[i] = 1;
  }
  return v;
}
inline int parseVec(Tr& t) {
  if (t.has("v2")) return 2;
  if (t.has("v4")) return 4;
  if (t.has("v8")) return 8;
  return 1;
}
inline Cls memCls(Space s, bool st) {
  switch (s) {
    case Space::GLOBAL: return st ? C_STG : C_LDG;
    case Space::SHARED:
    case Space::SHARED_CLUSTER: return st ? C_STS : C_LDS;
    case Space::GENERIC: return st ? C_STG : C_LDG;
    case Space::PARAM: return C_PARAM;
    default: return C_LDOTHER;
  }
}
inline u64 laneAddr(const Warp& w, const Inst& I, int i) {
  return (I.t2 ? ((const u64*)srcw(w, I.a))[i] : srcw(w, I.a)[i]) + (u64)I.imm;
}

inline void statAccess(Warp& w, const Inst& I, Space sp, u32 m, u32 bytes, bool wr) {
  u64 a[32];
  u32 sa[32], sm = 0, gm = 0;
  FOR_LANES(i, m) {
    u64 x = laneAddr(w, I, (int)i);
    if (sp == Space::SHARED || sp == Space::SHARED_CLUSTER) {
      sa[i] = (u32)x;
      sm |= 1u << i;
    } else if (sp == Space::GENERIC && x - g_sharedWin < kWin) {
      sa[i] = (u32)(x - g_sharedWin);
      sm |= 1u << i;
    } else if (sp == Space::GLOBAL || (sp == Space::GENERIC && x - g_localWin >= kWin)) {
      a[i] = x;
      gm |= 1u << i;
    }
  }
  if (sm) statShared(w, sa, sm, bytes, wr);
  if (gm) statGlobal(w, a, gm, bytes, wr ? GU_STORE : GU_LOAD);
}

inline void bulkAddr(Tr& t, const Operand& o, s32& s, s64& off, bool& w8) {
  if (o.k != Operand::ADDR) t.err("address expected");
  off = o.imm;
  const Operand& b = o.v[0];
  if (b.k == Operand::REG) {
    s = t.slot[b.reg];
    w8 = tyBits(t.regTy[b.reg]) > 32;
  } else {
    s = t.konst((u64)b.imm, 8);
    w8 = true;
  }
}

}  // namespace ptxsim

// Memory instructions: ld/st/atom/red, cp.async, ldmatrix/stmatrix, mbarrier, bulk and tensor copies.
#include "tr.h"
#include "tmap.h"

namespace ptxsim {
#define OP(name) static void op_##name(Tr& t)
u64 g_sharedWin, g_localWin;

CTA* ctaOfSmem(Warp& w, u32 addr) {
  u32 r = addr >> 24;
  if (r == 0) return w.cta;
  if (r - 1 >= w.cl->ctas.size())
    simFail(w, 700, "shared::cluster address 0x%x names CTA rank %u of a cluster of %zu", addr, r - 1,
            w.cl->ctas.size());
  return w.cl->ctas[r - 1];
}
u8* smemPtr(Warp& w, u32 addr, u32 bytes, const char* what) {
  CTA* c = ctaOfSmem(w, addr);
  u32 off = addr & 0xffffff;
  if (off < kSmemBase || off + bytes > c->smemSize)
    simFail(w, 700,
            "%s: shared memory access out of bounds: offset %d (%u bytes), CTA has %u bytes (static %u + dynamic %u)",
            what, (int)off - (int)kSmemBase, bytes, c->smemSize - kSmemBase, w.prog->staticSmem, c->L->dynSmem);
  return c->smem + off;
}
void markShared(CTA& c, u32 off, u32 bytes) {
  if (!c.init.empty()) memset(&c.init[off], 1, bytes);
}
static void readShared(Warp& w, CTA& c, u32 off, u32 bytes, u32 pc, const char* what) {
  if (c.init.empty()) return;
  for (u32 i = 0; i < bytes; ++i)
    if (!c.init[off + i]) {
      if (!what) {
        w.taintNext = true;
        w.taintWhat = strf("shared memory (offset %u)", off - kSmemBase);
        w.taintPc = pc;
        return;
      }  // a register load: reported when the value is used
      memset(&c.init[off], 1, bytes);  // one report per place
      report(w, pc, "uninitialised",
             strf("%s reads shared memory that was never written: offset %u (%u bytes)", what, off - kSmemBase, bytes));
      return;
    }
}
static inline void noteShared(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc) {
  if (!g_cfg.check) return;
  if (write)
    markShared(c, off, bytes);
  else
    readShared(w, c, off, bytes, pc, nullptr);
  if (w.cl->race) raceAccess(w, c, off, bytes, write, pc);
}
u8* resolve(Warp& w, int lane, Space sp, u64 addr, u32 bytes, bool write) {
  switch (sp) {
    case Space::GENERIC:
    case Space::PARAM:
      if (addr - g_sharedWin < kWin) {
        addr -= g_sharedWin;
        goto shared;
      }
      if (addr - g_localWin < kWin) {
        addr -= g_localWin;
        goto local;
      }
      [[fallthrough]];
    case Space::GLOBAL:
    case Space::CONST:
      if (g_cfg.ckOob)
        checkGlobal(w, addr, bytes, write, lane);
      else if (addr < 4096)
        simFail(w, 700, "lane %d: %s of address 0x%llx (null pointer?)", lane, write ? "store" : "load",
                (unsigned long long)addr);
      return (u8*)addr;
    case Space::SHARED:
    case Space::SHARED_CLUSTER:
    shared:
      {
        u8* p = smemPtr(w, (u32)addr, bytes, write ? "store" : "load");
        if (g_cfg.check) {
          CTA* c = ctaOfSmem(w, (u32)addr);
          noteShared(w, *c, (u32)addr & 0xffffff, bytes, write, w.pc - 1);
        }
        return p;
      }
    case Space::LOCAL:
    local:
      if (addr + bytes > w.localBytes)
        simFail(w, 700, "lane %d: local memory access out of bounds: offset %lld of %u bytes", lane, (long long)addr,
                w.localBytes);
      return w.local + (size_t)lane * w.localBytes + addr;
    default: simFail(w, 719, "bad state space");
  }
}

static Space parseSpace(Tr& t) {
  if (t.hasAny({"global"})) return Space::GLOBAL;
  if (t.hasAny({"shared", "shared::cta"})) return Space::SHARED;
  if (t.has("shared::cluster")) return Space::SHARED_CLUSTER;
  if (t.has("local")) return Space::LOCAL;
  if (t.hasAny({"param", "param::entry", "param::func"})) return Space::PARAM;
  if (t.has("const")) return Space::CONST;
  return Space::GENERIC;
}
static bool cacheMods(Tr& t) {  // returns true for accesses another thread may be changing
  bool v = t.hasAny({"volatile", "acquire", "relaxed", "release", "mmio"});
  t.ignore({"weak", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "gpu", "cta", "sys", "cluster"});
  for (size_t i = 1; i < t.in->mods.size(); ++i) {
    auto& m = t.in->mods[i];
    if (m.rfind("L1::", 0) == 0 || m.rfind("L2::", 0) == 0) t.used[i] = 1;
  }
  return v;
}
static int parseVec(Tr& t) {
  if (t.has("v2")) return 2;
  if (t.has("v4")) return 4;
  if (t.has("v8")) return 8;
  return 1;
}
static Cls memCls(Space s, bool st) {
  switch (s) {
    case Space::GLOBAL: return st ? C_STG : C_LDG;
    case Space::SHARED:
    case Space::SHARED_CLUSTER: return st ? C_STS : C_LDS;
    case Space::GENERIC: return st ? C_STG : C_LDG;
    default: return C_LDOTHER;
  }
}
static inline u64 laneAddr(const Warp& w, const Inst& I, int i) {
  return (I.t2 ? ((const u64*)srcw(w, I.a))[i] : srcw(w, I.a)[i]) + (u64)I.imm;
}

static void statAccess(Warp& w, const Inst& I, Space sp, u32 m, u32 bytes, bool wr) {
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
void statShared(Warp& w, const u32* addr, u32 mask, u32 bytes, bool write) {
  Stats& s = w.cl->st;
  // lanes are served in groups so that one pass moves at most 128 bytes
  int per = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  s.smemReq++;
  (write ? s.smemSt : s.smemLd) += (u64)__builtin_popcount(mask) * bytes;
  for (int g = 0; g < 32; g += per) {
    u32 words[32][16];
    int cnt[32] = {};
    bool any = false;
    for (int i = g; i < g + per; ++i)
      if (mask >> i & 1)
        for (u32 b = 0; b < bytes; b += 4) {
          u32 wd = (addr[i] + b) >> 2, bank = wd & 31;
          bool dup = false;
          any = true;
          for (int k = 0; k < cnt[bank] && k < 16; ++k)
            if (words[bank][k] == wd) dup = true;
          if (!dup) {
            if (cnt[bank] < 16) words[bank][cnt[bank]] = wd;
            cnt[bank]++;
          }
        }
    int mx = 0;
    for (int b = 0; b < 32; ++b) mx = std::max(mx, cnt[b]);
    s.smemWavefronts += mx;
    if (any) s.smemIdeal += 1;
  }
}
// Without a model of the L1 cache: |l2Load| counts every request's sectors (nothing hits L1), |l2Unique| each sector
// once per CTA (everything hits).
void statGlobal(Warp& w, const u64* addr, u32 mask, u32 bytes, GlobalUse use) {
  Stats& s = w.cl->st;
  u64 sec[512];
  int n = 0;
  FOR_LANES(i, mask) for (u64 x = addr[i] >> 5; x <= (addr[i] + bytes - 1) >> 5; ++x) {
    bool d = false;
    for (int k = n; k-- > 0;)
      if (sec[k] == x) {
        d = true;
        break;
      }
    if (!d && n < 512) sec[n++] = x;
  }
  u64 b = (u64)__builtin_popcount(mask) * bytes;
  if (use == GU_STORE) {
    s.gst += b;
    s.gstSectors += n;
    s.gstReq++;
    return;
  }
  s.gld += b;
  s.gldSectors += n;
  s.gldReq++;
  w.cta->l2Load += 32ull * (u64)n;
  if (use == GU_ASYNC) {
    s.l2CpAsync += 32ull * (u64)n;
    return;
  }
  s.l2Load += 32ull * (u64)n;
  for (int k = 0; k < n; ++k)
    if (w.cta->sectors.add(sec[k])) s.l2Unique += 32;
}
[[noreturn]] static void misaligned(Warp& w, int lane, u64 a, u32 n) {
  simFail(w, 716, "lane %d: misaligned address 0x%llx for a %u-byte access", lane, (unsigned long long)a, n);
}

// fl: bit0 = sign extend to 64, bit1: sign extend, bit2: volatile; e = Space; c = element bytes
template <int ES>
static void hld(Warp& w, const Inst& I, u32 m) {
  const u32 tot = ES * I.n;
  const Space sp = (Space)I.e;
  if (g_cfg.stats) statAccess(w, I, sp, m, tot, false);
  u32 lt = 0;
  FOR_LANES(i, m) {
    u64 a = laneAddr(w, I, (int)i);
    if (a & (tot - 1)) misaligned(w, (int)i, a, tot);
    const u8* p = resolve(w, (int)i, sp, a, tot, false);
    if (w.taintNext) {
      w.taintNext = false;
      lt |= 1u << i;
    }
    for (int k = 0; k < I.n; ++k, p += ES) {
      s32 d = I.v[k];
      if (d < 0) continue;
      if constexpr (ES == 8) {
        memcpy(&dst<u64>(w, d)[i], p, 8);
      } else if constexpr (ES == 4) {
        u32 x;
        memcpy(&x, p, 4);
        if (I.c == 8)
          dst<u64>(w, d)[i] = I.fl & 2 ? (u64)(s64)(s32)x : x;
        else
          w.regs[d + i] = x;
      } else if constexpr (ES == 2) {
        u16 x;
        memcpy(&x, p, 2);
        u32 v = I.fl & 2 ? (u32)(s32)(s16)x : x;
        if (I.c == 8)
          dst<u64>(w, d)[i] = I.fl & 2 ? (u64)(s64)(s16)x : x;
        else
          w.regs[d + i] = I.c == 2 ? (u16)v : v;
      } else if constexpr (ES == 16) {
        memcpy(w.regs + d + i * 4, p, 16);
      } else {
        u8 x = *p;
        u32 v = I.fl & 2 ? (u32)(s32)(s8)x : x;
        if (I.c == 8)
          dst<u64>(w, d)[i] = I.fl & 2 ? (u64)(s64)(s8)x : x;
        else
          w.regs[d + i] = I.c == 2 ? (u16)v : v;
      }
    }
  }
  if (I.fl & 4) w.ev |= EV_YIELD;
  if (lt || w.tainted) {
    for (int k = 0; k < I.n; ++k) setTaint(w, I.v[k], lt, m);
    w.taintHandled = true;
  }
}
template <int ES>
static void hst(Warp& w, const Inst& I, u32 m) {
  const u32 tot = ES * I.n;
  const Space sp = (Space)I.e;
  if (g_cfg.stats) statAccess(w, I, sp, m, tot, true);
  FOR_LANES(i, m) {
    u64 a = laneAddr(w, I, (int)i);
    if (a & (tot - 1)) misaligned(w, (int)i, a, tot);
    u8* p = resolve(w, (int)i, sp, a, tot, true);
    for (int k = 0; k < I.n; ++k, p += ES) {
      s32 s = I.v[k];
      if (w.tainted && getTaint(w, s) >> i & 1) {
        if (sp == Space::SHARED || sp == Space::SHARED_CLUSTER || (sp == Space::GENERIC && a - g_sharedWin < kWin)) {
          CTA* c = ctaOfSmem(w, (u32)a);
          size_t o = (size_t)(p - c->smem);
          if (!c->init.empty()) memset(&c->init[o], 0, ES);
        } else if (sp != Space::LOCAL && !(sp == Space::GENERIC && a - g_localWin < kWin))
          taintReport(w, w.pc - 1, 1u << i, "store a value");
      }
      if constexpr (ES == 8)
        memcpy(p, &src<u64>(w, s)[i], 8);
      else if constexpr (ES == 16)
        memcpy(p, w.regs + s + i * 4, 16);
      else if (I.c == 8) {
        u64 x = src<u64>(w, s)[i];
        memcpy(p, &x, ES);
      } else {
        u32 x = srcw(w, s)[i];
        memcpy(p, &x, ES);
      }
    }
  }
  if (sp != Space::LOCAL) w.cl->progress++;
}
static void hldParam(Warp& w, const Inst& I, u32 m) {  // uniform address
  const u8* p = (const u8*)I.x;
  for (int k = 0; k < I.n; ++k, p += I.fl >> 8) {
    s32 d = I.v[k];
    u64 x = 0;
    u32 es = I.fl >> 8;
    if (d < 0) continue;
    memcpy(&x, p, es);
    if (I.fl & 2) {
      int sh = 64 - 8 * (int)es;
      x = (u64)((s64)(x << sh) >> sh);
    }
    if (I.c == 8) {
      u64* r = dst<u64>(w, d);
      FOR_LANES(i, m) r[i] = x;
    } else {
      u32 v = I.c == 2 ? (u16)x : (u32)x;
      u32* r = w.regs + d;
      FOR_LANES(i, m) r[i] = v;
    }
  }
}
OP(ld) {
  Space sp = parseSpace(t);
  bool vol = cacheMods(t);
  int n = parseVec(t);
  Ty ty = t.type();
  t.has("unified");
  int eb = std::max(1, tyBits(ty) / 8);
  if (eb * n > 16) t.err("accesses of more than 16 bytes per thread need sm_100");
  std::vector<const Operand*> ds;
  if (n > 1) {
    if (t.op(0).k != Operand::VEC || (int)t.op(0).v.size() != n) t.err("vector destination");
    for (auto& o : t.op(0).v) ds.push_back(&o);
  } else
    ds.push_back(&t.op(0));
  std::vector<s32> v;
  int cell = 4;
  for (auto* o : ds) {
    if (o->k == Operand::SINK) {
      v.push_back(-1);
      continue;
    }
    if (o->k != Operand::REG) t.err("ld destination");
    int rb = tyBits(t.regTy[o->reg]);
    if (rb < tyBits(ty)) t.err("ld destination register too narrow");
    cell = rb > 64 ? 16 : rb > 32 ? 8 : rb > 16 ? 4 : 2;
    v.push_back(t.slot[o->reg]);
  }
  const s32* av = t.aux(v);
  const Operand& ao = t.op(1);
  if (sp == Space::PARAM && ao.v[0].k == Operand::INT && (u64)ao.v[0].imm - g_localWin >= kWin) {
    u64 a = (u64)(ao.v[0].imm + ao.imm);
    if (a < (u64)t.P.params || a + (u64)(eb * n) > (u64)t.P.params + t.P.paramBytes) t.err("ld.param out of bounds");
    Inst& I = t.out(hldParam, C_LDOTHER);
    I.v = av;
    I.n = (u8)n;
    I.c = cell;
    I.x = (const void*)a;
    I.fl = (u32)eb << 8 | (tySigned(ty) ? 2u : 0);
    return;
  }
  Handler h = eb == 1 ? hld<1> : eb == 2 ? hld<2> : eb == 4 ? hld<4> : eb == 8 ? hld<8> : hld<16>;
  Inst& I = t.out(h, memCls(sp, false));
  I.v = av;
  I.n = (u8)n;
  I.c = cell;
  I.e = (int)sp;
  I.fl = (tySigned(ty) ? 2u : 0) | (vol && (sp == Space::GLOBAL || sp == Space::GENERIC) ? 4u : 0);
  t.addr(I, ao);
}
OP(st) {
  if (t.in->mods.size() > 1 && t.in->mods[1] == "async") {
    t.has("async");
    t.ignore({"weak", "shared::cluster", "mbarrier::complete_tx::bytes", "relaxed", "cluster"});
    int n = parseVec(t);
    Ty ty = t.type();
    std::vector<s32> v;
    if (n > 1)
      for (auto& o : t.op(1).v) v.push_back(t.S(o, ty));
    else
      v.push_back(t.S(1, ty));
    const s32* av = t.aux(v);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      FOR_LANES(i, m) {
        u32 a = (u32)laneAddr(w, I, (int)i), eb = I.fl;
        u8* p = resolve(w, (int)i, Space::SHARED_CLUSTER, a, eb * I.n, true);
        for (int k = 0; k < I.n; ++k) {
          if (eb == 8)
            memcpy(p + 8 * k, &src<u64>(w, I.v[k])[i], 8);
          else
            memcpy(p + 4 * k, &srcw(w, I.v[k])[i], 4);
        }
        u32 mb = srcw(w, I.b)[i] + (u32)I.e;
        CTA* c = ctaOfSmem(w, mb);
        if (w.cl->race) {
          raceMbarArrive(w, *c, mb & 0xffffff);
        }
        if (ctaOfSmem(w, a) != w.cta) w.cl->st.dsmem += eb * I.n;
        mbarCompleteTx(*c, mb & 0xffffff, eb * I.n, &w);
      }
    };
    const Operand& mo = t.op(2);
    s32 mb = mo.v[0].k == Operand::REG ? t.slot[mo.v[0].reg] : t.konst((u64)mo.v[0].imm, 4);
    Inst& I = t.out(h, C_STS);
    I.v = av;
    I.n = (u8)n;
    I.fl = (u32)tyBits(ty) / 8;
    I.b = mb;
    I.e = (s32)mo.imm;
    t.addr(I, t.op(0));
    return;
  }
  if (t.in->mods.size() > 1 && t.in->mods[1] == "bulk") t.err("st.bulk is not supported");
  Space sp = parseSpace(t);
  cacheMods(t);
  int n = parseVec(t);
  Ty ty = t.type();
  int eb = std::max(1, tyBits(ty) / 8);
  if (eb * n > 16) t.err("accesses of more than 16 bytes per thread need sm_100");
  std::vector<const Operand*> ss;
  if (n > 1)
    for (auto& o : t.op(1).v) ss.push_back(&o);
  else
    ss.push_back(&t.op(1));
  if ((int)ss.size() != n) t.err("vector source");
  std::vector<s32> v;
  int cell = 4;
  for (auto* o : ss) {
    if (o->k == Operand::REG) {
      int rb = tyBits(t.regTy[o->reg]);
      if (rb < tyBits(ty)) t.err("st source register too narrow");
      cell = rb > 32 ? 8 : 4;
      v.push_back(t.slot[o->reg]);
    } else {
      cell = eb == 8 ? 8 : 4;
      v.push_back(t.S(*o, ty));
    }
  }
  for (auto* o : ss)
    if (o->k == Operand::REG && (tyBits(t.regTy[o->reg]) > 32 ? 8 : 4) != cell && eb < 16) t.err("mixed source widths");
  const s32* av = t.aux(v);
  Handler h = eb == 1 ? hst<1> : eb == 2 ? hst<2> : eb == 4 ? hst<4> : eb == 8 ? hst<8> : hst<16>;
  Inst& I = t.out(h, memCls(sp, true));
  I.v = av;
  I.n = (u8)n;
  I.c = cell;
  I.e = (int)sp;
  t.addr(I, t.op(0));
}
OP(ldu) { op_ld(t); }

// ---- atomics ----
enum AOp : u8 { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
static u64 atomApply(u8 op, Ty ty, u64 o, u64 v, u64 c) {
  auto f2 = [&](auto up, auto dn) -> u64 {
    auto one = [&](u16 a, u16 b) -> u16 {
      double x = up(a), y = up(b);
      switch (op) {
        case A_ADD: return dn(x + y);
        case A_MIN: return x != x ? b : y != y ? a : y < x ? b : a;
        default: return x != x ? b : y != y ? a : y > x ? b : a;
      }
    };
    if (ty == Ty::F16X2 || ty == Ty::BF16X2)
      return (u64)one((u16)o, (u16)v) | (u64)one((u16)(o >> 16), (u16)(v >> 16)) << 16;
    return one((u16)o, (u16)v);
  };
  switch (op) {
    case A_EXCH: return v;
    case A_CAS: return o == v ? c : o;
    case A_AND: return o & v;
    case A_OR: return o | v;
    case A_XOR: return o ^ v;
    case A_INC: return (u32)o >= (u32)v ? 0 : (u32)o + 1;
    case A_DEC: return ((u32)o == 0 || (u32)o > (u32)v) ? (u32)v : (u32)o - 1;
  }
  switch (ty) {
    case Ty::F32: {
      float a = bitsf((u32)o), b = bitsf((u32)v);
      return fbits(canonNan(op == A_ADD   ? a + b
                            : op == A_MIN ? (a != a   ? b
                                             : b != b ? a
                                                      : std::min(a, b))
                                          : (a != a   ? b
                                             : b != b ? a
                                                      : std::max(a, b))));
    }
    case Ty::F64: {
      double a = bitsd(o), b = bitsd(v);
      return dbits(op == A_ADD ? a + b : op == A_MIN ? std::fmin(a, b) : std::fmax(a, b));
    }
    case Ty::F16:
    case Ty::F16X2: return f2([](u16 x) { return (double)h2f(x); }, [](double d) { return d2h(d); });
    case Ty::BF16:
    case Ty::BF16X2: return f2([](u16 x) { return (double)b2f(x); }, [](double d) { return d2b(d); });
    case Ty::S32:
      return op == A_ADD ? (u32)(o + v) : (u32)(op == A_MIN ? std::min((s32)o, (s32)v) : std::max((s32)o, (s32)v));
    case Ty::S64: return op == A_ADD ? o + v : (u64)(op == A_MIN ? std::min((s64)o, (s64)v) : std::max((s64)o, (s64)v));
    case Ty::U64:
    case Ty::B64: return op == A_ADD ? o + v : op == A_MIN ? std::min(o, v) : std::max(o, v);
    default: return op == A_ADD ? (u32)(o + v) : op == A_MIN ? std::min((u32)o, (u32)v) : std::max((u32)o, (u32)v);
  }
}
template <class T>
static T atomMem(u8* p, u8 op, Ty ty, u64 v, u64 c) {
  T* q = (T*)p;
  T o = __atomic_load_n(q, __ATOMIC_SEQ_CST);
  for (;;) {
    T nv = (T)atomApply(op, ty, o, v, c);
    if (__atomic_compare_exchange_n(q, &o, nv, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return o;
  }
}
static u64 atomDo(Warp& w, int lane, Space sp, u64 a, u8 op, Ty ty, u64 v, u64 c) {
  u32 eb = (u32)tyBits(ty) / 8;
  if (a & (eb - 1)) misaligned(w, lane, a, eb);
  u8* p;
  bool sh = sp == Space::SHARED || sp == Space::SHARED_CLUSTER || (sp == Space::GENERIC && a - g_sharedWin < kWin);
  if (sh) {
    u32 sa = (u32)(sp == Space::GENERIC ? a - g_sharedWin : a);
    p = smemPtr(w, sa, eb, "atomic");
    if (g_cfg.check) {
      CTA* cc = ctaOfSmem(w, sa);
      readShared(w, *cc, sa & 0xffffff, eb, w.pc - 1, nullptr);
      markShared(*cc, sa & 0xffffff, eb);
      if (w.cl->race) raceAtomic(w, *cc, sa & 0xffffff, true);
    }
  } else {
    p = resolve(w, lane, sp, a, eb, false);
    if (g_cfg.ckOob) resolve(w, lane, sp, a, eb, true);
  }
  if (w.taintNext) {
    w.taintNext = false;
    report(w, w.pc - 1, "uninitialised",
           strf("lane %d: atomic on %s that was never written", lane, w.taintWhat.c_str()));
  }
  w.cl->st.atomics++;
  u64 o;
  if (eb == 8)
    o = atomMem<u64>(p, op, ty, v, c);
  else if (eb == 4)
    o = atomMem<u32>(p, op, ty, v, c);
  else
    o = atomMem<u16>(p, op, ty, v, c);
  if (op != A_CAS || o == v) w.cl->progress++;
  return o;
}
// v: value slots (n), then compare slot; d: destinations in v after; fl: op | hasDest<<8
static void hatom(Warp& w, const Inst& I, u32 m) {
  Ty ty = (Ty)I.t;
  u32 eb = (u32)tyBits(ty) / 8;
  const bool dest = I.fl >> 8 & 1;
  FOR_LANES(i, m) {
    u64 a = laneAddr(w, I, (int)i);
    if (a & ((u64)eb * I.n - 1)) misaligned(w, (int)i, a, eb * I.n);
    for (int k = 0; k < I.n; ++k) {
      auto rd = [&](s32 s) -> u64 { return eb == 8 ? src<u64>(w, s)[i] : srcw(w, s)[i]; };
      u64 v = rd(I.v[k]), c = (I.fl & 255) == A_CAS ? rd(I.b) : 0;
      if (eb == 2) {
        v &= 0xffff;
        c &= 0xffff;
      }
      u64 o = atomDo(w, (int)i, (Space)I.e, a + (u64)k * eb, (u8)(I.fl & 255), ty, v, c);
      if (dest && I.v[I.n + k] >= 0) {
        s32 d = I.v[I.n + k];
        if (eb == 8)
          dst<u64>(w, d)[i] = o;
        else
          w.regs[d + i] = (u32)o;
      }
    }
  }
  w.ev |= EV_YIELD;
}
static void emitAtom(Tr& t, bool dest) {
  Space sp = parseSpace(t);
  cacheMods(t);
  t.ignore({"acq_rel", "noftz"});
  int n = parseVec(t);
  const bool async =
      t.has("async");  // red.async: on shared memory of the cluster, completing bytes of an mbarrier there
  static const char* nm[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
  int op = -1;
  for (int i = 0; i < 10; ++i)
    if (t.has(nm[i])) op = i;
  if (op < 0) t.err("atomic operation");
  Ty ty = t.type();
  if (tyBits(ty) > 64) t.err("128-bit atomics are not supported");
  if (n > 1 && (sp == Space::SHARED || sp == Space::SHARED_CLUSTER))
    t.err("vector atomics exist for global memory only");
  if (n > 1 && n * tyBits(ty) > 128) t.err("vector atomic of more than 16 bytes");
  if (async) {
    if (dest || !t.has("mbarrier::complete_tx::bytes") || op == 6 || op == 7 || tyFloat(ty)) t.err("red.async form");
    auto h = [](Warp& w, const Inst& I, u32 m) {
      const u32 eb = (u32)tyBits((Ty)I.t) / 8;
      FOR_LANES(i, m) {
        u32 a = (u32)laneAddr(w, I, (int)i), mb = srcw(w, I.b)[i] + (u32)I.e;
        CTA* c = ctaOfSmem(w, mb);
        atomDo(w, (int)i, Space::SHARED_CLUSTER, a, (u8)I.fl, (Ty)I.t, eb == 8 ? src<u64>(w, I.c)[i] : srcw(w, I.c)[i],
               0);
        if (ctaOfSmem(w, a) != w.cta) w.cl->st.dsmem += eb;
        if (w.cl->race) raceMbarArrive(w, *c, mb & 0xffffff);
        mbarCompleteTx(*c, mb & 0xffffff, eb, &w);
      }
    };
    const Operand& mo = t.op(2);
    if (mo.k != Operand::ADDR) t.err("mbarrier operand");
    s32 mb = mo.v[0].k == Operand::REG ? t.slot[mo.v[0].reg] : t.konst((u64)mo.v[0].imm, 4), c = t.S(1, ty);
    Inst& I = t.out(h, C_ATOM);
    I.t = (u8)ty;
    I.fl = (u32)op;
    I.b = mb;
    I.c = c;
    I.e = (s32)mo.imm;
    t.addr(I, t.op(0));
    return;
  }
  size_t k = dest ? 1 : 0;
  std::vector<s32> v;
  const Operand& vo = t.op(k + 1);
  if (n > 1)
    for (auto& o : vo.v) v.push_back(t.S(o, ty));
  else
    v.push_back(t.S(vo, ty));
  if (dest) {
    if (n > 1)
      for (auto& o : t.op(0).v) v.push_back(t.D(o, tyBits(ty) > 32 ? 8 : 4));
    else
      v.push_back(t.op(0).k == Operand::SINK ? -1 : t.D(0, ty));
  }
  s32 b = op == A_CAS ? t.S(k + 2, ty) : 0;
  const s32* av = t.aux(v);
  Inst& I = t.out(hatom, C_ATOM);
  I.v = av;
  I.n = (u8)n;
  I.b = b;
  I.t = (u8)ty;
  I.e = (int)sp;
  I.fl = (u32)op | (dest ? 256u : 0);
  t.addr(I, t.op(k));
}
OP(atom) { emitAtom(t, true); }
OP(red) { emitAtom(t, false); }

// ---- prefetch and friends ----
static void hnop(Warp&, const Inst&, u32) {}
OP(prefetch) {
  for (size_t i = 1; i < t.used.size(); ++i) t.used[i] = 1;
  t.out(hnop, C_OTHER);
}
OP(prefetchu) { op_prefetch(t); }
OP(applypriority) { op_prefetch(t); }
OP(discard) { op_prefetch(t); }

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

// ---- mbarrier ----
// 64-bit state: pending[0..19] expected[20..39] tx[40..60] (signed) phase[61] valid[62]
static inline u32 mbPend(u64 s) { return (u32)(s & 0xfffff); }
static inline u32 mbExp(u64 s) { return (u32)(s >> 20 & 0xfffff); }
static inline s32 mbTx(u64 s) { return (s32)((s64)(s << 3) >> 43); }
static inline u32 mbPhase(u64 s) { return (u32)(s >> 61 & 1); }
static inline u64 mbMake(u32 p, u32 e, s32 tx, u32 ph) {
  return (u64)(p & 0xfffff) | (u64)(e & 0xfffff) << 20 | ((u64)tx & 0x1fffff) << 40 | (u64)ph << 61 | 1ull << 62;
}
bool mbarReady(const Frag& f) { return mbPhase(*f.mbar) != f.parity; }
static u64* mbPtr(Warp& w, u32 addr, const char* what) {
  if (addr & 7) misaligned(w, 0, addr, 8);
  u64* p = (u64*)smemPtr(w, addr, 8, what);
  if ((*p >> 62) != 1)
    simFail(w, 719, "%s on shared offset %u: not an initialised mbarrier (or it was overwritten)", what,
            (addr & 0xffffff) - kSmemBase);
  return p;
}
static void mbUpdate(CTA& c, u64* p, u32 addr, u32 pend, u32 exp, s32 tx) {
  u32 ph = mbPhase(*p);
  if (pend == 0 && tx == 0) {
    ph ^= 1;
    pend = exp;
    if (c.cl->race) raceMbarPhase(c, addr);
  }
  *p = mbMake(pend, exp, tx, ph);
  c.cl->progress++;
}
void mbarCompleteTx(CTA& c, u32 addr, u32 bytes, Warp* w) {
  u64* p = (u64*)(c.smem + addr);
  if ((*p >> 62) != 1)
    simFail(*w, 719, "complete_tx on shared offset %u: not an initialised mbarrier", addr - kSmemBase);
  mbUpdate(c, p, addr, mbPend(*p), mbExp(*p), mbTx(*p) - (s32)bytes);
}
static void mbArrive(Warp& w, u32 addr, u32 count, s32 expectTx, bool drop, u64* stateOut) {
  CTA* c = ctaOfSmem(w, addr);
  u64* p = mbPtr(w, addr, "mbarrier.arrive");
  if (stateOut) *stateOut = *p;
  if (w.cl->race) raceMbarArrive(w, *c, addr & 0xffffff);
  u32 pend = mbPend(*p), exp = mbExp(*p);
  s32 tx = mbTx(*p) + expectTx;
  if (count > pend)
    simFail(w, 719,
            "mbarrier.arrive at shared offset %u: %u arrivals but only %u pending in this phase (expected count %u)",
            (addr & 0xffffff) - kSmemBase, count, pend, exp);
  if (drop) exp -= count;
  mbUpdate(*c, p, addr & 0xffffff, pend - count, exp, tx);
}
enum { MB_INIT, MB_INVAL, MB_ARRIVE, MB_EXPECT, MB_COMPLETE, MB_PENDING };
static void hmbar(Warp& w, const Inst& I,
                  u32 m) {  // t: kind; fl: 1 expect_tx, 2 drop, 4 has state dest; b: count/tx slot; c: state
  FOR_LANES(i, m) {
    u64 a64 = laneAddr(w, I, (int)i);
    u32 a = (u32)(a64 - g_sharedWin < kWin && I.t2 ? a64 - g_sharedWin : a64);
    u32 b = I.b != -1 ? srcw(w, I.b)[i] : 1;
    switch (I.t) {
      case MB_INIT: {
        if (a & 7) misaligned(w, (int)i, a, 8);
        u64* p = (u64*)smemPtr(w, a, 8, "mbarrier.init");
        if (b == 0 || b > 0xfffff) simFail(w, 719, "mbarrier.init with count %u", b);
        *p = mbMake(b, b, 0, 0);
        CTA* c = ctaOfSmem(w, a);
        if (g_cfg.check) markShared(*c, a & 0xffffff, 8);
        if (w.cl->race) raceInitMbar(w, *c, a & 0xffffff);
        w.cl->progress++;
        break;
      }
      case MB_INVAL: {
        u64* p = mbPtr(w, a, "mbarrier.inval");
        *p = 0;
        break;
      }
      case MB_ARRIVE: {
        u64 st;
        bool ex = I.fl & 1;
        mbArrive(w, a, ex ? 1 : b, ex ? (s32)b : 0, I.fl & 2, &st);
        if (I.fl & 4) dst<u64>(w, I.c)[i] = st;
        break;
      }
      case MB_EXPECT: {
        CTA* c = ctaOfSmem(w, a);
        u64* p = mbPtr(w, a, "mbarrier.expect_tx");
        mbUpdate(*c, p, a & 0xffffff, mbPend(*p), mbExp(*p), mbTx(*p) + (s32)b);
        break;
      }
      case MB_COMPLETE: {
        CTA* c = ctaOfSmem(w, a);
        mbPtr(w, a, "mbarrier.complete_tx");
        mbarCompleteTx(*c, a & 0xffffff, b, &w);
        break;
      }
    }
  }
}
bool pumpForMbar(Warp& w, CTA* c, u32 addr) {
  auto& q = w.cl->bulk;
  bool any = false;
  for (size_t k = 0; k < q.size();) {
    BulkOp* op = q[k];
    if (op->hasMbar && op->mbarCta == c && op->mbar == addr && (g_cfg.async == Config::LAZY || (w.cl->rnd() & 1))) {
      q.erase(q.begin() + (long)k);
      bulkExecute(*op);
      delete op;
      any = true;
      continue;
    }
    ++k;
  }
  return any;
}
// try_wait / test_wait: d = predicate, fl: 1 parity form, 2 blocking (try_wait); b = state/parity slot
static void hmbwait(Warp& w, const Inst& I, u32 m) {
  u32 done = 0;
  int first = -1;
  u32 waitMask = 0;
  FOR_LANES(i, m) {
    u64 a64 = laneAddr(w, I, (int)i);
    u32 a = (u32)(a64 - g_sharedWin < kWin && I.t2 ? a64 - g_sharedWin : a64);
    u64* p = mbPtr(w, a, "mbarrier.try_wait");
    CTA* c = ctaOfSmem(w, a);
    if (c != w.cta) simFail(w, 719, "mbarrier.try_wait on an mbarrier of another CTA");
    u8 par = I.fl & 1 ? (u8)(srcw(w, I.b)[i] & 1) : (u8)mbPhase(src<u64>(w, I.b)[i]);
    bool ok = mbPhase(*p) != par;
    if (!ok && g_cfg.async != Config::EAGER) {
      pumpForMbar(w, c, a & 0xffffff);
      ok = mbPhase(*p) != par;
    }
    if (ok) {
      done |= 1u << i;
      if (w.cl->race) raceMbarAcquire(w, *c, a & 0xffffff);
    } else {
      waitMask |= 1u << i;
      if (first < 0) {
        first = (int)i;
        Frag& f = w.frags[w.cur];
        f.mbar = p;
        f.mbarAddr = a;
        f.parity = par;
      }
    }
  }
  Frag& f = w.frags[w.cur];
  if (waitMask && (I.fl & 2) && !f.force) {
    if (done == 0) {
      w.pc--;
      blockFrag(w, F_MBAR);
      return;
    }
    // mixed outcome: report per lane without blocking
  }
  f.force = false;
  if (I.d >= 0) w.preds[I.d] = (w.preds[I.d] & ~m) | done;
  if (waitMask) w.ev |= EV_YIELD;
}
OP(mbarrier) {
  std::string k = t.mod(1);
  t.ignore(
      {"shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed", "cta", "cluster", "sem"});
  auto mk = [&](int kind, size_t ai) -> Inst& {
    Inst& I = t.out(hmbar, C_MBAR);
    I.t = (u8)kind;
    I.b = -1;
    t.addr(I, t.op(ai));
    return I;
  };
  if (k == "init") {
    s32 b = t.S(1, Ty::U32);
    mk(MB_INIT, 0).b = b;
  } else if (k == "inval")
    mk(MB_INVAL, 0);
  else if (k == "arrive" || k == "arrive_drop") {
    bool ex = t.has("expect_tx");
    t.has("noComplete");
    size_t ai = 0;
    u32 fl = (u32)ex | (k == "arrive_drop" ? 2u : 0);
    s32 c = 0;
    if (t.op(0).k != Operand::ADDR) {
      ai = 1;
      if (t.op(0).k == Operand::REG) {
        fl |= 4;
        c = t.D(0, 8);
      }
    }
    s32 b = t.nops() > ai + 1 ? t.S(ai + 1, Ty::U32) : -1;
    Inst& I = mk(MB_ARRIVE, ai);
    I.fl = fl;
    I.c = c;
    I.b = b;
  } else if (k == "expect_tx") {
    s32 b = t.S(1, Ty::U32);
    mk(MB_EXPECT, 0).b = b;
  } else if (k == "complete_tx") {
    s32 b = t.S(1, Ty::U32);
    mk(MB_COMPLETE, 0).b = b;
  } else if (k == "try_wait" || k == "test_wait") {
    bool par = t.has("parity");
    s32 b = par ? t.S(2, Ty::U32) : t.S(2, Ty::B64);
    s32 d = t.predD(t.op(0));
    Inst& I = t.out(hmbwait, C_MBAR);
    I.d = d;
    I.b = b;
    I.fl = (u32)par | (k == "try_wait" ? 2u : 0);
    t.addr(I, t.op(1));
  } else if (k == "pending_count") {
    s32 a = t.S(1, Ty::B64), d = t.D(0, 4);
    auto h = [](Warp& w, const Inst& I, u32 m) { FOR_LANES(i, m) w.regs[I.d + i] = mbPend(src<u64>(w, I.a)[i]); };
    Inst& I = t.out(h, C_MBAR);
    I.a = a;
    I.d = d;
  } else
    t.err("unknown mbarrier operation");
}

// ---- bulk copies ----
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
static u64 boxInside(const TMap& t, const int* coord) {  // bytes of a tile that lie inside the tensor
  u64 b = t.esize;
  for (int i = 0; i < t.rank; ++i) {
    s64 lo = std::max<s64>(coord[i], 0), hi = std::min<s64>((s64)coord[i] + t.box[i], t.dim[i]);
    b *= (u64)std::max<s64>(hi - lo, 0);
  }
  return b;
}
static u32 boxBytes(const TMap& t) {
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
static void bulkAddr(Tr& t, const Operand& o, s32& s, s64& off, bool& w8) {
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
static void emitBulk(Tr& t, bool red) {
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
void registerMem() {
  auto& T = opTable();
#define R(n) T[#n] = op_##n;
  R(ld);
  R(st);
  R(ldu);
  R(atom);
  R(red);
  R(prefetch);
  R(prefetchu);
  R(applypriority);
  R(discard);
  R(ldmatrix);
  R(stmatrix);
  R(movmatrix);
  R(mbarrier);
  R(cp);
  R(mapa);
  R(getctarank);
  R(tensormap);
}
}  // namespace ptxsim

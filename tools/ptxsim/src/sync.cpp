// Control flow, barriers, warp-level communication, runtime services.
#include "tr.h"
#include <chrono>

namespace ptxsim {
#define OP(name) static void op_##name(Tr& t)
static void hnop(Warp&, const Inst&, u32) {}

static void hbra(Warp& w, const Inst& I, u32 m) {
  if (m == w.active) {
    if ((u32)I.imm < w.pc) w.instCount += 0;
    w.pc = (u32)I.imm;
    return;
  }
  u32 rest = w.active & ~m;
  splitFrag(w, w.pc, rest);
  w.active = m;
  w.pc = (u32)I.imm;
}
OP(bra) {
  t.ignore({"uni"});
  if (t.op(0).k != Operand::LABEL) t.err("branch target");
  Inst& I = t.out(hbra, C_CTRL);
  I.t = 0xbb;
  I.imm = t.op(0).label;
}
static void hbrx(Warp& w, const Inst& I, u32 m) {
  u32 rest = w.active & ~m;
  if (rest) {
    splitFrag(w, w.pc, rest);
    w.active = m;
  }
  while (m) {
    u32 idx = srcw(w, I.a)[ffs32(m)];
    u32 same = 0;
    FOR_LANES(i, m) if (srcw(w, I.a)[i] == idx) same |= 1u << i;
    if (idx >= I.fl) simFail(w, 719, "brx.idx index %u outside the table of %u", idx, I.fl);
    m &= ~same;
    if (m) {
      splitFrag(w, (u32)I.v[idx], same);
      w.active &= ~same;
    } else {
      w.active = same;
      w.pc = (u32)I.v[idx];
    }
  }
}
OP(brx) {
  t.ignore({"idx", "uni"});
  s32 a = t.S(0, Ty::U32);
  auto& tb = t.tables[-2 - t.op(1).label];
  std::vector<s32> v(tb.begin(), tb.end());
  const s32* av = t.aux(v);
  Inst& I = t.out(hbrx, C_CTRL);
  I.a = a;
  I.v = av;
  I.fl = (u32)v.size();
  I.t = 0xbc;
}
static void hexit(Warp& w, const Inst&, u32 m) { exitLanes(w, m); }
OP(ret) {
  t.ignore({"uni"});
  t.out(hexit, C_CTRL);
}
OP(exit) { t.out(hexit, C_CTRL); }
static void htrap(Warp& w, const Inst& I, u32 m) {
  simFail(w, 719, "%s executed by lanes %s", I.fl ? "brkpt" : "trap", laneStr(m).c_str());
}
OP(trap) { t.out(htrap, C_CTRL); }
OP(brkpt) {
  Inst& I = t.out(htrap, C_CTRL);
  I.fl = 1;
}
OP(nanosleep) {
  t.has("u32");
  auto h = [](Warp& w, const Inst&, u32) { w.ev |= EV_YIELD; };
  t.out(h, C_OTHER);
}
// pmevent n: a performance event on a device; here the warp's instructions are counted in region n (0 to 15) from now
// on
OP(pmevent) {
  if (t.has("mask")) {
    t.out(hnop, C_OTHER);
    return;
  }
  if (t.op(0).k != Operand::INT || t.op(0).imm < 0 || t.op(0).imm >= kRegions) t.err("pmevent number");
  s64 n = t.op(0).imm;
  auto h = [](Warp& w, const Inst& I, u32) {
    if (g_cfg.stats) w.cls[C_OTHER]--;
    w.cls = w.cl->st.cls[I.imm];
  };
  Inst& I = t.out(h, C_OTHER);
  I.imm = n;
}
OP(fence) {
  bool proxy = false;
  for (size_t i = 1; i < t.in->mods.size(); ++i)
    if (t.in->mods[i].rfind("proxy", 0) == 0) {
      proxy = true;
    }
  static const char* ok[] = {"sc",
                             "acq_rel",
                             "acquire",
                             "release",
                             "cta",
                             "cluster",
                             "gpu",
                             "sys",
                             "mbarrier_init",
                             "sync_restrict::shared::cta",
                             "sync_restrict::shared::cluster"};
  for (size_t i = 1; i < t.in->mods.size(); ++i) {
    auto& m = t.in->mods[i];
    bool k = m.rfind("proxy", 0) == 0 || m.rfind("async", 0) == 0 || m == "global" || m.rfind("shared", 0) == 0 ||
             m == "alias" || m.rfind("tensormap", 0) == 0 || m == "proxy";
    for (auto o : ok) k |= m == o;
    if (k) t.used[i] = 1;
  }
  if (proxy) {
    auto h = [](Warp& w, const Inst&, u32) {
      if (w.cl->race) raceFence(w);
    };
    t.out(h, C_FENCE);
  } else
    t.out(hnop, C_FENCE);
}
OP(membar) {
  t.ignore({"cta", "gl", "sys", "gpu"});
  t.out(hnop, C_FENCE);
}
OP(setmaxnreg) {
  t.ignore({"inc", "dec", "sync", "aligned", "u32"});
  s64 n = t.op(0).imm;
  if (n < 24 || n > 256 || n % 8) t.err("setmaxnreg value");
  auto h = [](Warp& w, const Inst&, u32 m) { converge(w, m, w.live); };
  t.out(h, C_OTHER);
}
OP(griddepcontrol) {
  t.ignore({"wait", "launch_dependents"});
  t.out(hnop, C_GRIDDEP);
}

// ---- CTA barriers ----
// a: id slot; b: thread count slot or -1; fl: 1 arrive-only, 2 aligned, red op<<4 (1 and,2 or,3 popc); c: pred; d: dest
static void hbar(Warp& w, const Inst& I, u32 m) {
  if (I.fl & 2) {
    if (!converge(w, m, w.live)) return;
  }
  u32 id = srcw(w, I.a)[ffs32(m)];
  if (id > 15) simFail(w, 719, "barrier id %u", id);
  Barrier& b = w.cta->bar[id];
  Frag& f0 = w.frags[w.cur];
  if (f0.need == 0x80000000u + 7) {  // woken after completion: deliver the reduction result
    f0.need = 0;
    u32 res = b.redResult[f0.gen & 1], op = I.fl >> 4;
    if (op == 3) {
      FOR_LANES(i, m) w.regs[I.d + i] = res;
    } else
      w.preds[I.d] = (w.preds[I.d] & ~m) | (res ? m : 0);
    if (w.cl->race) raceBarWait(w, (int)id);
    return;
  }
  u32 cnt = 0;
  if (I.b != -1) {
    cnt = srcw(w, I.b)[ffs32(m)];
    if (cnt == 0 || cnt % 32) simFail(w, 719, "barrier %u: thread count %u is not a positive multiple of 32", id, cnt);
  }
  if (b.arrived && b.expected != cnt)
    simFail(w, 719, "barrier %u: thread count %u differs from %u given by earlier arrivals", id, cnt, b.expected);
  b.expected = cnt;
  u32 gen = b.gen;
  u32 threads = (m == w.live || (I.fl & 2)) ? 32 : (u32)__builtin_popcount(m);
  b.arrived += threads;
  w.cl->st.barriers++;
  w.cl->progress++;
  u32 rop = I.fl >> 4;
  if (rop) {
    u32 p = (w.preds[I.c] ^ (I.imm ? ~0u : 0)) & m;
    if (!b.hasRed) {
      b.hasRed = true;
      b.redOp = rop;
      b.redAcc = rop == 1 ? 1 : 0;
    }
    if (rop == 1)
      b.redAcc &= p == m;
    else if (rop == 2)
      b.redAcc |= p != 0;
    else
      b.redAcc += (u32)__builtin_popcount(p);
  }
  if (w.cl->race) raceBarArrive(w, (int)id);
  if (!(I.fl & 1)) {
    Frag& f = w.frags[w.cur];
    f.bar = (u8)id;
    f.gen = gen;
    if (rop) {
      f.need = 0x80000000u + 7;
      w.pc--;
    }
    blockFrag(w, F_BAR);
  }
  barCheck(*w.cta, (int)id);
}
static void emitBar(Tr& t) {
  u32 fl = 0;
  bool isBarrier = t.in->mods[0] == "barrier";
  if (t.has("cluster")) {
    bool arrive = t.has("arrive"), wait = t.has("wait");
    t.ignore({"aligned", "release", "relaxed", "acquire"});
    if (arrive == wait) t.err("barrier.cluster form");
    auto ha = [](Warp& w, const Inst&, u32 m) {
      if (!converge(w, m, w.live)) return;
      if (w.cl->cbWarpArrived[w.gwid]) simFail(w, 719, "barrier.cluster.arrive twice without a wait");
      w.cl->cbWarpArrived[w.gwid] = 1;
      w.cl->progress++;
      w.cbGen = w.cl->cbGen;
      if (w.cl->race) raceClusterArrive(w);
      if (++w.cl->cbArrived >= w.cl->liveWarps) {
        if (w.cl->race) raceClusterComplete(*w.cl);
        w.cl->cbArrived = 0;
        w.cl->cbGen++;
        std::fill(w.cl->cbWarpArrived.begin(), w.cl->cbWarpArrived.end(), 0);
      }
    };
    auto hw = [](Warp& w, const Inst&, u32 m) {
      if (!converge(w, m, w.live)) return;
      Frag& f = w.frags[w.cur];
      (void)f;
      if (w.cl->cbGen == w.cbGen) {
        if (!w.cl->cbWarpArrived[w.gwid]) simFail(w, 719, "barrier.cluster.wait without a preceding arrive");
        blockFrag(w, F_CBAR);
        w.pc--;
        w.frags[w.cur].pc = w.pc;
        return;
      }
      if (w.cl->race) raceClusterWait(w);
    };
    if (arrive)
      t.out(ha, C_BAR);
    else
      t.out(hw, C_BAR);
    return;
  }
  if (t.has("warp")) {
    t.has("sync");
    s32 a = t.S(0, Ty::U32);
    auto h = [](Warp& w, const Inst& I, u32 m) {
      u32 mem = srcw(w, I.a)[ffs32(m)];
      if ((m & (mem & w.live)) == (mem & w.live)) return;
      Frag& f = w.frags[w.cur];
      f.need = mem;
      blockFrag(w, F_WSYNC);
    };
    Inst& I = t.out(h, C_BAR);
    I.a = a;
    return;
  }
  t.has("cta");
  bool al = t.has("aligned") || !isBarrier;
  if (t.has("arrive"))
    fl |= 1;
  else
    t.has("sync");
  if (al) fl |= 2;
  bool red = t.has("red");
  u32 rop = 0;
  size_t k = 0;
  s32 d = 0, c = 0;
  bool neg = false;
  bool hasCnt;
  if (red) {
    if (t.has("and"))
      rop = 1;
    else if (t.has("or"))
      rop = 2;
    else if (t.has("popc"))
      rop = 3;
    t.ignore({"pred", "u32"});
    k = 1;
    d = rop == 3 ? t.D(0, 4) : t.predD(t.op(0));
    fl |= rop << 4;
    hasCnt = t.nops() == 4;
    c = t.pred(t.op(t.nops() - 1), neg);
  } else
    hasCnt = t.nops() == 2;
  s32 a = t.S(k, Ty::U32), b = hasCnt ? t.S(k + 1, Ty::U32) : -1;
  Inst& I = t.out(hbar, C_BAR);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = fl;
  I.imm = neg;
}
OP(bar) { emitBar(t); }
OP(barrier) { emitBar(t); }

// ---- warp communication ----
static void hshfl(Warp& w, const Inst& I, u32 m) {  // t: mode 0 up 1 down 2 bfly 3 idx
  u32 mem = I.imm ? srcw(w, I.e)[ffs32(m)] : w.active;
  if (I.imm && !converge(w, m, mem & w.live)) return;
  const u32* a = srcw(w, I.a);
  const u32* b = srcw(w, I.b);
  const u32* c = srcw(w, I.c);
  u32 out[32], p = 0, ot = 0;
  const u32 ta = w.tainted ? getTaint(w, I.a) : 0;
  FOR_LANES(i, m) {
    u32 bv = b[i] & 31, cv = c[i], seg = cv >> 8 & 31, cl = cv & 31, maxL = (i & seg) | (cl & ~seg), minL = i & seg;
    s32 j;
    bool ok;
    switch (I.t) {
      case 0:
        j = (s32)i - (s32)bv;
        ok = j >= (s32)maxL;
        break;
      case 1:
        j = (s32)(i + bv);
        ok = j <= (s32)maxL;
        break;
      case 2:
        j = (s32)(i ^ bv);
        ok = j <= (s32)maxL;
        break;
      default: j = (s32)(minL | (bv & ~seg)); ok = j <= (s32)maxL;
    }
    if (!ok) j = (s32)i;
    out[i] = a[j & 31];
    p |= (u32)ok << i;
    ot |= (ta >> (j & 31) & 1) << i;
  }
  FOR_LANES(i, m) w.regs[I.d + i] = out[i];
  if (w.tainted) {
    setTaint(w, I.d, ot, m);
    w.taintHandled = true;
  }
  if (I.fl) w.preds[I.fl] = (w.preds[I.fl] & ~m) | p;
}
OP(shfl) {
  bool sync = t.has("sync");
  int md = t.has("up") ? 0 : t.has("down") ? 1 : t.has("bfly") ? 2 : t.has("idx") ? 3 : -1;
  if (md < 0) t.err("shfl mode");
  t.has("b32");
  const Operand& d0 = t.op(0);
  u32 pd = 0;
  s32 d;
  if (d0.k == Operand::PAIR) {
    d = t.D(d0.v[0], 4);
    pd = (u32)t.predD(d0.v[1]);
  } else
    d = t.D(d0, 4);
  s32 a = t.S(1, Ty::B32), b = t.S(2, Ty::U32), c = t.S(3, Ty::U32), e = sync ? t.S(4, Ty::U32) : 0;
  Inst& I = t.out(hshfl, C_SHFL);
  I.d = d;
  I.a = a;
  I.b = b;
  I.c = c;
  I.e = e;
  I.t = (u8)md;
  I.fl = pd;
  I.imm = sync;
}
OP(vote) {
  bool sync = t.has("sync");
  int k = t.has("all") ? 0 : t.has("any") ? 1 : t.has("uni") ? 2 : t.has("ballot") ? 3 : -1;
  t.ignore({"pred", "b32"});
  bool n;
  s32 p = t.pred(t.op(1), n), d = k == 3 ? t.D(0, 4) : t.predD(t.op(0)), e = sync ? t.S(2, Ty::U32) : 0;
  auto h = [](Warp& w, const Inst& I, u32 m) {
    if (I.imm) {
      u32 mem = srcw(w, I.e)[ffs32(m)];
      if (!converge(w, m, mem & w.live)) return;
    }
    u32 v = (w.preds[I.a] ^ (I.fl ? ~0u : 0)) & m;
    if (I.t == 3) {
      FOR_LANES(i, m) w.regs[I.d + i] = v;
      return;
    }
    bool r = I.t == 0 ? v == m : I.t == 1 ? v != 0 : (v == 0 || v == m);
    w.preds[I.d] = (w.preds[I.d] & ~m) | (r ? m : 0);
  };
  Inst& I = t.out(h, C_VOTE);
  I.a = p;
  I.d = d;
  I.e = e;
  I.fl = n;
  I.t = (u8)k;
  I.imm = sync;
}
OP(activemask) {
  t.has("b32");
  s32 d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) { FOR_LANES(i, m) w.regs[I.d + i] = m; };
  Inst& I = t.out(h, C_VOTE);
  I.d = d;
}
OP(elect) {
  t.has("sync");
  const Operand& d0 = t.op(0);
  if (d0.k != Operand::PAIR) t.err("elect.sync d|p expected");
  s32 d = t.D(d0.v[0], 4), p = t.predD(d0.v[1]), a = t.S(1, Ty::U32);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 mem = srcw(w, I.a)[ffs32(m)];
    if (!converge(w, m, mem & w.live)) return;
    int l = ffs32(m);
    FOR_LANES(i, m) w.regs[I.d + i] = (u32)l;
    w.preds[I.e] = (w.preds[I.e] & ~m) | 1u << l;
  };
  Inst& I = t.out(h, C_VOTE);
  I.d = d;
  I.e = p;
  I.a = a;
}
OP(match) {
  bool any = t.has("any");
  t.has("all");
  t.has("sync");
  Ty ty = t.type();
  const Operand& d0 = t.op(0);
  s32 d, p = 0;
  if (d0.k == Operand::PAIR) {
    d = t.D(d0.v[0], 4);
    p = t.predD(d0.v[1]);
  } else
    d = t.D(d0, 4);
  s32 a = t.S(1, ty), e = t.S(2, Ty::U32);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 mem = srcw(w, I.e)[ffs32(m)];
    if (!converge(w, m, mem & w.live)) return;
    auto v = [&](u32 i) -> u64 { return I.t ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i]; };
    u32 out[32];
    bool all = true;
    FOR_LANES(i, m) {
      u32 r = 0;
      u64 x = v(i);
      for (u32 j = 0; j < 32; ++j)
        if (m >> j & 1 && v(j) == x) r |= 1u << j;
      out[i] = r;
      if (r != m) all = false;
    }
    if (I.fl) {
      FOR_LANES(i, m) w.regs[I.d + i] = out[i];
    } else {
      FOR_LANES(i, m) w.regs[I.d + i] = all ? m : 0;
      if (I.c) w.preds[I.c] = (w.preds[I.c] & ~m) | (all ? m : 0);
    }
  };
  Inst& I = t.out(h, C_VOTE);
  I.d = d;
  I.c = p;
  I.a = a;
  I.e = e;
  I.fl = any;
  I.t = tyBits(ty) > 32;
}
OP(redux) {
  t.has("sync");
  static const char* nm[] = {"add", "min", "max", "and", "or", "xor"};
  int k = -1;
  for (int i = 0; i < 6; ++i)
    if (t.has(nm[i])) k = i;
  if (k < 0) t.err("redux operation");
  Ty ty = t.type();
  if (tyFloat(ty)) t.err("redux.sync on floats needs sm_100");
  s32 d = t.D(0, 4), a = t.S(1, ty), e = t.S(2, Ty::U32);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    u32 mem = srcw(w, I.e)[ffs32(m)];
    if (!converge(w, m, mem & w.live)) return;
    const u32* a = srcw(w, I.a);
    u32 r = a[ffs32(m)];
    bool first = true;
    FOR_LANES(i, m) {
      if (first) {
        first = false;
        continue;
      }
      u32 x = a[i];
      switch (I.t) {
        case 0: r += x; break;
        case 1: r = I.fl ? (u32)std::min((s32)r, (s32)x) : std::min(r, x); break;
        case 2: r = I.fl ? (u32)std::max((s32)r, (s32)x) : std::max(r, x); break;
        case 3: r &= x; break;
        case 4: r |= x; break;
        default: r ^= x;
      }
    }
    FOR_LANES(i, m) w.regs[I.d + i] = r;
  };
  Inst& I = t.out(h, C_REDUX);
  I.d = d;
  I.a = a;
  I.e = e;
  I.t = (u8)k;
  I.fl = tySigned(ty);
}

// ---- runtime services ----
static u64 pval(Warp& w, const Operand& o, int lane, int bytes) {
  u64 v = 0;
  memcpy(&v, resolve(w, lane, Space::PARAM, (u64)o.imm, (u32)bytes, false), (size_t)bytes);
  return v;
}
static std::string cstr(Warp& w, int lane, u64 a) {
  std::string s;
  for (int i = 0; i < 4096; ++i) {
    char c = *(const char*)resolve(w, lane, Space::GENERIC, a + (u64)i, 1, false);
    if (!c) break;
    s += c;
  }
  return s;
}
static void hassert(Warp& w, const Inst& I, u32 m) {
  const auto& ops = *(const std::vector<Operand>*)I.x;
  int l = ffs32(m);
  std::string msg = cstr(w, l, pval(w, ops[0], l, 8)), file = cstr(w, l, pval(w, ops[1], l, 8));
  u32 line = (u32)pval(w, ops[2], l, 4);
  simFail(w, 710, "device-side assertion `%s' failed at %s:%u (lanes %s)", msg.c_str(), file.c_str(), line,
          laneStr(m).c_str());
}
static void hprintf(Warp& w, const Inst& I, u32 m) {
  const auto& ops = *(const std::vector<Operand>*)I.x;
  FOR_LANES(l, m) {
    std::string f = cstr(w, (int)l, pval(w, ops[0], (int)l, 8)), out;
    u64 args = pval(w, ops[1], (int)l, 8);
    u32 off = 0;
    auto rd = [&](u32 n) {
      off = (off + n - 1) / n * n;
      u64 v = 0;
      memcpy(&v, resolve(w, (int)l, Space::GENERIC, args + off, n, false), n);
      off += n;
      return v;
    };
    for (size_t i = 0; i < f.size(); ++i) {
      if (f[i] != '%') {
        out += f[i];
        continue;
      }
      if (f[i + 1] == '%') {
        out += '%';
        ++i;
        continue;
      }
      std::string sp = "%";
      size_t j = i + 1;
      bool lng = false;
      while (j < f.size() && strchr("-+ #0123456789.*", f[j])) {
        if (f[j] == '*')
          sp += std::to_string((int)rd(4));
        else
          sp += f[j];
        ++j;
      }
      while (j < f.size() && strchr("lhzjt", f[j])) {
        if (f[j] != 'h') lng = true;
        ++j;
      }
      char c = j < f.size() ? f[j] : 'd';
      if (strchr("diuxXoc", c)) {
        if (lng)
          out += strf((sp + "ll" + c).c_str(), rd(8));
        else
          out += strf((sp + c).c_str(), (u32)rd(4));
      } else if (strchr("fFeEgGaA", c))
        out += strf((sp + c).c_str(), bitsd(rd(8)));
      else if (c == 'p')
        out += strf((sp + "p").c_str(), (void*)rd(8));
      else if (c == 's')
        out += strf((sp + "s").c_str(), cstr(w, (int)l, rd(8)).c_str());
      i = j;
    }
    fputs(out.c_str(), stdout);
    if (ops.size() > 2) {
      u32 one = 1;
      memcpy(resolve(w, (int)l, Space::PARAM, (u64)ops[2].imm, 4, true), &one, 4);
    }
  }
  fflush(stdout);
}
static void svc(Tr& t, Handler h) {
  Inst& I = t.out(h, C_OTHER);
  I.x = new std::vector<Operand>(t.in->ops);
}
static void op_vprintf(Tr& t) { svc(t, hprintf); }
static void op_assert(Tr& t) { svc(t, hassert); }

void registerSync() {
  auto& T = opTable();
#define R(n) T[#n] = op_##n;
  R(bra);
  R(brx);
  R(ret);
  R(exit);
  R(trap);
  R(brkpt);
  R(nanosleep);
  R(fence);
  R(membar);
  R(setmaxnreg);
  R(griddepcontrol);
  R(bar);
  R(barrier);
  R(shfl);
  R(vote);
  R(activemask);
  R(elect);
  R(match);
  R(redux);
  R(pmevent)
  T["$vprintf"] = op_vprintf;
  T["$__assertfail"] = op_assert;
}
}  // namespace ptxsim

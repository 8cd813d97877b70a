#include "tr.h"
#include <cstdarg>

namespace ptxsim {
const char* kClsName[C_COUNT] = {"int",        "float",          "half",      "sfu",         "cvt.frnd", "cvt.f2i",
                                 "cvt.i2f",    "cvt.f2f",        "cvt.i2i",   "mov",         "control",  "ld.global",
                                 "st.global",  "ld.shared",      "st.shared", "ld/st.other", "atomic",   "cp.async",
                                 "tma",        "ldmatrix",       "stmatrix",  "movmatrix",   "mma",      "wgmma",
                                 "wgmma.sync", "barrier",        "fence",     "mbarrier",    "shuffle",  "vote",
                                 "redux",      "griddepcontrol", "other"};
const char* kGrpName[G_COUNT] = {"tensor", "integer", "float",   "conversion", "move",    "shared", "global",
                                 "atomic", "async",   "shuffle", "branch",     "barrier", "other"};
Grp clsGroup(int c) {
  switch (c) {
    case C_MMA:
    case C_WGMMA: return G_TENSOR;
    case C_INT: return G_INT;
    case C_FLOAT:
    case C_HALF:
    case C_SFU: return G_FLOAT;
    case C_FRND:
    case C_F2I:
    case C_I2F:
    case C_F2F:
    case C_I2I: return G_CVT;
    case C_MOV: return G_MOV;
    case C_LDS:
    case C_STS:
    case C_LDMATRIX:
    case C_STMATRIX: return G_SHARED;
    case C_LDG:
    case C_STG: return G_GLOBAL;
    case C_ATOM: return G_ATOM;
    case C_CPASYNC:
    case C_TMA: return G_ASYNC;
    case C_SHFL:
    case C_VOTE:
    case C_REDUX:
    case C_MOVMATRIX: return G_SHFL;
    case C_CTRL: return G_BRANCH;
    case C_BAR:
    case C_FENCE:
    case C_MBAR:
    case C_WGSYNC:
    case C_GRIDDEP: return G_BAR;
    default: return G_OTHER;
  }
}

std::unordered_map<std::string, EmitFn>& opTable() {
  static std::unordered_map<std::string, EmitFn> t;
  return t;
}
void Tr::err(const std::string& s) {
  std::string pos = in ? strf("PTX line %u: %s: in instruction '%s'", in->line, s.c_str(), in->op.c_str()) : s;
  fail("ptxsim: cannot translate kernel %s: %s\n    %s", P.fn->name.c_str(), pos.c_str(),
       in ? P.mod->lineText(in->line).c_str() : "");
}
s32 Tr::konst(u64 v, int bytes) {
  if (bytes == 4) v &= 0xffffffffu;
  auto key = std::make_pair(v, bytes);
  auto it = kcache.find(key);
  if (it != kcache.end()) return it->second;
  s32 off = (s32)P.kpool.size();
  if (bytes == 8)
    for (int i = 0; i < 32; ++i) {
      P.kpool.push_back((u32)v);
      P.kpool.push_back((u32)(v >> 32));
    }
  else
    for (int i = 0; i < 32; ++i) P.kpool.push_back((u32)v);
  s32 s = (s32)(0x80000000u | (u32)off);
  kcache[key] = s;
  return s;
}
s32 Tr::S(const Operand& o, Ty t) {
  int bits = tyBits(t), bytes = bits > 32 ? 8 : 4;
  switch (o.k) {
    case Operand::REG: {
      Ty rt = regTy[o.reg];
      if (rt == Ty::PRED) err("predicate used as a value");
      int rb = tyBits(rt) > 32 ? 8 : 4;
      if (tyBits(rt) == 128) err("128-bit operand");
      if (rb != bytes) {
        if (rb == 8 && bytes == 4) err("64-bit register where a 32-bit operand is expected");
        err("32-bit register where a 64-bit operand is expected");
      }
      return slot[o.reg];
    }
    case Operand::INT: {
      u64 v = (u64)o.imm;
      if (bits < 32) v &= (1ull << bits) - 1;
      if (t == Ty::F32 || t == Ty::F64) err("integer literal for a float operand");
      return konst(v, bytes);
    }
    case Operand::FLT: {
      if (t == Ty::F64 && o.isF64) return konst((u64)o.imm, 8);
      if (bytes == 4 && !o.isF64) return konst((u64)o.imm, 4);
      if (t == Ty::F32 && o.isF64) return konst(fbits((float)bitsd((u64)o.imm)), 4);
      if (bytes == 8 && o.isF64) return konst((u64)o.imm, 8);
      err("float literal of the wrong width");
    }
    case Operand::SINK: return konst(0, bytes);
    default: err("unsupported source operand");
  }
}
s32 Tr::D(const Operand& o, int bytes) {
  if (o.k == Operand::SINK) {  // scratch slot
    return bytes == 8 ? 32 : 0;
  }
  if (o.k != Operand::REG) err("destination must be a register");
  if (regTy[o.reg] == Ty::PRED) err("predicate destination not expected");
  int rb = tyBits(regTy[o.reg]) > 32 ? 8 : 4;
  if (rb != bytes) err(strf("destination register has %d bytes, instruction writes %d", rb, bytes));
  return slot[o.reg];
}
s32 Tr::pred(const Operand& o, bool& neg) {
  neg = o.neg;
  if (o.k == Operand::INT) {
    neg = false;
    return o.imm ? 0 : 1;
  }
  if (o.k != Operand::REG || regTy[o.reg] != Ty::PRED) err("predicate operand expected");
  return slot[o.reg];
}
s32 Tr::predD(const Operand& o) {
  if (o.k == Operand::SINK) return 2;
  if (o.k != Operand::REG || regTy[o.reg] != Ty::PRED) err("predicate destination expected");
  return slot[o.reg];
}
Inst& Tr::out(Handler h, Cls c) {
  P.code.emplace_back();
  Inst& I = P.code.back();
  I.fn = h;
  I.cls = c;
  if (in->guard >= 0) {
    I.guard = slot[in->guard];
    I.gneg = in->gneg;
  }
  P.info.push_back({in->line, in->loc, 0});
  return I;
}
void Tr::addr(Inst& I, const Operand& o) {
  if (o.k != Operand::ADDR) err("address operand expected");
  const Operand& b = o.v[0];
  I.imm = o.imm;
  if (b.k == Operand::REG) {
    int rb = tyBits(regTy[b.reg]) > 32 ? 8 : 4;
    I.a = slot[b.reg];
    I.t2 = rb == 8;  // address register width
  } else if (b.k == Operand::INT) {
    I.imm += b.imm;
    I.a = konst(0, 8);
    I.t2 = 1;
  } else
    err("unsupported address");
}

// Instructions left out on purpose.
static const char* refused(const std::string& op) {
  static const std::unordered_map<std::string, const char*> t = {
      {"multimem", "multimem (multicast memory of several devices) is not supported: one device is simulated"},
      {"wmma", "wmma is not supported, mma.sync is"},
      {"tex", "textures are not supported"},
      {"tld4", "textures are not supported"},
      {"txq", "textures are not supported"},
      {"suld", "surfaces are not supported"},
      {"sust", "surfaces are not supported"},
      {"sured", "surfaces are not supported"},
      {"suq", "surfaces are not supported"},
      {"tcgen05", "tcgen05 needs sm_100"},
      {"clusterlaunchcontrol", "clusterlaunchcontrol needs sm_100"},
      {"alloca", "alloca is not supported"},
      {"stacksave", "alloca is not supported"},
      {"stackrestore", "alloca is not supported"},
      {"vadd", "scalar video instructions are not supported"},
      {"vsub", "scalar video instructions are not supported"},
      {"vabsdiff", "scalar video instructions are not supported"},
      {"vmin", "scalar video instructions are not supported"},
      {"vmax", "scalar video instructions are not supported"},
      {"vshl", "scalar video instructions are not supported"},
      {"vshr", "scalar video instructions are not supported"},
      {"vmad", "scalar video instructions are not supported"},
      {"vset", "scalar video instructions are not supported"}};
  auto it = t.find(op);
  return it == t.end() ? nullptr : it->second;
}
static bool noDest(const PInst& p) {
  const std::string& m = p.mods[0];
  if (m == "bar" || m == "barrier") return std::find(p.mods.begin(), p.mods.end(), "red") == p.mods.end();
  return m == "nanosleep" || m == "brx" || m == "bra" || m == "setmaxnreg" || m == "pmevent" || m == "st" || m == "red";
}

void Tr::expand(Function& f, int depth, std::unordered_map<Var*, u64>& pmap, int retLabel,
                std::vector<std::string>& stack) {
  if (depth > 24) fail("ptxsim: call depth over 24 (recursion is not supported): %s", f.name.c_str());
  for (auto& s : stack)
    if (s == f.name) fail("ptxsim: recursive function %s is not supported", f.name.c_str());
  stack.push_back(f.name);
  f.mod->parseBody(f);
  int rb = (int)regTy.size();
  for (auto& r : f.regs) regTy.push_back(r.ty);
  int lb = (int)labelPos.size();
  labelPos.resize(lb + f.labelPos.size(), -1);
  int tb = (int)tables.size();
  for (auto& t : f.tables) {
    auto c = t;
    for (int& x : c) x += lb;
    tables.push_back(c);
  }
  // label positions: map from the function's instruction index
  std::unordered_map<int, std::vector<int>> at;
  for (size_t i = 0; i < f.labelPos.size(); ++i) at[f.labelPos[i]].push_back((int)i);
  auto varAddr = [&](Var* v, Space& sp) -> u64 {
    auto it = pmap.find(v);
    if (it != pmap.end()) {
      sp = v->space == Space::LOCAL ? Space::LOCAL : Space::PARAM;
      return it->second;
    }
    switch (v->space) {
      case Space::LOCAL:
      case Space::PARAM: {
        localTop = (localTop + v->align - 1) / v->align * v->align;
        u64 a = localTop;
        localTop += (u32)std::max<u64>(v->size, 4);
        if (v->space == Space::PARAM) {
          a += g_localWin;
          sp = Space::PARAM;
        } else
          sp = Space::LOCAL;
        pmap[v] = a;
        return a;
      }
      case Space::SHARED: {
        sp = Space::SHARED;
        return sharedAddr[v];  // placed beforehand
      }
      default:
        sp = v->space;
        if (!v->placed) fail("ptxsim: symbol %s is not defined in this module", v->name.c_str());
        return v->addr;
    }
  };
  std::function<void(Operand&)> fix = [&](Operand& o) {
    if (o.k == Operand::REG)
      o.reg += rb;
    else if (o.k == Operand::LABEL) {
      if (o.label >= 0)
        o.label += lb;
      else
        o.label = -2 - (tb + f.tableByName.at(o.name));
    } else if (o.k == Operand::SYM) {
      if (o.var) {
        Space sp;
        o.imm += (s64)varAddr(o.var, sp);
        o.rsp = sp;
        o.k = Operand::INT;
      }
    } else if (o.k == Operand::ADDR) {
      for (auto& x : o.v) fix(x);
      o.rsp = o.v[0].rsp;
      return;
    }
    for (auto& x : o.v) fix(x);
  };
  for (size_t i = 0; i <= f.insts.size(); ++i) {
    auto it = at.find((int)i);
    if (it != at.end())
      for (int l : it->second) labelPos[lb + l] = (int)list.size();
    if (i == f.insts.size()) break;
    PInst p = f.insts[i];
    if (p.guard >= 0) p.guard += rb;
    if (p.mods[0] == "call") {
      // call[.uni] (ret), fname, (args);  call fname, (args);  call fname;
      in = &f.insts[i];
      std::vector<Operand> ret, args;
      std::string name;
      size_t k = 0;
      if (p.ops.size() > k && p.ops[k].k == Operand::VEC) ret = p.ops[k++].v;
      if (k >= p.ops.size() || (p.ops[k].k != Operand::SYM && p.ops[k].k != Operand::LABEL))
        err("indirect calls are not supported");
      name = p.ops[k++].name;
      if (p.ops.size() > k && p.ops[k].k == Operand::VEC) args = p.ops[k++].v;
      if (p.ops.size() > k) err("indirect calls are not supported");
      auto fi = f.mod->funcs.find(name);
      if (fi == f.mod->funcs.end()) err("call of unknown function " + name);
      Function& callee = *fi->second;
      if (!callee.hasBody) {
        // runtime services
        PInst q = p;
        q.mods = {"$" + name};
        q.op = "call " + name;
        q.ops.clear();
        for (auto& a : args) {
          Operand x = a;
          fix(x);
          q.ops.push_back(x);
        }
        for (auto& a : ret) {
          Operand x = a;
          fix(x);
          q.ops.push_back(x);
        }
        list.push_back(q);
        continue;
      }
      callee.mod->parseBody(callee);
      if (args.size() != callee.params.size() || ret.size() != callee.rets.size()) err("call argument count mismatch");
      int skip = -1;
      if (p.guard >= 0) {  // predicated call: branch around
        skip = (int)labelPos.size();
        labelPos.push_back(-1);
        PInst b;
        b.op = "bra";
        b.mods = {"bra"};
        b.guard = p.guard;
        b.gneg = !p.gneg;
        b.line = p.line;
        b.loc = p.loc;
        Operand lo;
        lo.k = Operand::LABEL;
        lo.label = skip;
        b.ops.push_back(lo);
        list.push_back(b);
      }
      int endL = (int)labelPos.size();
      labelPos.push_back(-1);
      std::unordered_map<Var*, u64> cm;
      int calleeRegBase = (int)regTy.size();
      std::vector<PInst> after;
      auto bind = [&](Var& formal, Operand a, bool isRet) {
        fix(a);
        if (formal.space == Space::REG) {
          int ri = -1;
          for (size_t r = 0; r < callee.regs.size(); ++r)
            if (callee.regs[r].name == formal.name) {
              ri = (int)r;
              break;
            }
          PInst mv;
          mv.line = p.line;
          mv.loc = p.loc;
          mv.mods = {"mov", callee.regs[ri].ty == Ty::PRED ? "pred" : strf("b%d", tyBits(callee.regs[ri].ty))};
          mv.op = "mov." + mv.mods[1];
          Operand fr;
          fr.k = Operand::REG;
          fr.reg = calleeRegBase + ri;
          if (isRet) {
            mv.ops = {a, fr};
            after.push_back(mv);
          } else {
            mv.ops = {fr, a};
            list.push_back(mv);
          }
        } else if (a.k == Operand::INT && a.rsp == Space::PARAM)
          cm[&formal] = (u64)a.imm;
        else
          err("call arguments must be .param variables");
      };
      for (size_t q = 0; q < args.size(); ++q) bind(callee.params[q], args[q], false);
      for (size_t q = 0; q < ret.size(); ++q) bind(callee.rets[q], ret[q], true);
      expand(callee, depth + 1, cm, endL, stack);
      labelPos[endL] = (int)list.size();
      for (auto& mv : after) list.push_back(mv);
      if (skip >= 0) labelPos[skip] = (int)list.size();
      continue;
    }
    for (auto& o : p.ops) fix(o);
    if (p.mods[0] == "ret" && depth > 0) {
      p.op = "bra";
      p.mods = {"bra"};
      Operand lo;
      lo.k = Operand::LABEL;
      lo.label = retLabel;
      p.ops = {lo};
    }
    list.push_back(std::move(p));
  }
  stack.pop_back();
}

static void visitRegs(const Operand& o, const std::function<void(int)>& f) {
  if (o.k == Operand::REG) f(o.reg);
  for (auto& x : o.v) visitRegs(x, f);
}

void Tr::allocRegs() {
  const size_t n = list.size(), R = regTy.size();
  slot.assign(R, -1);
  wgReg.assign(R, 0);
  // predicates: one word each
  int np = 3;
  for (size_t r = 0; r < R; ++r)
    if (regTy[r] == Ty::PRED) slot[r] = np++;
  P.npreds = np;
  // basic blocks
  std::vector<char> leader(n + 1, 0);
  leader[0] = 1;
  for (int l : labelPos)
    if (l >= 0) leader[l] = 1;
  auto isBr = [&](const PInst& p) {
    const auto& m = p.mods[0];
    return m == "bra" || m == "brx" || m == "ret" || m == "exit";
  };
  for (size_t i = 0; i < n; ++i)
    if (isBr(list[i])) leader[i + 1] = 1;
  std::vector<int> bstart;
  std::vector<int> blockOf(n + 1, 0);
  for (size_t i = 0; i < n; ++i) {
    if (leader[i]) bstart.push_back((int)i);
    blockOf[i] = (int)bstart.size() - 1;
  }
  size_t B = bstart.size();
  bstart.push_back((int)n);
  size_t W = (R + 63) / 64;
  std::vector<u64> use(B * W), def(B * W), lin(B * W), lout(B * W);
  auto bit = [&](std::vector<u64>& v, size_t b, int r) -> bool { return v[b * W + r / 64] >> (r % 64) & 1; };
  auto set = [&](std::vector<u64>& v, size_t b, int r) { v[b * W + r / 64] |= 1ull << (r % 64); };
  std::vector<std::vector<int>> succ(B);
  std::vector<char> pinned(R, 0);
  int wgId = 0;
  for (size_t b = 0; b < B; ++b) {
    for (int i = bstart[b]; i < bstart[b + 1]; ++i) {
      const PInst& p = list[i];
      bool nd = noDest(p) || p.ops.empty();
      bool wg = p.mods[0] == "wgmma" && p.mods.size() > 1 && p.mods[1] == "mma_async";
      auto useF = [&](int r) {
        if (!bit(def, b, r)) set(use, b, r);
      };
      std::vector<int> defs;
      for (size_t k = 0; k < p.ops.size(); ++k) {
        const Operand& o = p.ops[k];
        bool isDest = k == 0 && !nd && (o.k == Operand::REG || o.k == Operand::VEC || o.k == Operand::PAIR);
        if (wg && (k == 0 || k == 1) && o.k == Operand::VEC)
          visitRegs(o, [&](int r) {
            pinned[r] = 1;
            if (!wgReg[r]) wgReg[r] = ++wgId;
          });
        if (wg && k == 0) {
          visitRegs(o, useF);
          continue;
        }
        if (isDest)
          visitRegs(o, [&](int r) { defs.push_back(r); });
        else
          visitRegs(o, useF);
      }
      if (p.mods[0][0] == '$')
        for (auto& o : p.ops) visitRegs(o, useF);
      if (p.guard >= 0) useF(p.guard);
      if (p.guard >= 0)
        for (int r : defs) useF(r);  // a guarded write does not kill
      else
        for (int r : defs) set(def, b, r);
    }
    const PInst& last = list[bstart[b + 1] - 1];
    bool fall = true;
    auto to = [&](int l) {
      int pos = labelPos[l];
      if (pos >= 0 && pos < (int)n) succ[b].push_back(blockOf[pos]);
    };
    if (last.mods[0] == "bra") {
      to(last.ops[0].label);
      fall = last.guard >= 0;
    } else if (last.mods[0] == "brx") {
      for (int l : tables[-2 - last.ops[1].label]) to(l);
      fall = last.guard >= 0;
    } else if (last.mods[0] == "ret" || last.mods[0] == "exit")
      fall = last.guard >= 0;
    if (fall && b + 1 < B) succ[b].push_back((int)b + 1);
  }
  for (bool ch = true; ch;) {
    ch = false;
    for (size_t b = B; b-- > 0;) {
      u64* lo = &lout[b * W];
      u64* li = &lin[b * W];
      for (int s : succ[b])
        for (size_t k = 0; k < W; ++k) lo[k] |= lin[(size_t)s * W + k];
      for (size_t k = 0; k < W; ++k) {
        u64 x = use[b * W + k] | (lo[k] & ~def[b * W + k]);
        if (x != li[k]) {
          li[k] = x;
          ch = true;
        }
      }
    }
  }
  std::vector<int> st(R, INT32_MAX), en(R, -1);
  auto touch = [&](int r, int pos) {
    st[r] = std::min(st[r], pos);
    en[r] = std::max(en[r], pos);
  };
  for (size_t b = 0; b < B; ++b) {
    for (size_t k = 0; k < W; ++k) {
      for (u64 x = lin[b * W + k]; x; x &= x - 1) touch((int)(k * 64 + __builtin_ctzll(x)), bstart[b]);
      for (u64 x = lout[b * W + k]; x; x &= x - 1) touch((int)(k * 64 + __builtin_ctzll(x)), bstart[b + 1]);
    }
    for (int i = bstart[b]; i < bstart[b + 1]; ++i) {
      for (auto& o : list[i].ops) visitRegs(o, [&](int r) { touch(r, i); });
      if (list[i].guard >= 0) touch(list[i].guard, i);
    }
  }
  // linear scan, separate pools for 4- and 8-byte cells (lane layouts differ)
  std::vector<int> order;
  for (size_t r = 0; r < R; ++r)
    if (regTy[r] != Ty::PRED && en[r] >= 0) order.push_back((int)r);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return st[a] != st[b] ? st[a] < st[b] : a < b; });
  int top = 32 + 64;  // scratch destinations for '_'
  std::vector<int> freeL[3];
  std::multimap<int, int> act;  // end -> reg
  auto cls = [&](int r) {
    int b = tyBits(regTy[r]);
    return b > 64 ? 2 : b > 32 ? 1 : 0;
  };
  static const int words[3] = {32, 64, 128};
  for (int r : order) {
    while (!act.empty() && act.begin()->first < st[r]) {
      int q = act.begin()->second;
      freeL[cls(q)].push_back(slot[q]);
      act.erase(act.begin());
    }
    int c = cls(r);
    if (!pinned[r] && !freeL[c].empty()) {
      slot[r] = freeL[c].back();
      freeL[c].pop_back();
    } else {
      slot[r] = top;
      top += words[c];
    }
    if (!pinned[r]) act.emplace(en[r], r);
  }
  P.regWords = top;
  P.wgCount = wgId;
  P.wgmmaReg.assign((size_t)top / 32 + 4, 0);
  for (size_t r = 0; r < R; ++r)
    if (wgReg[r]) P.wgmmaReg[(size_t)slot[r] / 32] = wgReg[r];
}

void Tr::run() {
  Function& f = *P.fn;
  // kernel parameters
  u32 off = 0;
  std::unordered_map<Var*, u64> pm;
  for (auto& v : f.params) {
    off = (off + v.align - 1) / v.align * v.align;
    P.paramOff.push_back(off);
    P.paramSize.push_back((u32)v.size);
    off += (u32)v.size;
  }
  P.paramBytes = off;
  P.params = (u8*)aligned_alloc(128, (off + 255) / 128 * 128);
  memset(P.params, 0, (off + 255) / 128 * 128);
  f.mod->parseBody(f);
  for (size_t i = 0; i < f.params.size(); ++i) pm[&f.params[i]] = (u64)P.params + P.paramOff[i];
  // shared variables: everything reachable from the kernel
  std::vector<Function*> work{&f};
  std::set<Function*> seen{&f};
  std::vector<Var*> sh;
  std::set<Var*> shSeen;
  while (!work.empty()) {
    Function* g = work.back();
    work.pop_back();
    g->mod->parseBody(*g);
    std::function<void(const Operand&)> vis = [&](const Operand& o) {
      if (o.var && o.var->space == Space::SHARED && shSeen.insert(o.var).second) sh.push_back(o.var);
      if ((o.k == Operand::SYM || o.k == Operand::LABEL) && !o.var) {
        auto it = f.mod->funcs.find(o.name);
        if (it != f.mod->funcs.end() && it->second->hasBody && seen.insert(it->second.get()).second)
          work.push_back(it->second.get());
      }
      for (auto& x : o.v) vis(x);
    };
    for (auto& p : g->insts)
      for (auto& o : p.ops) vis(o);
  }
  std::stable_sort(sh.begin(), sh.end(), [](Var* a, Var* b) { return a->align > b->align; });
  u32 dynAlign = 16;
  for (Var* v : sh) {
    if (v->size == 0) {
      dynAlign = std::max(dynAlign, v->align);
      continue;
    }
    staticTop = (staticTop + v->align - 1) / v->align * v->align;
    sharedAddr[v] = staticTop;
    staticTop += (u32)v->size;
  }
  u32 st = staticTop - kSmemBase;
  if (st) st = (st + dynAlign - 1) / dynAlign * dynAlign;
  for (Var* v : sh)
    if (v->size == 0) sharedAddr[v] = kSmemBase + st;
  P.staticSmem = st;
  std::vector<std::string> stack;
  expand(f, 0, pm, -1, stack);
  // a trailing ret keeps control flow inside the program
  PInst r;
  r.op = "ret";
  r.mods = {"ret"};
  r.line = list.empty() ? f.bodyLine : list.back().line;
  list.push_back(r);
  P.localBytes = (localTop + 15) / 16 * 16;
  allocRegs();
  P.code.reserve(list.size() + 16);
  instStart.resize(list.size() + 1);
  auto& tab = opTable();
  for (size_t i = 0; i < list.size(); ++i) {
    instStart[i] = (u32)P.code.size();
    in = &list[i];
    used.assign(in->mods.size(), 0);
    auto it = tab.find(in->mods[0]);
    if (it == tab.end()) {
      const char* why = refused(in->mods[0]);
      err(why ? why : "unknown instruction");
    }
    it->second(*this);
    for (size_t k = 1; k < in->mods.size(); ++k)
      if (!used[k]) err("unsupported modifier '." + in->mods[k] + "'");
    {
      P.regRd.resize(P.code.size());
      P.regWr.resize(P.code.size());
      P.isMov.resize(P.code.size());
      if (P.code.size() > instStart[i]) {
        bool nd = noDest(*in) || in->mods[0] == "wgmma";
        for (size_t k = 0; k < in->ops.size(); ++k) {
          bool isDest = k == 0 && !nd && in->ops[0].k != Operand::ADDR;
          visitRegs(in->ops[k], [&](int r) {
            if (regTy[r] != Ty::PRED) (isDest ? P.regWr : P.regRd).back().push_back(slot[r]);
          });
        }
        P.isMov.back() = in->mods[0] == "mov";
      }
    }
    if (P.wgCount) {
      P.wgTouch.resize(P.code.size());
      if (P.code.size() > instStart[i] && in->mods[0] != "wgmma") {
        auto& v = P.wgTouch.back();
        bool nd = noDest(*in);
        for (size_t k = 0; k < in->ops.size(); ++k) {
          bool isDest = k == 0 && !nd && in->ops[0].k != Operand::ADDR;
          visitRegs(in->ops[k], [&](int r) {
            if (wgReg[r]) v.push_back((u16)(wgReg[r] | (isDest ? 0x8000 : 0)));
          });
        }
      }
    }
  }
  instStart[list.size()] = (u32)P.code.size();
  // branch targets were stored as list labels in imm with t == 0xbb
  for (auto& I : P.code) {
    if (I.t == 0xbb) {
      I.imm = instStart[labelPos[I.imm]];
    }
    if (I.t == 0xbc) {
      s32* v = const_cast<s32*>(I.v);
      for (u32 k = 0; k < I.fl; ++k) v[k] = (s32)instStart[labelPos[v[k]]];
    }
  }
  in = nullptr;
}

Program* translate(Module& m, Function& f) {
  static bool once = [] {
    registerAlu();
    registerMem();
    registerSync();
    registerTensor();
    return true;
  }();
  (void)once;
  auto p = std::make_unique<Program>();
  p->mod = &m;
  p->fn = &f;
  Tr t(*p);
  t.run();
  if (p->kpool.empty()) p->kpool.resize(64);
  return p.release();
}
}  // namespace ptxsim

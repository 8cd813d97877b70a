// One kernel from its syntax tree to bytecode.
#include "translate/translator.h"

namespace ptxsim {

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
  auto p = std::make_unique<Program>();
  p->mod = &m;
  p->fn = &f;
  Tr t(*p);
  t.run();
  if (p->kpool.empty()) p->kpool.resize(64);
  return p.release();
}

}  // namespace ptxsim

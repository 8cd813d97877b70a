// Calls are expanded in place: a kernel becomes one list of instructions.
#include "translate/translator.h"

namespace ptxsim {

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

}  // namespace ptxsim

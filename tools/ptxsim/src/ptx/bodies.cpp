// Bodies of functions: scopes, operands, instructions, labels.
#include "ptx/parser.h"
#include "ptx/special_registers.h"

namespace ptxsim {

int Parser::findReg(const std::string& n) {
  for (int s = cur; s >= 0; s = scopes[s].parent) {
    auto it = scopes[s].regs.find(n);
    if (it != scopes[s].regs.end()) return it->second;
  }
  return -1;
}

Var* Parser::findVar(const std::string& n) {
  for (int s = cur; s >= 0; s = scopes[s].parent) {
    auto it = scopes[s].vars.find(n);
    if (it != scopes[s].vars.end()) return it->second;
  }
  auto it = m.vars.find(n);
  return it == m.vars.end() ? nullptr : it->second.get();
}

std::string Parser::identDotted() {
  ws();
  const char* b = p;
  if (!(p < end && isId0(*p))) err(strf("expected operand near '%.20s'", p));
  ++p;
  while (p < end && isId(*p)) ++p;
  // special registers such as %tid.x
  if (*b == '%' && p < end && *p == '.' && (p[1] == 'x' || p[1] == 'y' || p[1] == 'z' || p[1] == 'w') && !isId(p[2]))
    p += 2;
  return std::string(b, p);
}

Operand Parser::operand() {
  Operand o;
  char c = peek();
  if (c == '{') {
    ++p;
    o.k = Operand::VEC;
    if (accept('}')) return o;
    for (;;) {
      o.v.push_back(operand());
      if (accept('}')) break;
      expect(',');
    }
    return o;
  }
  if (c == '[') {
    ++p;
    o.k = Operand::ADDR;
    o.v.push_back(addrBase(o));
    while (accept(',')) o.v.push_back(operand());
    expect(']');
    return o;
  }
  if (c == '(') {  // call argument lists or constant expressions
    const char* sp = p;
    u32 sl = line;
    ++p;
    ws();
    if (isdigit((unsigned char)*p) || *p == '-') {
      p = sp;
      line = sl;
      o.k = Operand::INT;
      o.imm = constExpr();
      return o;
    }
    o.k = Operand::VEC;
    if (accept(')')) return o;
    for (;;) {
      o.v.push_back(operand());
      if (accept(')')) break;
      expect(',');
    }
    return o;
  }
  if (c == '!') {
    ++p;
    o = operand();
    o.neg = true;
    return o;
  }
  if (c == '-' || isdigit((unsigned char)c) || c == '~') {
    bool ng = false;
    if (c == '-') {
      ++p;
      ng = true;
      ws();
      if (isId0(*p)) {
        o = operand();
        o.neg = true;
        return o;
      }
    }
    if (c == '~') {
      o.k = Operand::INT;
      o.imm = constExpr();
      return o;
    }
    bool f64;
    if (number(o.imm, f64)) {
      o.k = Operand::FLT;
      o.isF64 = f64;
      if (ng) o.imm ^= f64 ? (s64)0x8000000000000000ull : (s64)0x80000000;
    } else {
      o.k = Operand::INT;
      if (ng) o.imm = -o.imm;
    }
    return o;
  }
  std::string id = identDotted();
  if (id == "_") {
    o.k = Operand::SINK;
    return o;
  }
  int r = findReg(id);
  if (r >= 0) {
    o.k = Operand::REG;
    o.reg = r;
    if (peek() == '|') {
      ++p;
      Operand q;
      q.k = Operand::PAIR;
      q.v.push_back(o);
      q.v.push_back(operand());
      return q;
    }
    return o;
  }
  if (id[0] == '%') {
    int s = sregByName(id);
    if (s < 0) err("unknown register " + id);
    o.k = Operand::SREG;
    o.sreg = s;
    return o;
  }
  if (id == "WARP_SZ") {
    o.k = Operand::INT;
    o.imm = 32;
    return o;
  }
  if (Var* v = findVar(id)) {
    o.k = Operand::SYM;
    o.var = v;
    o.name = id;
    if (peek() == '+') {
      ++p;
      o.imm = constExpr();
    }
    return o;
  }
  if (m.funcs.count(id)) {
    o.k = Operand::SYM;
    o.name = id;
    return o;
  }
  o.k = Operand::LABEL;
  o.name = id;
  o.label = (int)labelRefs.size();
  labelRefs.push_back({id, cur});
  return o;
}

Operand Parser::addrBase(Operand& a) {
  Operand b;
  ws();
  if (isId0(*p)) {
    b = operand();
    if (b.k == Operand::SYM) {
      a.imm += b.imm;
      b.imm = 0;
    }
    if (b.k == Operand::LABEL) err("unknown symbol '" + b.name + "' in address");
  } else {
    b.k = Operand::INT;
    b.imm = 0;
    a.imm = constExpr();
    return b;
  }
  for (;;) {
    if (accept('+')) {
      ws();
      bool ng = accept('-');
      s64 v = isdigit((unsigned char)*p) || *p == '(' ? constExpr() : (err("bad address offset"), 0);
      a.imm += ng ? -v : v;
    } else if (peek() == '-') {
      ++p;
      a.imm -= constExpr();
    } else
      break;
  }
  return b;
}

void Parser::body(Function& f) {
  fn = &f;
  scopes.push_back({-1, {}, {}, {}});
  cur = 0;
  for (auto& v : f.params) {
    if (v.space == Space::REG) {
      scopes[0].regs[v.name] = (int)f.regs.size();
      f.regs.push_back({v.ty, v.name});
    } else
      scopes[0].vars[v.name] = &v;
  }
  for (auto& v : f.rets) {
    if (v.space == Space::REG) {
      scopes[0].regs[v.name] = (int)f.regs.size();
      f.regs.push_back({v.ty, v.name});
    } else
      scopes[0].vars[v.name] = &v;
  }
  expect('{');
  int depth = 1;
  Loc loc;
  while (depth > 0) {
    char c = peek();
    if (p >= end) err("unexpected end of function body");
    if (c == '{') {
      ++p;
      ++depth;
      scopes.push_back({cur, {}, {}, {}});
      cur = (int)scopes.size() - 1;
      continue;
    }
    if (c == '}') {
      ++p;
      --depth;
      cur = scopes[cur].parent;
      continue;
    }
    if (c == ';') {
      ++p;
      continue;
    }
    if (c == '.') {
      const char* sp = p;
      std::string w = word();
      if (w == ".loc") {
        s64 a, b;
        bool ff;
        number(a, ff);
        number(b, ff);
        loc = {(u32)a, (u32)b};
        while (p < end && *p != '\n') ++p;
      } else if (w == ".reg") {
        Ty t = Ty::NONE;
        int vec = 1;
        for (;;) {
          ws();
          if (*p != '.') break;
          std::string tw = word();
          if (tw == ".v2")
            vec = 2;
          else if (tw == ".v4")
            vec = 4;
          else if (!tyParse(std::string_view(tw).substr(1), t))
            err("unknown register type " + tw);
        }
        if (vec != 1) err("vector registers are not supported");
        do {
          std::string n = identDotted();
          if (accept('<')) {
            s64 cnt;
            bool ff;
            number(cnt, ff);
            expect('>');
            for (s64 i = 0; i < cnt; ++i) {
              std::string rn = n + std::to_string(i);
              scopes[cur].regs[rn] = (int)f.regs.size();
              f.regs.push_back({t, rn});
            }
          } else {
            scopes[cur].regs[n] = (int)f.regs.size();
            f.regs.push_back({t, n});
          }
        } while (accept(','));
        expect(';');
      } else if (w == ".local" || w == ".shared" || w == ".param" || w == ".global" || w == ".const") {
        auto v = std::make_unique<Var>();
        v->space = w == ".local"    ? Space::LOCAL
                   : w == ".shared" ? Space::SHARED
                   : w == ".param"  ? Space::PARAM
                   : w == ".const"  ? Space::CONST
                                    : Space::GLOBAL;
        varDecl(*v);
        expect(';');
        scopes[cur].vars[v->name] = v.get();
        f.vars.push_back(std::move(v));
      } else if (w == ".pragma" || w == ".callprototype")
        skipStatement();
      else {
        p = sp;
        err("unknown directive " + w + " in function body");
      }
      continue;
    }
    // label?
    {
      const char* sp = p;
      u32 sl = line;
      if (isId0(*p) && *p != '%') {
        std::string id = word();
        const char* q = p;
        while (q < end && (*q == ' ' || *q == '\t')) ++q;
        if (*q == ':' && q[1] != ':') {
          p = q + 1;
          ws();
          if (*p == '.') {  // .branchtargets / .calltargets / .callprototype
            const char* sp2 = p;
            std::string w = word();
            if (w == ".branchtargets") {
              std::vector<int> t;
              do {
                Operand o = operand();
                if (o.k != Operand::LABEL) err("label expected");
                t.push_back(o.label);
              } while (accept(','));
              expect(';');
              f.tableByName[id] = (int)f.tables.size();
              f.tables.push_back(t);
              continue;
            }
            if (w == ".callprototype" || w == ".calltargets") {
              skipStatement();
              continue;
            }
            p = sp2;
          }
          int l = (int)f.labelPos.size();
          f.labelPos.push_back((int)f.insts.size());
          f.labelName.push_back(id);
          if (scopes[cur].labels.count(id)) err("duplicate label " + id);
          scopes[cur].labels[id] = l;
          continue;
        }
        p = sp;
        line = sl;
      }
    }
    PInst in;
    in.line = line;
    in.loc = loc;
    if (accept('@')) {
      if (accept('!')) in.gneg = true;
      std::string r = identDotted();
      in.guard = findReg(r);
      if (in.guard < 0) err("unknown predicate " + r);
    }
    in.line = (ws(), line);
    in.op = opcode();
    if (in.op.empty()) err(strf("cannot parse statement near '%.30s'", p));
    for (size_t i = 0; i <= in.op.size();) {
      size_t j = in.op.find('.', i);
      if (j == std::string::npos) j = in.op.size();
      in.mods.push_back(in.op.substr(i, j - i));
      i = j + 1;
    }
    if (!accept(';')) {
      for (;;) {
        in.ops.push_back(operand());
        if (accept(';')) break;
        if (peek() == '|') {
          err("unexpected '|'");
        }
        expect(',');
      }
    }
    f.insts.push_back(std::move(in));
  }
  // resolve labels
  std::vector<int> res(labelRefs.size());
  auto lookup = [&](const LabelRef& r) {
    for (int s = r.scope; s >= 0; s = scopes[s].parent) {
      auto it = scopes[s].labels.find(r.name);
      if (it != scopes[s].labels.end()) return it->second;
    }
    return -1;
  };
  for (auto& t : f.tables)
    for (int& x : t) {
      int l = lookup(labelRefs[x]);
      if (l < 0) fail("unknown label %s", labelRefs[x].name.c_str());
      x = l;
    }
  for (auto& in : f.insts)
    for (auto& o : in.ops) fixLabel(o, in, lookup);
  f.parsed = true;
}

template <class L>
void Parser::fixLabel(Operand& o, PInst& in, L& lookup) {
  if (o.k == Operand::LABEL) {
    if (fn->tableByName.count(o.name)) {
      o.label = -2;
      return;
    }
    int l = lookup(labelRefs[o.label]);
    if (l < 0) fail("PTX line %u: unknown symbol or label '%s' in '%s'", in.line, o.name.c_str(), in.op.c_str());
    o.label = l;
  }
  for (auto& x : o.v) fixLabel(x, in, lookup);
}

}  // namespace ptxsim

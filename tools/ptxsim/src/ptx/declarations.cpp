// Directives of a module: variables with their initial values, parameters, functions.
#include "ptx/parser.h"
#include <cstdlib>

namespace ptxsim {

void Parser::varDecl(Var& v) {
  int vec = 1;
  for (;;) {
    std::string w = word();
    if (w == ".align")
      v.align = (u32)constExpr();
    else if (w == ".v2")
      vec = 2;
    else if (w == ".v4")
      vec = 4;
    else if (w == ".ptr") {  // pointer attributes of parameters
      for (;;) {
        if (acceptWord(".align"))
          constExpr();
        else if (acceptWord(".global") || acceptWord(".shared") || acceptWord(".const") || acceptWord(".local")) {
        } else
          break;
      }
      v.name = word();
      break;
    } else if (w == ".attribute") {
      expect('(');
      while (p < end && *p != ')') ++p;
      ++p;
    } else if (w[0] == '.') {
      if (!tyParse(std::string_view(w).substr(1), v.ty)) err("unknown type " + w);
    } else {
      v.name = w;
      break;
    }
  }
  u64 es = std::max(1, tyBits(v.ty) / 8) * (u64)vec;
  if (v.align < es) v.align = std::max<u32>(v.align, (u32)es);
  u64 cnt = 1;
  bool unsized = false;
  while (accept('[')) {
    if (accept(']')) {
      unsized = true;
      continue;
    }
    cnt *= (u64)constExpr();
    expect(']');
  }
  v.size = unsized ? 0 : cnt * es;
  if (accept('=')) initList(v, (int)(es / vec));
  if (unsized && !v.init.empty()) v.size = v.init.size();
  if (!v.init.empty()) v.init.resize(v.size);
}

void Parser::initList(Var& v, int es) {
  if (accept('{')) {
    if (accept('}')) return;
    for (;;) {
      initList(v, es);
      if (accept('}')) return;
      expect(',');
    }
  }
  ws();
  size_t off = v.init.size();
  v.init.resize(off + es);
  s64 val = 0;
  bool f64 = false;
  if (isId0(*p)) {
    int mask = -1;
    bool generic = false;
    std::string w = word();
    if (w == "generic") {
      generic = true;
      expect('(');
      w = word();
    }
    s64 add = 0;
    if (peek() == '+' || peek() == '-') {
      bool ng = *p == '-';
      ++p;
      bool f;
      number(add, f);
      if (ng) add = -add;
    }
    if (generic) expect(')');
    if (peek() == '+') {
      ++p;
      s64 a;
      bool f;
      number(a, f);
      add += a;
    }
    (void)mask;
    v.relocs.push_back({(u32)off, w, add, es, generic});
    return;
  }
  // mask(symbol) forms for byte arrays: 0xFF(sym)
  if (isdigit((unsigned char)*p) || *p == '-' || *p == '(' || *p == '~') {
    bool ng = false;
    if (*p == '-') {
      ng = true;
      ++p;
    }
    if (number(val, f64)) {
      if (f64 && es == 4) val = (s64)fbits((float)bitsd((u64)val));
      if (ng) val ^= es == 4 ? (s64)0x80000000 : (s64)0x8000000000000000ull;
    } else {
      if (peek() == '(') err("masked symbol initialisers are not supported");
      if (ng) val = -val;
    }
    memcpy(&v.init[off], &val, (size_t)std::min(es, 8));
    return;
  }
  err("bad initialiser");
}

void Parser::params(std::vector<Var>& out) {
  if (!accept('(')) return;
  if (accept(')')) return;
  for (;;) {
    Var v;
    std::string w = word();
    if (w == ".param")
      v.space = Space::PARAM;
    else if (w == ".reg")
      v.space = Space::REG;
    else
      err("expected .param, got " + w);
    varDecl(v);
    out.push_back(std::move(v));
    if (accept(')')) return;
    expect(',');
  }
}

void Parser::module() {
  while (!eof()) {
    bool ext = false, weak = false;
    std::string w;
    for (;;) {
      w = word();
      if (w == ".visible" || w == ".common") continue;
      if (w == ".weak") {
        weak = true;
        continue;
      }
      if (w == ".extern") {
        ext = true;
        continue;
      }
      break;
    }
    if (w == ".version") {
      ws();
      while (p < end && !isspace((unsigned char)*p)) ++p;
    } else if (w == ".target") {
      ws();
      const char* b = p;
      while (p < end && *p != '\n') ++p;
      m.target.assign(b, p);
      size_t k = m.target.find("sm_");
      if (k != std::string::npos) m.sm = atoi(m.target.c_str() + k + 3);
    } else if (w == ".address_size") {
      s64 v;
      bool f;
      number(v, f);
      if (v != 64) err("only 64-bit addressing is supported");
    } else if (w == ".file") {
      s64 id;
      bool f;
      number(id, f);
      ws();
      if (*p == '"') {
        ++p;
        const char* b = p;
        while (*p != '"') ++p;
        m.files[(u32)id] = std::string(b, p);
        ++p;
      }
      while (p < end && *p != '\n') ++p;
    } else if (w == ".section") {
      while (p < end && *p != '{') {
        if (*p == '\n') ++line;
        ++p;
      }
      skipBraces();
    } else if (w == ".pragma" || w == ".alias")
      skipStatement();
    else if (w == ".global" || w == ".const" || w == ".shared") {
      auto v = std::make_unique<Var>();
      v->space = w == ".global" ? Space::GLOBAL : w == ".const" ? Space::CONST : Space::SHARED;
      v->isExtern = ext;
      v->weak = weak;
      varDecl(*v);
      expect(';');
      auto it = m.vars.find(v->name);
      if (it == m.vars.end()) {
        m.varOrder.push_back(v.get());
        std::string n = v->name;
        m.vars.emplace(n, std::move(v));
      } else if (it->second->isExtern && !v->isExtern) {
        *it->second = std::move(*v);
      }
    } else if (w == ".func" || w == ".entry") {
      auto f = std::make_unique<Function>();
      f->mod = &m;
      f->entry = w == ".entry";
      if (!f->entry && peek() == '(') params(f->rets);
      f->name = word();
      params(f->params);
      for (;;) {
        char c = peek();
        if (c == '{' || c == ';') break;
        std::string d = word();
        auto three = [&](int* o) {
          int i = 0;
          do {
            o[i++] = (int)constExpr();
          } while (i < 3 && accept(','));
          for (; i < 3; ++i) o[i] = 1;
        };
        if (d == ".maxntid")
          three(f->maxntid);
        else if (d == ".reqntid")
          three(f->reqntid);
        else if (d == ".reqnctapercluster")
          three(f->reqCluster);
        else if (d == ".minnctapersm")
          f->minCtas = (int)constExpr();
        else if (d == ".maxnreg")
          f->maxRegs = (int)constExpr();
        else if (d == ".maxnctapersm" || d == ".maxclusterrank")
          constExpr();
        else if (d == ".explicitcluster" || d == ".noreturn" || d == ".blocksareclusters") {
        } else if (d == ".pragma") {
          skipStatement();
        } else if (d == ".unique") {
        } else
          err("unknown function directive " + d);
      }
      if (accept(';')) {
      } else {
        f->hasBody = true;
        f->bodyBegin = p;
        f->bodyLine = line;
        skipBraces();
        f->bodyEnd = p;
      }
      auto it = m.funcs.find(f->name);
      if (it == m.funcs.end()) {
        std::string n = f->name;
        m.funcs.emplace(n, std::move(f));
      } else if (f->hasBody && !it->second->hasBody)
        it->second = std::move(f);
    } else
      err("unknown module directive " + w);
  }
}

Module::Module(std::string t) : text(std::move(t)) {
  while (!text.empty() && text.back() == '\0') text.pop_back();
  Parser ps(*this, text.data(), text.data() + text.size(), 1);
  ps.module();
}
void Module::parseBody(Function& f) {
  if (f.parsed) return;
  Parser ps(*this, f.bodyBegin, f.bodyEnd, f.bodyLine);
  ps.body(f);
}

}  // namespace ptxsim

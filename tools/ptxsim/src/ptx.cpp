#include "ptx.h"
#include "sreg.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>

namespace ptxsim {
const Fp8Tables g_fp8;

std::string strf(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  va_list ap2;
  va_copy(ap2, ap);
  int n = vsnprintf(nullptr, 0, fmt, ap);
  va_end(ap);
  std::string s((size_t)n, 0);
  vsnprintf(s.data(), (size_t)n + 1, fmt, ap2);
  va_end(ap2);
  return s;
}
void fail(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  char buf[4096];
  vsnprintf(buf, sizeof buf, fmt, ap);
  va_end(ap);
  throw SimError(buf);
}

static const struct {
  const char* n;
  Ty t;
  int bits;
} kTypes[] = {
    {"pred", Ty::PRED, 1},  {"b8", Ty::B8, 8},          {"b16", Ty::B16, 16},       {"b32", Ty::B32, 32},
    {"b64", Ty::B64, 64},   {"b128", Ty::B128, 128},    {"u8", Ty::U8, 8},          {"u16", Ty::U16, 16},
    {"u32", Ty::U32, 32},   {"u64", Ty::U64, 64},       {"s8", Ty::S8, 8},          {"s16", Ty::S16, 16},
    {"s32", Ty::S32, 32},   {"s64", Ty::S64, 64},       {"f16", Ty::F16, 16},       {"f16x2", Ty::F16X2, 32},
    {"bf16", Ty::BF16, 16}, {"bf16x2", Ty::BF16X2, 32}, {"f32", Ty::F32, 32},       {"f64", Ty::F64, 64},
    {"tf32", Ty::TF32, 32}, {"u16x2", Ty::U16X2, 32},   {"s16x2", Ty::S16X2, 32},   {"f32x2", Ty::F32X2, 64},
    {"e4m3", Ty::E4M3, 8},  {"e5m2", Ty::E5M2, 8},      {"e4m3x2", Ty::E4M3X2, 16}, {"e5m2x2", Ty::E5M2X2, 16},
    {"s4", Ty::S4, 4},      {"u4", Ty::U4, 4},          {"b1", Ty::B1, 1},
};
int tyBits(Ty t) {
  for (auto& e : kTypes)
    if (e.t == t) return e.bits;
  return 0;
}
const char* tyName(Ty t) {
  for (auto& e : kTypes)
    if (e.t == t) return e.n;
  return "?";
}
bool tyParse(std::string_view s, Ty& t) {
  for (auto& e : kTypes)
    if (s == e.n) {
      t = e.t;
      return true;
    }
  return false;
}
bool tyFloat(Ty t) {
  return t == Ty::F16 || t == Ty::BF16 || t == Ty::F32 || t == Ty::F64 || t == Ty::F16X2 || t == Ty::BF16X2 ||
         t == Ty::F32X2;
}
bool tySigned(Ty t) { return t == Ty::S8 || t == Ty::S16 || t == Ty::S32 || t == Ty::S64 || t == Ty::S4; }

static bool isId0(char c) { return isalpha((unsigned char)c) || c == '_' || c == '$' || c == '%'; }
static bool isId(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$'; }

struct Parser {
  Module& m;
  const char* p;
  const char* end;
  u32 line;
  Parser(Module& mod, const char* b, const char* e, u32 ln) : m(mod), p(b), end(e), line(ln) {}

  [[noreturn]] void err(const std::string& s) { fail("PTX line %u: %s", line, s.c_str()); }
  void ws() {
    for (;;) {
      while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) {
        if (*p == '\n') ++line;
        ++p;
      }
      if (p + 1 < end && p[0] == '/' && p[1] == '/') {
        while (p < end && *p != '\n') ++p;
        continue;
      }
      if (p + 1 < end && p[0] == '/' && p[1] == '*') {
        p += 2;
        while (p + 1 < end && !(p[0] == '*' && p[1] == '/')) {
          if (*p == '\n') ++line;
          ++p;
        }
        p += 2;
        continue;
      }
      return;
    }
  }
  bool eof() {
    ws();
    return p >= end;
  }
  char peek() {
    ws();
    return p < end ? *p : 0;
  }
  bool accept(char c) {
    if (peek() == c) {
      ++p;
      return true;
    }
    return false;
  }
  void expect(char c) {
    if (!accept(c)) err(strf("expected '%c' near '%.20s'", c, p));
  }
  std::string word() {  // directive, identifier or opcode-like word without dots
    ws();
    const char* b = p;
    if (p < end && (*p == '.' || isId0(*p)))
      ++p;
    else
      err(strf("expected identifier near '%.20s'", p));
    while (p < end && isId(*p)) ++p;
    return std::string(b, p);
  }
  std::string opcode() {
    ws();
    const char* b = p;
    while (p < end && (isId(*p) || *p == '.' || (p[0] == ':' && p[1] == ':') || (p[0] == ':' && p > b && p[-1] == ':')))
      ++p;
    return std::string(b, p);
  }
  bool acceptWord(const char* w) {
    ws();
    size_t n = strlen(w);
    if ((size_t)(end - p) >= n && !strncmp(p, w, n) && !isId(p[n])) {
      p += n;
      return true;
    }
    return false;
  }
  // Numeric literal. Returns true if float.
  bool number(s64& out, bool& f64) {
    ws();
    f64 = false;
    if (p[0] == '0' && (p[1] == 'f' || p[1] == 'F')) {
      char b[9] = {};
      memcpy(b, p + 2, 8);
      out = (s64)strtoull(b, nullptr, 16);
      p += 10;
      return true;
    }
    if (p[0] == '0' && (p[1] == 'd' || p[1] == 'D')) {
      char b[17] = {};
      memcpy(b, p + 2, 16);
      out = (s64)strtoull(b, nullptr, 16);
      p += 18;
      f64 = true;
      return true;
    }
    char* e;
    if (p[0] == '0' && (p[1] == 'b' || p[1] == 'B'))
      out = (s64)strtoull(p + 2, &e, 2);
    else {
      out = (s64)strtoull(p, &e, 0);
      if (!(p[0] == '0' && (p[1] == 'x' || p[1] == 'X')) && (*e == '.' || *e == 'e' || *e == 'E')) {
        double d = strtod(p, &e);
        out = (s64)dbits(d);
        p = e;
        f64 = true;
        return true;
      }
    }
    p = e;
    if (*p == 'U') ++p;
    return false;
  }
  s64 constExpr() {  // additive/multiplicative integer constant expressions
    std::function<s64(int)> ex;
    auto prim = [&]() -> s64 {
      if (accept('(')) {
        s64 v = ex(0);
        expect(')');
        return v;
      }
      if (accept('-')) {
        return -ex(9);
      }
      if (accept('~')) {
        return ~ex(9);
      }
      s64 v;
      bool f;
      if (number(v, f)) err("float in integer expression");
      return v;
    };
    ex = [&](int lvl) -> s64 {
      s64 v = prim();
      if (lvl >= 9) return v;
      for (;;) {
        char c = peek();
        if (c == '*') {
          ++p;
          v *= prim();
        } else if (c == '+') {
          ++p;
          s64 r = prim();
          while (peek() == '*') {
            ++p;
            r *= prim();
          }
          v += r;
        } else if (c == '-') {
          ++p;
          s64 r = prim();
          while (peek() == '*') {
            ++p;
            r *= prim();
          }
          v -= r;
        } else if (p[0] == '<' && p[1] == '<') {
          p += 2;
          v <<= prim();
        } else if (p[0] == '>' && p[1] == '>') {
          p += 2;
          v >>= prim();
        } else
          return v;
      }
    };
    return ex(0);
  }
  void skipStatement() {
    while (p < end && *p != ';') {
      if (*p == '\n') ++line;
      ++p;
    }
    if (p < end) ++p;
  }
  void skipBraces() {
    int d = 0;
    for (; p < end; ++p) {
      if (*p == '\n')
        ++line;
      else if (*p == '/' && p[1] == '/') {
        while (p < end && *p != '\n') ++p;
        --p;
      } else if (*p == '"') {
        ++p;
        while (p < end && *p != '"') ++p;
      } else if (*p == '{')
        ++d;
      else if (*p == '}') {
        if (--d == 0) {
          ++p;
          return;
        }
      }
    }
  }

  // .space already consumed; parses [.align N] [.vK] .type name [dims] [= init] (without the ';')
  void varDecl(Var& v) {
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
  void initList(Var& v, int es) {
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

  void params(std::vector<Var>& out) {
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

  void module() {
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
          else if (d == ".minnctapersm" || d == ".maxnreg" || d == ".maxnctapersm" || d == ".maxclusterrank")
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

  // ---- function bodies ----
  struct Scope {
    int parent;
    std::unordered_map<std::string, int> regs;
    std::unordered_map<std::string, std::pair<std::string, int>> regRange;  // unused
    std::unordered_map<std::string, Var*> vars;
    std::unordered_map<std::string, int> labels;
  };
  std::vector<Scope> scopes;
  int cur = 0;
  Function* fn = nullptr;
  struct LabelRef {
    std::string name;
    int scope;
  };
  std::vector<LabelRef> labelRefs;  // Operand.label temporarily indexes here

  int findReg(const std::string& n) {
    for (int s = cur; s >= 0; s = scopes[s].parent) {
      auto it = scopes[s].regs.find(n);
      if (it != scopes[s].regs.end()) return it->second;
    }
    return -1;
  }
  Var* findVar(const std::string& n) {
    for (int s = cur; s >= 0; s = scopes[s].parent) {
      auto it = scopes[s].vars.find(n);
      if (it != scopes[s].vars.end()) return it->second;
    }
    auto it = m.vars.find(n);
    return it == m.vars.end() ? nullptr : it->second.get();
  }
  std::string identDotted() {
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
  Operand operand() {
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
  Operand addrBase(Operand& a) {
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

  void body(Function& f) {
    fn = &f;
    scopes.push_back({-1, {}, {}, {}, {}});
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
        scopes.push_back({cur, {}, {}, {}, {}});
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
  void fixLabel(Operand& o, PInst& in, L& lookup) {
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
};

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
std::string Module::lineText(u32 line) const {
  size_t pos = 0;
  for (u32 l = 1; l < line; ++l) {
    pos = text.find('\n', pos);
    if (pos == std::string::npos) return "";
    ++pos;
  }
  size_t e = text.find('\n', pos);
  std::string s = text.substr(pos, e == std::string::npos ? e : e - pos);
  size_t b = s.find_first_not_of(" \t");
  if (b == std::string::npos) return "";
  s = s.substr(b);
  if (s.size() > 160) s = s.substr(0, 157) + "...";
  return s;
}
}  // namespace ptxsim

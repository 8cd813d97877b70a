// The recursive-descent parser behind Module: directives first, bodies of functions when they are needed.
#pragma once
#include "ptx/module.h"

namespace ptxsim {

inline bool isId0(char c) { return isalpha((unsigned char)c) || c == '_' || c == '$' || c == '%'; }
inline bool isId(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$'; }

struct Parser {
  Module& m;
  const char* p;
  const char* end;
  u32 line;
  Parser(Module& mod, const char* b, const char* e, u32 ln) : m(mod), p(b), end(e), line(ln) {}

  [[noreturn]] void err(const std::string& s);
  void ws();
  bool eof();
  char peek();
  bool accept(char c);
  void expect(char c);
  // directive, identifier or opcode-like word without dots
  std::string word();
  std::string opcode();
  bool acceptWord(const char* w);
  // Numeric literal. Returns true if float.
  bool number(s64& out, bool& f64);
  // additive/multiplicative integer constant expressions
  s64 constExpr();
  void skipStatement();
  void skipBraces();

  // .space already consumed; parses [.align N] [.vK] .type name [dims] [= init] (without the ';')
  void varDecl(Var& v);
  void initList(Var& v, int es);

  void params(std::vector<Var>& out);

  void module();

  struct Scope {
    int parent;
    std::unordered_map<std::string, int> regs;
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

  int findReg(const std::string& n);
  Var* findVar(const std::string& n);
  std::string identDotted();
  Operand operand();
  Operand addrBase(Operand& a);

  void body(Function& f);
  template <class L>
  void fixLabel(Operand& o, PInst& in, L& lookup);
};

}  // namespace ptxsim

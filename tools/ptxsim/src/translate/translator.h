// Translation of one kernel into bytecode: what the translators of instructions work with.
#pragma once
#include "machine/machine.h"
#include <functional>
#include <map>
#include <set>

namespace ptxsim {

struct Tr;
using EmitFn = void (*)(Tr&);
std::unordered_map<std::string, EmitFn>& opTable();

// OP(add) { ... } defines the translation of an instruction and enters it under its first word; OP_NAMED where the word
// is one of C++.
struct Entry {
  Entry(const char* word, EmitFn emit) { opTable()[word] = emit; }
};
#define OP_NAMED(id, word)                      \
  static void op_##id(Tr& t);                   \
  static const Entry entry_##id(word, op_##id); \
  static void op_##id(Tr& t)
#define OP(id) OP_NAMED(id, #id)

struct Tr {
  Program& P;
  std::vector<PInst> list;  // flattened, inlined
  std::vector<Ty> regTy;
  std::vector<int> labelPos;   // label -> list index
  std::vector<s32> slot;       // reg -> word slot or predicate index
  std::vector<u32> instStart;  // list index -> bytecode index
  std::vector<std::vector<int>> tables;
  std::unordered_map<Var*, u64> sharedAddr;
  std::map<std::pair<u64, int>, s32> kcache;
  std::vector<int> wgReg;  // reg -> wgmma id
  const PInst* in = nullptr;
  std::vector<char> used;
  explicit Tr(Program& p) : P(p) {}

  [[noreturn]] void err(const std::string& s);
  bool has(const char* m) {
    bool r = false;
    for (size_t i = 1; i < in->mods.size(); ++i)
      if (in->mods[i] == m) {
        used[i] = 1;
        r = true;
      }
    return r;
  }
  bool hasAny(std::initializer_list<const char*> l) {
    bool r = false;
    for (auto m : l) r |= has(m);
    return r;
  }
  void ignore(std::initializer_list<const char*> l) {
    for (auto m : l) has(m);
  }
  std::string mod(size_t i) {
    if (i < in->mods.size()) {
      used[i] = 1;
      return in->mods[i];
    }
    return "";
  }
  // all type modifiers in order
  std::vector<Ty> types() {
    std::vector<Ty> r;
    for (size_t i = 1; i < in->mods.size(); ++i) {
      Ty t;
      if (tyParse(in->mods[i], t)) {
        used[i] = 1;
        r.push_back(t);
      }
    }
    return r;
  }
  Ty type() {
    auto t = types();
    if (t.empty()) err("missing type");
    return t.back();
  }
  size_t nops() const { return in->ops.size(); }
  const Operand& op(size_t i) {
    if (i >= in->ops.size()) err("too few operands");
    return in->ops[i];
  }
  Ty opTy(const Operand& o) {
    if (o.k != Operand::REG) return Ty::NONE;
    return regTy[o.reg];
  }
  s32 konst(u64 v, int bytes);    // broadcast constant slot
  s32 S(const Operand& o, Ty t);  // source slot as type t (width from t)
  s32 S(size_t i, Ty t) { return S(op(i), t); }
  s32 D(const Operand& o, int bytes);  // destination slot; bytes = cell size 4 or 8
  s32 D(size_t i, int bytes) { return D(op(i), bytes); }
  s32 D(size_t i, Ty t) { return D(op(i), tyBits(t) > 32 ? 8 : 4); }
  s32 pred(const Operand& o, bool& neg);
  s32 predD(const Operand& o);
  Inst& out(Handler h, Cls c);
  void addr(Inst& I, const Operand& o);  // fills a (base slot), imm
  const s32* aux(std::vector<s32> v) {
    P.aux.push_back(std::move(v));
    return P.aux.back().data();
  }
  int cellBytes(const Operand& o) { return tyBits(regTy[o.reg]) > 32 ? 8 : 4; }
  void run();

 private:
  void expand(Function& f, int depth, std::unordered_map<Var*, u64>& pmap, int retLabel,
              std::vector<std::string>& stack);
  void allocRegs();
  u32 localTop = 0, staticTop = kSmemBase;
};

// Every register of an operand, those of vectors and addresses too.
void visitRegs(const Operand& o, const std::function<void(int)>& f);

// Handler of what has no effect here.
inline void hnop(Warp&, const Inst&, u32) {}

// Instructions whose first operand is no destination.
inline bool noDest(const PInst& p) {
  const std::string& m = p.mods[0];
  if (m == "bar" || m == "barrier") return std::find(p.mods.begin(), p.mods.end(), "red") == p.mods.end();
  return m == "nanosleep" || m == "brx" || m == "bra" || m == "setmaxnreg" || m == "pmevent" || m == "st" || m == "red";
}

}  // namespace ptxsim

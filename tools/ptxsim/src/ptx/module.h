// PTX text and its syntax tree: types, variables, functions, instructions.
#pragma once
#include "number.h"
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace ptxsim {

struct SimError : std::runtime_error {
  int code;  // cudaError_t
  explicit SimError(const std::string& s, int c = 719) : std::runtime_error(s), code(c) {}
};
[[noreturn]] void fail(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
std::string strf(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

enum class Ty : u8 {
  NONE,
  PRED,
  B8,
  B16,
  B32,
  B64,
  B128,
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  F16,
  F16X2,
  BF16,
  BF16X2,
  F32,
  F64,
  TF32,
  F32X2,
  U16X2,
  S16X2,
  E4M3,
  E5M2,
  E4M3X2,
  E5M2X2,
  S4,
  U4,
  B1
};
int tyBits(Ty t);
bool tyFloat(Ty t);
bool tySigned(Ty t);
bool tyParse(std::string_view s, Ty& t);
const char* tyName(Ty t);

enum class Space : u8 { GENERIC, GLOBAL, SHARED, SHARED_CLUSTER, LOCAL, PARAM, CONST, REG };

struct Var {
  std::string name;
  Space space = Space::GLOBAL;
  Ty ty = Ty::B8;
  u32 align = 1;
  u64 size = 0;  // bytes; 0 for an unsized extern array
  bool isExtern = false, weak = false;
  std::vector<u8> init;
  struct Reloc {
    u32 off;
    std::string sym;
    s64 add;
    int bytes;
    bool generic;
  };
  std::vector<Reloc> relocs;
  // filled at load/translation
  u64 addr = 0;
  bool placed = false;
};

struct Operand {
  enum K : u8 { NONE, REG, INT, FLT, VEC, ADDR, SYM, SREG, LABEL, SINK, PAIR } k = NONE;
  bool neg = false;    // '!' on predicates, '-' on registers
  bool isF64 = false;  // FLT literal written as 64-bit
  int reg = -1;        // REG, PAIR (first)
  int sreg = -1;
  Space rsp = Space::GENERIC;  // space of a resolved symbol
  int label = -1;
  s64 imm = 0;         // INT value / FLT bits / offset for SYM and ADDR
  Var* var = nullptr;  // SYM/ADDR with a variable
  std::string name;
  std::vector<Operand> v;  // VEC elements, ADDR components (v[0] base, rest: coordinates), PAIR (two)
};

struct Loc {
  u32 file = 0, line = 0;
};

struct PInst {
  int guard = -1;
  bool gneg = false;
  std::string op;                 // full opcode text
  std::vector<std::string> mods;  // split at '.'
  std::vector<Operand> ops;
  u32 line = 0;
  Loc loc;
};

struct RegInfo {
  Ty ty;
  std::string name;
};

struct Module;
struct Function {
  Module* mod = nullptr;
  std::string name;
  bool entry = false, hasBody = false, parsed = false;
  std::vector<Var> params, rets;
  const char* bodyBegin = nullptr;
  const char* bodyEnd = nullptr;
  u32 bodyLine = 0;
  int maxntid[3] = {0, 0, 0};
  int reqntid[3] = {0, 0, 0};
  int reqCluster[3] = {0, 0, 0};
  int minCtas = 0, maxRegs = 0;  // .minnctapersm, .maxnreg
  // body
  std::vector<RegInfo> regs;
  std::vector<PInst> insts;
  std::vector<int> labelPos;  // label id -> instruction index
  std::vector<std::string> labelName;
  std::vector<std::vector<int>> tables;  // .branchtargets
  std::map<std::string, int> tableByName;
  std::vector<std::unique_ptr<Var>> vars;  // local/shared/param variables of the body
};

struct Module {
  std::string text;
  std::string target;
  int sm = 0;
  std::unordered_map<std::string, std::unique_ptr<Var>> vars;
  std::vector<Var*> varOrder;
  std::unordered_map<std::string, std::unique_ptr<Function>> funcs;
  std::map<u32, std::string> files;
  explicit Module(std::string t);
  void parseBody(Function& f);
  std::string lineText(u32 line) const;

 private:
  friend struct Parser;
};

}  // namespace ptxsim

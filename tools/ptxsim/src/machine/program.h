// A translated kernel: bytecode, constants, where its parameters lie.
#pragma once
#include "machine/counters.h"
#include "ptx/module.h"
#include <deque>

namespace ptxsim {

struct Warp;
struct Inst;

using Handler = void (*)(Warp&, const Inst&, u32 m);
struct Inst {
  Handler fn = nullptr;
  s32 d = 0, a = 0, b = 0, c = 0, e = 0;  // operand slots (see src()/dst())
  s32 guard = -1;                         // predicate index or -1
  bool gneg = false;
  u8 cls = C_OTHER;
  u8 n = 1;          // vector length
  u8 t = 0, t2 = 0;  // types / widths
  u32 fl = 0;        // flags, meaning depends on the handler
  s64 imm = 0;
  const s32* v = nullptr;   // further operand slots
  const void* x = nullptr;  // further data
};

struct InstInfo {
  u32 line;
  Loc loc;
  u32 fnTag;
};

struct Program {
  Module* mod = nullptr;
  Function* fn = nullptr;
  std::vector<Inst> code;
  std::vector<InstInfo> info;
  std::vector<u32> kpool;  // 32-lane constants
  int regWords = 0, npreds = 2;
  u32 staticSmem = 0;  // bytes past the 1 KiB reserved area
  u32 dynSmemAlign = 16;
  u32 localBytes = 0;
  u32 paramBytes = 0;
  u32 mostRegs = 0;      // that a setmaxnreg asks for, of a thread
  u8* params = nullptr;  // launch parameters live here; their address is fixed
  std::vector<u32> paramOff, paramSize;
  std::deque<std::vector<s32>> aux;
  std::deque<std::vector<u8>> blobs;
  std::vector<int> wgmmaReg;              // word slot -> wgmma register id + 1 (0: none)
  std::vector<std::vector<u16>> wgTouch;  // per instruction: wgmma registers it accesses (0x8000: writes)
  int wgCount = 0;
  std::vector<std::vector<s32>> regRd, regWr;  // word slots read / written by each instruction (CHECK)
  std::vector<u8> isMov;
  ~Program() { free(params); }
};

// Of one entry function; kept for the life of the process.
Program* translate(Module& m, Function& f);

}  // namespace ptxsim

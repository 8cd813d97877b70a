// Operands and slots.
#include "translate/translator.h"

namespace ptxsim {

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

}  // namespace ptxsim

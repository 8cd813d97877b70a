// Virtual registers get slots: liveness over basic blocks, then a linear scan.
#include "translate/translator.h"

namespace ptxsim {

void visitRegs(const Operand& o, const std::function<void(int)>& f) {
  if (o.k == Operand::REG) f(o.reg);
  for (auto& x : o.v) visitRegs(x, f);
}

void Tr::allocRegs() {
  const size_t n = list.size(), R = regTy.size();
  slot.assign(R, -1);
  wgReg.assign(R, 0);
  // predicates: one word each
  int np = 3;
  for (size_t r = 0; r < R; ++r)
    if (regTy[r] == Ty::PRED) slot[r] = np++;
  P.npreds = np;
  // basic blocks
  std::vector<char> leader(n + 1, 0);
  leader[0] = 1;
  for (int l : labelPos)
    if (l >= 0) leader[l] = 1;
  auto isBr = [&](const PInst& p) {
    const auto& m = p.mods[0];
    return m == "bra" || m == "brx" || m == "ret" || m == "exit";
  };
  for (size_t i = 0; i < n; ++i)
    if (isBr(list[i])) leader[i + 1] = 1;
  std::vector<int> bstart;
  std::vector<int> blockOf(n + 1, 0);
  for (size_t i = 0; i < n; ++i) {
    if (leader[i]) bstart.push_back((int)i);
    blockOf[i] = (int)bstart.size() - 1;
  }
  size_t B = bstart.size();
  bstart.push_back((int)n);
  size_t W = (R + 63) / 64;
  std::vector<u64> use(B * W), def(B * W), lin(B * W), lout(B * W);
  auto bit = [&](std::vector<u64>& v, size_t b, int r) -> bool { return v[b * W + r / 64] >> (r % 64) & 1; };
  auto set = [&](std::vector<u64>& v, size_t b, int r) { v[b * W + r / 64] |= 1ull << (r % 64); };
  std::vector<std::vector<int>> succ(B);
  std::vector<char> pinned(R, 0);
  int wgId = 0;
  for (size_t b = 0; b < B; ++b) {
    for (int i = bstart[b]; i < bstart[b + 1]; ++i) {
      const PInst& p = list[i];
      bool nd = noDest(p) || p.ops.empty();
      bool wg = p.mods[0] == "wgmma" && p.mods.size() > 1 && p.mods[1] == "mma_async";
      auto useF = [&](int r) {
        if (!bit(def, b, r)) set(use, b, r);
      };
      std::vector<int> defs;
      for (size_t k = 0; k < p.ops.size(); ++k) {
        const Operand& o = p.ops[k];
        bool isDest = k == 0 && !nd && (o.k == Operand::REG || o.k == Operand::VEC || o.k == Operand::PAIR);
        if (wg && (k == 0 || k == 1) && o.k == Operand::VEC)
          visitRegs(o, [&](int r) {
            pinned[r] = 1;
            if (!wgReg[r]) wgReg[r] = ++wgId;
          });
        if (wg && k == 0) {
          visitRegs(o, useF);
          continue;
        }
        if (isDest)
          visitRegs(o, [&](int r) { defs.push_back(r); });
        else
          visitRegs(o, useF);
      }
      if (p.mods[0][0] == '$')
        for (auto& o : p.ops) visitRegs(o, useF);
      if (p.guard >= 0) useF(p.guard);
      if (p.guard >= 0)
        for (int r : defs) useF(r);  // a guarded write does not kill
      else
        for (int r : defs) set(def, b, r);
    }
    const PInst& last = list[bstart[b + 1] - 1];
    bool fall = true;
    auto to = [&](int l) {
      int pos = labelPos[l];
      if (pos >= 0 && pos < (int)n) succ[b].push_back(blockOf[pos]);
    };
    if (last.mods[0] == "bra") {
      to(last.ops[0].label);
      fall = last.guard >= 0;
    } else if (last.mods[0] == "brx") {
      for (int l : tables[-2 - last.ops[1].label]) to(l);
      fall = last.guard >= 0;
    } else if (last.mods[0] == "ret" || last.mods[0] == "exit")
      fall = last.guard >= 0;
    if (fall && b + 1 < B) succ[b].push_back((int)b + 1);
  }
  for (bool ch = true; ch;) {
    ch = false;
    for (size_t b = B; b-- > 0;) {
      u64* lo = &lout[b * W];
      u64* li = &lin[b * W];
      for (int s : succ[b])
        for (size_t k = 0; k < W; ++k) lo[k] |= lin[(size_t)s * W + k];
      for (size_t k = 0; k < W; ++k) {
        u64 x = use[b * W + k] | (lo[k] & ~def[b * W + k]);
        if (x != li[k]) {
          li[k] = x;
          ch = true;
        }
      }
    }
  }
  std::vector<int> st(R, INT32_MAX), en(R, -1);
  auto touch = [&](int r, int pos) {
    st[r] = std::min(st[r], pos);
    en[r] = std::max(en[r], pos);
  };
  for (size_t b = 0; b < B; ++b) {
    for (size_t k = 0; k < W; ++k) {
      for (u64 x = lin[b * W + k]; x; x &= x - 1) touch((int)(k * 64 + __builtin_ctzll(x)), bstart[b]);
      for (u64 x = lout[b * W + k]; x; x &= x - 1) touch((int)(k * 64 + __builtin_ctzll(x)), bstart[b + 1]);
    }
    for (int i = bstart[b]; i < bstart[b + 1]; ++i) {
      for (auto& o : list[i].ops) visitRegs(o, [&](int r) { touch(r, i); });
      if (list[i].guard >= 0) touch(list[i].guard, i);
    }
  }
  // linear scan, separate pools for 4- and 8-byte cells (lane layouts differ)
  std::vector<int> order;
  for (size_t r = 0; r < R; ++r)
    if (regTy[r] != Ty::PRED && en[r] >= 0) order.push_back((int)r);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return st[a] != st[b] ? st[a] < st[b] : a < b; });
  int top = 32 + 64;  // scratch destinations for '_'
  std::vector<int> freeL[3];
  std::multimap<int, int> act;  // end -> reg
  auto cls = [&](int r) {
    int b = tyBits(regTy[r]);
    return b > 64 ? 2 : b > 32 ? 1 : 0;
  };
  static const int words[3] = {32, 64, 128};
  for (int r : order) {
    while (!act.empty() && act.begin()->first < st[r]) {
      int q = act.begin()->second;
      freeL[cls(q)].push_back(slot[q]);
      act.erase(act.begin());
    }
    int c = cls(r);
    if (!pinned[r] && !freeL[c].empty()) {
      slot[r] = freeL[c].back();
      freeL[c].pop_back();
    } else {
      slot[r] = top;
      top += words[c];
    }
    if (!pinned[r]) act.emplace(en[r], r);
  }
  P.regWords = top;
  P.wgCount = wgId;
  P.wgmmaReg.assign((size_t)top / 32 + 4, 0);
  for (size_t r = 0; r < R; ++r)
    if (wgReg[r]) P.wgmmaReg[(size_t)slot[r] / 32] = wgReg[r];
}

}  // namespace ptxsim

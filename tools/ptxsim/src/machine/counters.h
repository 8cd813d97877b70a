// What a launch is counted by: instructions of every class, bytes on every way.
#pragma once
#include "number.h"
#include <algorithm>
#include <vector>

namespace ptxsim {

enum Cls : u8 {
  C_INT,
  C_FLOAT,
  C_HALF,
  C_SFU,
  C_FRND,
  C_F2I,
  C_I2F,
  C_F2F,
  C_I2I,
  C_MOV,
  C_CTRL,
  C_LDG,
  C_STG,
  C_LDS,
  C_STS,
  C_PARAM,
  C_LDOTHER,
  C_ATOM,
  C_CPASYNC,
  C_TMA,
  C_LDMATRIX,
  C_STMATRIX,
  C_MOVMATRIX,
  C_MMA,
  C_WGMMA,
  C_WGSYNC,
  C_BAR,
  C_FENCE,
  C_MBAR,
  C_SHFL,
  C_VOTE,
  C_REDUX,
  C_GRIDDEP,
  C_OTHER,
  C_COUNT
};
extern const char* kClsName[C_COUNT];
enum Grp : u8 {
  G_TENSOR,
  G_INT,
  G_FLOAT,
  G_CVT,
  G_MOV,
  G_SHARED,
  G_GLOBAL,
  G_ATOM,
  G_ASYNC,
  G_SHFL,
  G_BRANCH,
  G_BAR,
  G_OTHER,
  G_COUNT
};
extern const char* kGrpName[G_COUNT];
Grp clsGroup(int cls);
inline constexpr int kRegions = 16;  // see pmevent

struct Stats {
  u64 cls[kRegions][C_COUNT] = {};
  u64 insts = 0, threadInsts = 0;
  u64 mmaMacs = 0, wgmmaMacs = 0;
  u64 gld = 0, gst = 0, gldSectors = 0, gstSectors = 0, gldReq = 0, gstReq = 0;
  u64 cpAsyncBytes = 0, tmaLoad = 0, tmaStore = 0, dsmem = 0, prefetch = 0;
  u64 l2Load = 0, l2Unique = 0, l2CpAsync = 0, l2Tma = 0, tmaDelivered = 0;  // L2 to SM
  u64 smemReq = 0, smemWavefronts = 0, smemIdeal = 0, smemLd = 0, smemSt = 0;
  u64 atomics = 0, barriers = 0;
  void add(const Stats& o) {
    u64* a = (u64*)this;
    const u64* b = (const u64*)&o;
    for (size_t i = 0; i < sizeof(Stats) / 8; ++i) a[i] += b[i];
  }
};

// Distinct sectors a CTA has loaded (counters only).
struct SectorSet {
  std::vector<u64> tab;
  size_t n = 0;
  bool add(u64 x) {  // true when new
    if (2 * (n + 1) > tab.size()) {
      std::vector<u64> o(tab.empty() ? 64 : 2 * tab.size());
      o.swap(tab);
      n = 0;
      for (u64 y : o)
        if (y) add(y);
    }
    for (size_t i = (x * 0x9e3779b97f4a7c15ull) >> 20;; ++i) {
      u64& c = tab[i & (tab.size() - 1)];
      if (c == x) return false;
      if (!c) {
        c = x;
        ++n;
        return true;
      }
    }
  }
};

// Of a count over the CTAs of a launch.
struct Spread {
  u64 n = 0, min = ~0ull, max = 0, sum = 0;
  void add(u64 v) {
    ++n;
    min = std::min(min, v);
    max = std::max(max, v);
    sum += v;
  }
  void add(const Spread& o) {
    n += o.n;
    min = std::min(min, o.min);
    max = std::max(max, o.max);
    sum += o.sum;
  }
};
struct PerCta {
  Spread load, tma, filled;
  void add(const PerCta& o) {
    load.add(o.load);
    tma.add(o.tma);
    filled.add(o.filled);
  }
};

}  // namespace ptxsim

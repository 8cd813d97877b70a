// Warps, CTAs and clusters in execution, and the asynchronous operations they have in flight.
#pragma once
#include "machine/program.h"

namespace ptxsim {

struct CTA;
struct Cluster;
struct Launch;
struct RaceState;

inline constexpr u32 kSmemBase = 1024;  // first user byte of shared memory
extern u64 g_sharedWin, g_localWin;     // generic windows (4 GiB each)
inline constexpr u64 kWin = 1ull << 32;

enum FragState : u8 { F_READY, F_CONV, F_BAR, F_MBAR, F_CBAR, F_WSYNC, F_WG, F_REGS };
struct Frag {
  u32 pc, mask;
  FragState st = F_READY;
  bool force = false;  // next try_wait times out
  u8 bar = 0;
  u32 gen = 0, need = 0;
  u64* mbar = nullptr;
  u32 mbarAddr = 0;
  u8 parity = 0;
  u64 age = 0;
};
enum : u32 { EV_RESCHED = 1, EV_YIELD = 2, EV_DONE = 4 };

struct CpEntry {
  u8* dst;
  u32 dstAddr;
  u64 src;
  u16 size, srcSize;
  u8 lane;
};
struct CpOp {
  std::vector<CpEntry> e;
  u32 group;
  u32 pc;
  u64 clk = 0;
};
struct WgmmaOp {
  const Inst* I;
  u32 pc;
  u32 group;
  u64 descA, descB;
  u8 scaleD;
  bool done = false;
  u64 clk = 0;
};
struct BulkOp;

struct BulkGroupOp {
  u32 group;
  u8 lane;
  int readsLeft, writesLeft;
};

struct Warp {
  u32* regs = nullptr;
  u32* preds = nullptr;
  const u32* kp = nullptr;
  const Inst* code = nullptr;
  u32 pc = 0, active = 0, live = 0, ev = 0;
  u32 cc = 0;
  u64* cls = nullptr;  // instruction counters of the current region
  CTA* cta = nullptr;
  Cluster* cl = nullptr;
  Program* prog = nullptr;
  u8* local = nullptr;
  u32 localBytes = 0;
  u32 wid = 0, gwid = 0;
  u32 threadRegs = 0;  // what a thread of it owns (setmaxnreg); 0: not known
  std::vector<Frag> frags;
  int cur = 0;
  u32 tid[3][32];
  bool done = false;
  u64 instCount = 0, ageCtr = 0;
  // cp.async
  std::deque<CpOp> cp;
  u32 cpGroup = 0;
  // wgmma
  std::deque<WgmmaOp> wg;
  u32 wgGroup = 0;
  std::vector<u16> wgBusyD, wgBusyA;  // per wgmma register: operations in flight that write / read it
  std::vector<u8> wgDirty;            // per 32-word slot: computed since the last wgmma.fence (moves pass it on)
  int wgInflight = 0;
  u32 cbGen = 0;
  // CHECK: lanes of each register that hold a value derived from never-written memory
  std::vector<u32> taint;
  std::string taintWhat;
  u32 taintPc = 0;
  bool tainted = false, taintNext = false, taintHandled = false;
  std::vector<u32> wgCommitClk;  // race detector: asynchronous clock at each wgmma.commit_group
  // bulk groups
  u32 bulkGroup[32] = {};
  u64 curPc() const { return pc ? pc - 1 : 0; }
};

struct Barrier {
  u32 arrived = 0, expected = 0, gen = 0;
  u32 redAcc = 0;
  u32 redResult[2] = {0, 0};
  bool hasRed = false;
  u32 redOp = 0;
};

struct CTA {
  Cluster* cl = nullptr;
  Launch* L = nullptr;
  SectorSet sectors;
  u64 l2Load = 0, l2Tma = 0, filled = 0;  // counters: bytes this CTA asked of L2, bytes that arrived here
  u32 id[3];
  u32 rank = 0;
  u8* smem = nullptr;
  u32 smemSize = 0;
  std::vector<Warp*> warps;
  u32 liveWarps = 0;
  Barrier bar[16];
  u32 freeRegs = 0;      // that setmaxnreg.dec gave back: of a thread, summed over warps
  std::vector<u8> init;  // shared bytes ever written (CHECK)
};

enum BulkKind : u8 { BK_G2S, BK_S2G, BK_S2S, BK_RED_S2G, BK_RED_S2S, BK_T_LOAD, BK_T_STORE, BK_T_RED, BK_T_GATHER };
struct TMap;
struct BulkOp {  // one asynchronous bulk copy, single destination CTA
  BulkKind kind;
  u8 redOp = 0, redTy = 0;
  CTA* dstCta = nullptr;
  u32 dst = 0;  // shared destination
  CTA* srcCta = nullptr;
  u32 src = 0;  // shared source
  u64 gaddr = 0;
  u32 bytes = 0;
  CTA* mbarCta = nullptr;
  u32 mbar = 0;  // completion mbarrier
  bool hasMbar = false;
  u8 tmap[128];
  int coord[5] = {};
  int dims = 0;
  Warp* w = nullptr;
  u8 lane = 0;
  u32 group = 0;
  u32 pc = 0;
  bool grouped = false;
  bool readDone = false;
  std::vector<u8> staged;  // data read from shared memory, not yet written
  u64 clk = 0;
  std::vector<u64> vc, pvc;  // race detector
};

struct Cluster {
  Launch* L = nullptr;
  u32 id = 0;
  u32 cid[3];
  std::vector<CTA*> ctas;
  std::vector<Warp*> warps;
  std::deque<BulkOp*> bulk;  // pending asynchronous bulk operations
  u32 cbArrived = 0, cbGen = 0;
  std::vector<u8> cbWarpArrived;
  u32 liveWarps = 0;
  u64 progress = 0, instrs = 0;
  u64 rng = 0;
  u64 timeouts = 0;
  u32 rr = 0;
  Stats st;
  RaceState* race = nullptr;
  u8* arena = nullptr;
  size_t arenaBytes = 0;
  u64 rnd() {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
  }
  bool run(u64 budget);  // true when finished
  bool completeOne(bool any);
  bool onlyGlobalStall = false;
};

}  // namespace ptxsim

// The simulated machine: programs, warps, CTAs, clusters, launches.
#pragma once
#include "ptx.h"
#include "sreg.h"
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>

namespace ptxsim {

struct Warp;
struct CTA;
struct Cluster;
struct Launch;
struct Program;
struct Inst;
struct RaceState;

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

inline constexpr u32 kSmemBase = 1024;  // first user byte of shared memory
extern u64 g_sharedWin, g_localWin;     // generic windows (4 GiB each)
inline constexpr u64 kWin = 1ull << 32;

enum FragState : u8 { F_READY, F_CONV, F_BAR, F_MBAR, F_CBAR, F_WSYNC, F_WG };
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

struct Config {
  enum { EAGER, LAZY, RANDOM } async = EAGER;
  bool check = false, ckUninit = false, ckRace = false, ckRegs = false, ckOob = false, ckProxy = false;
  bool checkContinue = false;
  u64 seed = 0;
  bool sched = false;
  int threads = 0;
  bool stats = false;
  std::string statsFile;
  bool summary = false;
  std::string summaryFile;
  bool a100 = false;
  bool verbose = false;
  Config();
};
extern Config g_cfg;

struct Launch {
  Program* prog = nullptr;
  u32 grid[3], block[3], cluster[3] = {1, 1, 1};
  u32 dynSmem = 0, smemBytes = 0;
  u64 gridId = 0;
  std::atomic<bool> failed{false};
  std::mutex mu;
  std::string error;
  int errCode = 0;
  Stats st;
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
  } cta;
  std::atomic<u64> reports{0};
};

// ---- operand access -------------------------------------------------------------------------
inline const u32* srcw(const Warp& w, s32 o) { return (o >= 0 ? w.regs : w.kp) + (o & 0x7fffffff); }
template <class T>
struct CellOf {
  using type = u32;
};
template <>
struct CellOf<u64> {
  using type = u64;
};
template <>
struct CellOf<s64> {
  using type = u64;
};
template <>
struct CellOf<double> {
  using type = u64;
};
template <class T>
using cell_t = typename CellOf<T>::type;
template <class T>
inline const cell_t<T>* src(const Warp& w, s32 o) {
  return (const cell_t<T>*)srcw(w, o);
}
template <class T>
inline cell_t<T>* dst(Warp& w, s32 o) {
  return (cell_t<T>*)(w.regs + o);
}
template <class T>
inline T get(cell_t<T> c) {
  if constexpr (std::is_same_v<T, float>)
    return bitsf(c);
  else if constexpr (std::is_same_v<T, double>)
    return bitsd(c);
  else
    return (T)c;
}
template <class T>
inline cell_t<T> put(T v) {
  if constexpr (std::is_same_v<T, float>)
    return fbits(v);
  else if constexpr (std::is_same_v<T, double>)
    return dbits(v);
  else if constexpr (sizeof(T) <= 4)
    return (u32)(std::make_unsigned_t<T>)v;
  else
    return (u64)v;
}
inline int ffs32(u32 m) { return __builtin_ctz(m); }
#define FOR_LANES(i, m) for (u32 _m = (m), i = 0; _m && (i = (u32)__builtin_ctz(_m), true); _m &= _m - 1)

// ---- scheduling helpers (sched.cpp) ----------------------------------------------------------
bool converge(Warp& w, u32 m, u32 need);    // false: fragment now waits
void blockFrag(Warp& w, FragState st);      // current fragment blocks; pc as is
void splitFrag(Warp& w, u32 pc, u32 mask);  // new ready fragment
void exitLanes(Warp& w, u32 m);
void barCheck(CTA& c, int id);
std::string whereStr(const Warp& w, u32 pc);
std::string laneStr(u32 m);
[[noreturn]] void simFail(Warp& w, int code, const char* fmt, ...) __attribute__((format(printf, 3, 4)));
void report(Warp& w, u32 pc, const char* kind, const std::string& msg);  // CHECK findings
void runLaunch(Launch& L);

// ---- memory (mem.cpp) --------------------------------------------------------------------------
u8* smemPtr(Warp& w, u32 addr, u32 bytes, const char* what);
u8* resolve(Warp& w, int lane, Space sp, u64 addr, u32 bytes, bool write);
CTA* ctaOfSmem(Warp& w, u32 addr);
void checkGlobal(Warp& w, u64 addr, u32 bytes, bool write, int lane);
void mbarCompleteTx(CTA& c, u32 addr, u32 bytes, Warp* w);
bool mbarReady(const Frag& f);
void bulkExecute(BulkOp& op);
void bulkRead(BulkOp& op);
bool pumpForMbar(Warp& w, CTA* c, u32 addr);
void statShared(Warp& w, const u32* addr, u32 mask, u32 bytes, bool write);
enum GlobalUse { GU_LOAD, GU_STORE, GU_ASYNC };
void statGlobal(Warp& w, const u64* addr, u32 mask, u32 bytes, GlobalUse use);
void markShared(CTA& c, u32 off, u32 bytes);
void cpWait(Warp& w, u32 m, u32 keep);
void cpRunAll(Warp& w);
void wgWait(Warp& w, u32 keep);
void wgExec(Warp& w, WgmmaOp& op);
void wgCheckTouch(Warp& w, u32 pc);
void wgDirtyStep(Warp& w, u32 pc);
bool wgPeersReady(Warp& w, u32 target);
u32 taintPre(Warp& w, u32 pc, u32 m);
void taintPost(Warp& w, u32 pc, u32 m, u32 tm);
void setTaint(Warp& w, s32 slot, u32 lanes, u32 m);
inline u32 getTaint(const Warp& w, s32 slot) { return slot >= 0 && !w.taint.empty() ? w.taint[(size_t)slot / 32] : 0; }
void taintReport(Warp& w, u32 pc, u32 lanes, const char* use);
u64 raceAsyncClk(Warp& w);
void bulkIssue(Warp& w, BulkOp* op);

// device allocations (alloc.cpp)
struct Alloc {
  u64 base;
  u64 size;
  u8* map;
  size_t mapBytes;
  bool host;
  std::vector<u8> init;
  bool tracked;
};
void* devAlloc(size_t bytes);
bool devFree(void* p);
Alloc* findAlloc(u64 addr);
void regHost(void* p, size_t bytes);
void unregHost(void* p);
void markInit(u64 addr, u64 bytes);
u64 allocGen();
std::string describeAddr(u64 addr);

// race detector (race.cpp)
enum AgentKind { AG_GEN, AG_ASYNC };
void raceInit(Cluster& c);
void raceFree(Cluster& c);
void raceAccess(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc);
void raceAsyncAccess(Warp& w, CTA& c, u32 off, u32 bytes, bool write, u32 pc, u64 clk, const std::vector<u64>& vc,
                     const std::vector<u64>& pvc, bool asyncProxy);
u64 raceIssueAsync(Warp& w, std::vector<u64>& vc, std::vector<u64>& pvc);
void raceAcquireAsync(Warp& w, u64 clk);
void raceAcquirePeer(Warp& w, Warp& p, u64 clk);
void raceBarArrive(Warp& w, int id);
void raceBarWait(Warp& w, int id);
void raceBarComplete(CTA& c, int id);
void raceClusterComplete(Cluster& c);
void raceClusterArrive(Warp& w);
void raceClusterWait(Warp& w);
void raceMbarArrive(Warp& w, CTA& c, u32 addr);
void raceMbarComplete(CTA& c, u32 addr, Warp* w, u64 clk, const std::vector<u64>& vc);
void raceMbarPhase(CTA& c, u32 addr);
void raceMbarAcquire(Warp& w, CTA& c, u32 addr);
void raceFence(Warp& w);
void raceInitMbar(Warp& w, CTA& c, u32 addr);
void raceAtomic(Warp& w, CTA& c, u32 off, bool release);

// ---- translation ---------------------------------------------------------------------------------
Program* translate(Module& m, Function& f);

// ---- launch bookkeeping -----------------------------------------------------------------------
struct ThreadCtx {
  Warp* w = nullptr;
  u32 pc = 0;
  void* jb = nullptr;
  u64 faultAddr = 0;
};
extern thread_local ThreadCtx t_ctx;
}  // namespace ptxsim

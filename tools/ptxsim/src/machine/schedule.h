// Divergence and barriers: what a handler tells the scheduler; and the operations that the scheduler completes.
#pragma once
#include "machine/warp.h"

namespace ptxsim {

bool converge(Warp& w, u32 m, u32 need);    // false: fragment now waits
void blockFrag(Warp& w, FragState st);      // current fragment blocks; pc as is
void splitFrag(Warp& w, u32 pc, u32 mask);  // new ready fragment
void exitLanes(Warp& w, u32 m);
void barCheck(CTA& c, int id);

// Fragments and warps that wait (run_warp.cpp).
u32 runWarp(Warp& w, u32 q);
std::string dumpCluster(Cluster& c);
Cluster* makeCluster(Launch& L, u32 idx);
void freeCluster(Cluster* c);

// mbarriers (instructions/mbarrier.cpp)
void mbarCompleteTx(CTA& c, u32 addr, u32 bytes, Warp* w);
bool mbarReady(const Frag& f);
bool pumpForMbar(Warp& w, CTA* c, u32 addr);

// cp.async (instructions/cp_async.cpp)
void cpWait(Warp& w, u32 m, u32 keep);
void cpRunAll(Warp& w);

// bulk copies (instructions/bulk_transfer.cpp)
void bulkExecute(BulkOp& op);
void bulkRead(BulkOp& op);
void bulkIssue(Warp& w, BulkOp* op);

// wgmma (instructions/wgmma.cpp)
void wgWait(Warp& w, u32 keep);
void wgExec(Warp& w, WgmmaOp& op);
void wgCheckTouch(Warp& w, u32 pc);
void wgDirtyStep(Warp& w, u32 pc);
bool wgPeersReady(Warp& w, u32 target);

}  // namespace ptxsim

// The race detector's events, told by the instructions that order accesses.
#pragma once
#include "machine/warp.h"

namespace ptxsim {

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
u64 raceAsyncClk(Warp& w);

}  // namespace ptxsim

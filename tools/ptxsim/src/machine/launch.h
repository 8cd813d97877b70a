// One launch of a kernel, and what a host thread executes at the moment.
#pragma once
#include "machine/warp.h"
#include <atomic>
#include <mutex>

namespace ptxsim {

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
  PerCta cta;
  std::atomic<u64> reports{0};
};

struct ThreadCtx {
  Warp* w = nullptr;
  u32 pc = 0;
  void* jb = nullptr;
  u64 faultAddr = 0;
};
extern thread_local ThreadCtx t_ctx;

// Executes it wholly; what goes wrong stands in its error.
void runLaunch(Launch& L);

}  // namespace ptxsim

// What the entry points of the CUDA runtime share: modules, kernels, the sticky error, counters.
#pragma once
#include "machine/machine.h"
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>
#include <cuda_runtime_api.h>
#include <cuda.h>

namespace ptxsim {

struct Fat {
  std::vector<std::string> ptx;
  std::vector<int> arch;
  std::unique_ptr<Module> mod;
  bool loaded = false;
  std::string error;
  std::map<const void*, std::pair<std::string, size_t>> vars;
};
struct Kernel {
  Fat* fat;
  std::string name;
  Program* prog = nullptr;
  std::string error;
  int maxDyn = 49152;
  bool optedIn = false;
};

extern std::recursive_mutex g_mu;
extern std::vector<std::unique_ptr<Fat>> g_fats;
extern std::map<const void*, Kernel> g_kernels;
extern std::map<const void*, std::pair<Fat*, std::string>> g_vars;
extern std::string g_lastReport;
extern cudaError_t g_sticky;
extern thread_local cudaError_t t_err;

inline int g_maxSmem() { return g_cfg.a100 ? 163 * 1024 : 227 * 1024; }
inline cudaError_t E(cudaError_t e) {
  if (e != cudaSuccess && e != cudaErrorNotReady) t_err = e;
  return e;
}

// Success, or the error that an earlier launch has left.
inline cudaError_t S() { return E(g_sticky); }

void parseFat(Fat& f, const u8* p);
Module* moduleOf(Fat& f);
Program* programOf(Kernel& k);
// Reserves the addresses that stand for shared and local memory in generic addresses.
void initWindows();
void setReport(const std::string& s);

inline Kernel* kern(const void* f) {
  auto it = g_kernels.find(f);
  return it == g_kernels.end() ? nullptr : &it->second;
}

// Capture (graphs.cpp). capture: true where the operation was kept, or refused (*e), instead of to be run.
// uncapturable: the error of a call that a GPU refuses while a stream is captured; whenRelaxed: in relaxed mode, too.
bool capture(cudaStream_t s, std::function<cudaError_t(cudaStream_t)> node, cudaError_t* e);
cudaError_t uncapturable(const char* what, bool whenRelaxed);

// Counters (counters_json.cpp)
struct Totals {
  u64 launches = 0;
  Stats s;
  PerCta c;
};
extern std::map<std::string, Totals> g_totals;  // by kernel
extern std::vector<std::string> g_nodes;        // stream operations in order, as JSON
extern std::map<std::string, u64> g_nodeCount;
std::string statsJson(const Stats& s, const PerCta& c);
std::string summaryJson();
std::string attrJson(const cudaLaunchAttribute* a, unsigned n);
u64 streamId(cudaStream_t s);
inline unsigned long long U(u64 x) { return x; }  // for %llu
void writeSummary();
void writeStats(const std::string& j);
void node(const char* kind, cudaStream_t st, const std::string& more = "");

#define API extern "C" __attribute__((visibility("default")))
API void ptxsim_reset();

}  // namespace ptxsim

// Reads the environment.
#include "machine/machine.h"
#include <cstdio>

namespace ptxsim {

Config g_cfg;
static int envInt(const char* n, int d) {
  const char* s = getenv(n);
  return s && *s ? atoi(s) : d;
}
Config::Config() {
  const char* s = getenv("PTXSIM_ASYNC");
  if (s) {
    std::string v = s;
    if (v == "lazy")
      async = LAZY;
    else if (v.rfind("random", 0) == 0) {
      async = RANDOM;
      size_t c = v.find(':');
      if (c != std::string::npos) seed = strtoull(v.c_str() + c + 1, nullptr, 0);
    } else if (v != "eager" && !v.empty())
      fprintf(stderr, "ptxsim: unknown PTXSIM_ASYNC=%s (eager, lazy, random[:seed])\n", s);
  }
  if ((s = getenv("PTXSIM_SCHED")) && *s) {
    const std::string v = s;
    const bool ranked = v.rfind("ranked", 0) == 0;
    const size_t c = v.find(':');
    sched = ranked ? RANKED : SLICES;
    const char* number = !ranked ? s : c == std::string::npos ? "0" : s + c + 1;
    seed += strtoull(number, nullptr, 0) * 0x9e3779b97f4a7c15ull;
  }
  if ((s = getenv("PTXSIM_CHECK")) && *s && strcmp(s, "0")) {
    const std::string v = strf(",%s,", s);
    auto has = [&](const char* k) { return v.find(std::string(",") + k + ",") != std::string::npos; };
    bool all = has("1") || has("all");
    ckOob = all || has("oob");
    ckUninit = all || has("uninit");
    ckRace = all || has("race");
    ckRegs = all || has("regs");
    ckProxy = all || has("proxy");
    if (ckProxy) ckRace = true;
    for (const char* k : {"oob", "uninit", "race", "regs", "proxy"})
      if (has((std::string("-") + k).c_str())) {
        if (!strcmp(k, "oob")) ckOob = false;
        if (!strcmp(k, "uninit")) ckUninit = false;
        if (!strcmp(k, "race")) ckRace = ckProxy = false;
        if (!strcmp(k, "regs")) ckRegs = false;
        if (!strcmp(k, "proxy")) ckProxy = false;
      }
    check = ckOob || ckUninit || ckRace || ckRegs;
  }
  checkContinue = envInt("PTXSIM_CHECK_CONTINUE", 0);
  threads = envInt("PTXSIM_THREADS", 0);
  if ((s = getenv("PTXSIM_STATS")) && *s) {
    stats = true;
    statsFile = s;
  }
  if ((s = getenv("PTXSIM_SUMMARY")) && *s && strcmp(s, "0")) {
    stats = summary = true;
    if (strcmp(s, "1")) summaryFile = s;
  }
  if ((s = getenv("PTXSIM_DEVICE"))) a100 = strcasestr(s, "a100") != nullptr;
  verbose = envInt("PTXSIM_VERBOSE", 0);
}

}  // namespace ptxsim

// The environment variables of the simulator.
#pragma once
#include "number.h"
#include <string>

namespace ptxsim {

struct Config {
  enum { EAGER, LAZY, RANDOM } async = EAGER;
  bool check = false, ckUninit = false, ckRace = false, ckRegs = false, ckOob = false, ckProxy = false;
  bool checkContinue = false;
  u64 seed = 0;
  enum { IN_TURN, SLICES, RANKED } sched = IN_TURN;
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

}  // namespace ptxsim

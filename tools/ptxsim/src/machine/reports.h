// Where something went wrong, in words; errors that end a launch, findings of PTXSIM_CHECK.
#pragma once
#include "machine/warp.h"

namespace ptxsim {

std::string whereStr(const Warp& w, u32 pc);
std::string laneStr(u32 m);
[[noreturn]] void simFail(Warp& w, int code, const char* fmt, ...) __attribute__((format(printf, 3, 4)));
void report(Warp& w, u32 pc, const char* kind, const std::string& msg);  // CHECK findings
std::string codeLoc(Program* p, u32 pc);
std::string shortName(const std::string& n);

}  // namespace ptxsim

// Entry points of the simulator itself: reports, settings, counters.
#include "runtime/state.h"

namespace ptxsim {

API const char* ptxsim_last_report() { return g_lastReport.c_str(); }
API void ptxsim_reset() {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_sticky = cudaSuccess;
  t_err = cudaSuccess;
  g_lastReport.clear();
}
API int ptxsim_register(void* p, size_t n) {
  regHost(p, n);
  return 0;
}
API int ptxsim_unregister(void* p) {
  unregHost(p);
  return 0;
}
API int ptxsim_config(const char* name, const char* value) {  // same names as the environment variables
  std::lock_guard<std::recursive_mutex> l(g_mu);
  if (value)
    setenv(name, value, 1);
  else
    unsetenv(name);
  Config c;
  if (c.summaryFile != g_cfg.summaryFile) writeSummary();
  g_cfg = c;
  return 0;
}
API const char* ptxsim_summary() {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  static std::string s;
  s = summaryJson();
  return s.c_str();
}
API void ptxsim_summary_reset() {
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_totals.clear();
  g_nodes.clear();
  g_nodeCount.clear();
}

}  // namespace ptxsim

// Reports: the place in PTX and in the source, lanes, errors and findings.
#include "machine/machine.h"
#include <cstdarg>
#include <cstdio>

namespace ptxsim {

std::string laneStr(u32 m) {
  if (m == ~0u) return "0-31";
  std::string s;
  for (int i = 0; i < 32; ++i)
    if (m >> i & 1) {
      int j = i;
      while (j < 31 && (m >> (j + 1) & 1)) ++j;
      if (!s.empty()) s += ",";
      s += j > i ? strf("%d-%d", i, j) : strf("%d", i);
      i = j;
    }
  return s;
}
std::string codeLoc(Program* p, u32 pc) {
  if (pc >= p->info.size()) return "end of kernel";
  const InstInfo& f = p->info[pc];
  std::string s = strf("PTX line %u", f.line);
  if (f.loc.line) {
    auto it = p->mod->files.find(f.loc.file);
    std::string fn = it == p->mod->files.end() ? strf("file %u", f.loc.file) : it->second;
    size_t k = fn.rfind('/');
    s += strf(", source %s:%u", (k == std::string::npos ? fn : fn.substr(k + 1)).c_str(), f.loc.line);
  }
  s += ": " + p->mod->lineText(f.line);
  return s;
}
std::string shortName(const std::string& n) { return n.size() > 120 ? n.substr(0, 117) + "..." : n; }
std::string whereStr(const Warp& w, u32 pc) {
  std::string s = strf("CTA (%u,%u,%u)", w.cta->id[0], w.cta->id[1], w.cta->id[2]);
  if (w.cl->ctas.size() > 1) s += strf(" [rank %u of cluster %u]", w.cta->rank, w.cl->id);
  return s + strf(" warp %u, ", w.wid) + codeLoc(w.prog, pc);
}
void simFail(Warp& w, int code, const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  char b[3000];
  vsnprintf(b, sizeof b, fmt, ap);
  va_end(ap);
  throw SimError(strf("%s\n    at %s\n    kernel %s", b, whereStr(w, w.pc ? w.pc - 1 : 0).c_str(),
                      shortName(w.prog->fn->name).c_str()),
                 code);
}
void report(Warp& w, u32 pc, const char* kind, const std::string& msg) {
  std::string s = strf("[%s] %s\n    at %s\n    kernel %s", kind, msg.c_str(), whereStr(w, pc).c_str(),
                       shortName(w.prog->fn->name).c_str());
  if (!g_cfg.checkContinue) throw SimError(s, 719);
  Launch& L = *w.cta->L;
  u64 n = L.reports++;
  if (n < 20) fprintf(stderr, "ptxsim: %s\n", s.c_str());
  std::lock_guard<std::mutex> g(L.mu);
  if (L.error.empty()) {
    L.error = s;
    L.errCode = 719;
  }
}

}  // namespace ptxsim

// Calls into the runtime of the device: printf and assert.
#include "translate/translator.h"
#include <cstdio>

namespace ptxsim {

// ---- runtime services ----
static u64 pval(Warp& w, const Operand& o, int lane, int bytes) {
  u64 v = 0;
  memcpy(&v, resolve(w, lane, Space::PARAM, (u64)o.imm, (u32)bytes, false), (size_t)bytes);
  return v;
}
static std::string cstr(Warp& w, int lane, u64 a) {
  std::string s;
  for (int i = 0; i < 4096; ++i) {
    char c = *(const char*)resolve(w, lane, Space::GENERIC, a + (u64)i, 1, false);
    if (!c) break;
    s += c;
  }
  return s;
}
static void hassert(Warp& w, const Inst& I, u32 m) {
  const auto& ops = *(const std::vector<Operand>*)I.x;
  int l = ffs32(m);
  std::string msg = cstr(w, l, pval(w, ops[0], l, 8)), file = cstr(w, l, pval(w, ops[1], l, 8));
  u32 line = (u32)pval(w, ops[2], l, 4);
  simFail(w, 710, "device-side assertion `%s' failed at %s:%u (lanes %s)", msg.c_str(), file.c_str(), line,
          laneStr(m).c_str());
}
static void hprintf(Warp& w, const Inst& I, u32 m) {
  const auto& ops = *(const std::vector<Operand>*)I.x;
  FOR_LANES(l, m) {
    std::string f = cstr(w, (int)l, pval(w, ops[0], (int)l, 8)), out;
    u64 args = pval(w, ops[1], (int)l, 8);
    u32 off = 0;
    auto rd = [&](u32 n) {
      off = (off + n - 1) / n * n;
      u64 v = 0;
      memcpy(&v, resolve(w, (int)l, Space::GENERIC, args + off, n, false), n);
      off += n;
      return v;
    };
    for (size_t i = 0; i < f.size(); ++i) {
      if (f[i] != '%') {
        out += f[i];
        continue;
      }
      if (f[i + 1] == '%') {
        out += '%';
        ++i;
        continue;
      }
      std::string sp = "%";
      size_t j = i + 1;
      bool lng = false;
      while (j < f.size() && strchr("-+ #0123456789.*", f[j])) {
        if (f[j] == '*')
          sp += std::to_string((int)rd(4));
        else
          sp += f[j];
        ++j;
      }
      while (j < f.size() && strchr("lhzjt", f[j])) {
        if (f[j] != 'h') lng = true;
        ++j;
      }
      char c = j < f.size() ? f[j] : 'd';
      if (strchr("diuxXoc", c)) {
        if (lng)
          out += strf((sp + "ll" + c).c_str(), rd(8));
        else
          out += strf((sp + c).c_str(), (u32)rd(4));
      } else if (strchr("fFeEgGaA", c))
        out += strf((sp + c).c_str(), bitsd(rd(8)));
      else if (c == 'p')
        out += strf((sp + "p").c_str(), (void*)rd(8));
      else if (c == 's')
        out += strf((sp + "s").c_str(), cstr(w, (int)l, rd(8)).c_str());
      i = j;
    }
    fputs(out.c_str(), stdout);
    if (ops.size() > 2) {
      u32 one = 1;
      memcpy(resolve(w, (int)l, Space::PARAM, (u64)ops[2].imm, 4, true), &one, 4);
    }
  }
  fflush(stdout);
}
static void svc(Tr& t, Handler h) {
  Inst& I = t.out(h, C_OTHER);
  I.x = new std::vector<Operand>(t.in->ops);
}
OP_NAMED(vprintf, "$vprintf") { svc(t, hprintf); }
OP_NAMED(assertfail, "$__assertfail") { svc(t, hassert); }

}  // namespace ptxsim

// Words, numbers, constant expressions of PTX.
#include "ptx/parser.h"
#include <functional>

namespace ptxsim {

void Parser::err(const std::string& s) { fail("PTX line %u: %s", line, s.c_str()); }

void Parser::ws() {
  for (;;) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) {
      if (*p == '\n') ++line;
      ++p;
    }
    if (p + 1 < end && p[0] == '/' && p[1] == '/') {
      while (p < end && *p != '\n') ++p;
      continue;
    }
    if (p + 1 < end && p[0] == '/' && p[1] == '*') {
      p += 2;
      while (p + 1 < end && !(p[0] == '*' && p[1] == '/')) {
        if (*p == '\n') ++line;
        ++p;
      }
      p += 2;
      continue;
    }
    return;
  }
}

bool Parser::eof() {
  ws();
  return p >= end;
}

char Parser::peek() {
  ws();
  return p < end ? *p : 0;
}

bool Parser::accept(char c) {
  if (peek() == c) {
    ++p;
    return true;
  }
  return false;
}

void Parser::expect(char c) {
  if (!accept(c)) err(strf("expected '%c' near '%.20s'", c, p));
}

std::string Parser::word() {
  ws();
  const char* b = p;
  if (p < end && (*p == '.' || isId0(*p)))
    ++p;
  else
    err(strf("expected identifier near '%.20s'", p));
  while (p < end && isId(*p)) ++p;
  return std::string(b, p);
}

std::string Parser::opcode() {
  ws();
  const char* b = p;
  while (p < end && (isId(*p) || *p == '.' || (p[0] == ':' && p[1] == ':') || (p[0] == ':' && p > b && p[-1] == ':')))
    ++p;
  return std::string(b, p);
}

bool Parser::acceptWord(const char* w) {
  ws();
  size_t n = strlen(w);
  if ((size_t)(end - p) >= n && !strncmp(p, w, n) && !isId(p[n])) {
    p += n;
    return true;
  }
  return false;
}

bool Parser::number(s64& out, bool& f64) {
  ws();
  f64 = false;
  if (p[0] == '0' && (p[1] == 'f' || p[1] == 'F')) {
    char b[9] = {};
    memcpy(b, p + 2, 8);
    out = (s64)strtoull(b, nullptr, 16);
    p += 10;
    return true;
  }
  if (p[0] == '0' && (p[1] == 'd' || p[1] == 'D')) {
    char b[17] = {};
    memcpy(b, p + 2, 16);
    out = (s64)strtoull(b, nullptr, 16);
    p += 18;
    f64 = true;
    return true;
  }
  char* e;
  if (p[0] == '0' && (p[1] == 'b' || p[1] == 'B'))
    out = (s64)strtoull(p + 2, &e, 2);
  else {
    out = (s64)strtoull(p, &e, 0);
    if (!(p[0] == '0' && (p[1] == 'x' || p[1] == 'X')) && (*e == '.' || *e == 'e' || *e == 'E')) {
      double d = strtod(p, &e);
      out = (s64)dbits(d);
      p = e;
      f64 = true;
      return true;
    }
  }
  p = e;
  if (*p == 'U') ++p;
  return false;
}

s64 Parser::constExpr() {
  std::function<s64(int)> ex;
  auto prim = [&]() -> s64 {
    if (accept('(')) {
      s64 v = ex(0);
      expect(')');
      return v;
    }
    if (accept('-')) {
      return -ex(9);
    }
    if (accept('~')) {
      return ~ex(9);
    }
    s64 v;
    bool f;
    if (number(v, f)) err("float in integer expression");
    return v;
  };
  ex = [&](int lvl) -> s64 {
    s64 v = prim();
    if (lvl >= 9) return v;
    for (;;) {
      char c = peek();
      if (c == '*') {
        ++p;
        v *= prim();
      } else if (c == '+') {
        ++p;
        s64 r = prim();
        while (peek() == '*') {
          ++p;
          r *= prim();
        }
        v += r;
      } else if (c == '-') {
        ++p;
        s64 r = prim();
        while (peek() == '*') {
          ++p;
          r *= prim();
        }
        v -= r;
      } else if (p[0] == '<' && p[1] == '<') {
        p += 2;
        v <<= prim();
      } else if (p[0] == '>' && p[1] == '>') {
        p += 2;
        v >>= prim();
      } else
        return v;
    }
  };
  return ex(0);
}

void Parser::skipStatement() {
  while (p < end && *p != ';') {
    if (*p == '\n') ++line;
    ++p;
  }
  if (p < end) ++p;
}

void Parser::skipBraces() {
  int d = 0;
  for (; p < end; ++p) {
    if (*p == '\n')
      ++line;
    else if (*p == '/' && p[1] == '/') {
      while (p < end && *p != '\n') ++p;
      --p;
    } else if (*p == '"') {
      ++p;
      while (p < end && *p != '"') ++p;
    } else if (*p == '{')
      ++d;
    else if (*p == '}') {
      if (--d == 0) {
        ++p;
        return;
      }
    }
  }
}

std::string Module::lineText(u32 line) const {
  size_t pos = 0;
  for (u32 l = 1; l < line; ++l) {
    pos = text.find('\n', pos);
    if (pos == std::string::npos) return "";
    ++pos;
  }
  size_t e = text.find('\n', pos);
  std::string s = text.substr(pos, e == std::string::npos ? e : e - pos);
  size_t b = s.find_first_not_of(" \t");
  if (b == std::string::npos) return "";
  s = s.substr(b);
  if (s.size() > 160) s = s.substr(0, 157) + "...";
  return s;
}

}  // namespace ptxsim

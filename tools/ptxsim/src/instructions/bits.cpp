// Bit fields, counts, logic, shifts, permutations.
#include "translate/elementwise.h"

namespace ptxsim {

// ---- bit operations ----
OP(popc) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto f32 = [](u32 x) { return (u32)__builtin_popcount(x); };
  auto f64 = [](u64 x) { return (u32)__builtin_popcountll(x); };
  Inst& I =
      t.out(tyBits(ty) == 64 ? (Handler)g1<u32, u64, decltype(f64)> : (Handler)g1<u32, u32, decltype(f32)>, C_INT);
  I.a = a;
  I.d = d;
}
OP(clz) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto f32 = [](u32 x) { return (u32)(x ? __builtin_clz(x) : 32); };
  auto f64 = [](u64 x) { return (u32)(x ? __builtin_clzll(x) : 64); };
  Inst& I =
      t.out(tyBits(ty) == 64 ? (Handler)g1<u32, u64, decltype(f64)> : (Handler)g1<u32, u32, decltype(f32)>, C_INT);
  I.a = a;
  I.d = d;
}
OP(bfind) {
  bool sh = t.has("shiftamt");
  Ty ty = t.type();
  s32 a = t.S(1, ty), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    FOR_LANES(i, m) {
      u32 r;
      int bits = I.t & 1 ? 64 : 32;
      u64 x = bits == 64 ? src<u64>(w, I.a)[i] : srcw(w, I.a)[i];
      if (I.t & 2) {
        s64 sx = bits == 64 ? (s64)x : (s64)(s32)x;
        if (sx < 0) x = bits == 64 ? ~x : (u32)~x;
      }
      r = x ? (u32)(63 - __builtin_clzll(x)) : ~0u;
      if (I.fl && r != ~0u) r = (u32)bits - 1 - r;
      d[i] = r;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.d = d;
  I.t = (u8)((tyBits(ty) == 64) | (tySigned(ty) ? 2 : 0));
  I.fl = sh;
}
OP(brev) {
  Ty ty = t.type();
  if (tyBits(ty) == 64)
    emit1<u64>(t, ty, [](u64 x) {
      u64 r = 0;
      for (int i = 0; i < 64; ++i) r |= (x >> i & 1) << (63 - i);
      return r;
    });
  else
    emit1<u32>(t, ty, [](u32 x) {
      u32 r = 0;
      for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
      return r;
    });
}
template <class T>
static T bfeF(T a, u32 b, u32 c) {
  const u32 B = sizeof(T) * 8;
  u32 pos = b & 0xff, len = c & 0xff;
  using U = std::make_unsigned_t<T>;
  if (len == 0) return 0;
  bool sgn = false;
  if constexpr (std::is_signed_v<T>) sgn = (U)a >> std::min(pos + len - 1, B - 1) & 1;
  U r = pos >= B ? 0 : (U)a >> pos;
  u32 have = pos >= B ? 0 : B - pos;
  if (len < B) r &= ((U)1 << len) - 1;
  u32 valid = std::min(len, have);
  if (sgn && valid < B) r |= ~(((U)1 << valid) - 1);
  return (T)r;
}
OP(bfe) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), c = t.S(3, Ty::U32), d = t.D(0, ty);
  auto mk = [&](Handler h) {
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.c = c;
    I.d = d;
  };
  auto f1 = [](u32 x, u32 y, u32 z) { return bfeF<u32>(x, y, z); };
  auto f2 = [](s32 x, u32 y, u32 z) { return bfeF<s32>(x, y, z); };
  auto f3 = [](u64 x, u32 y, u32 z) { return bfeF<u64>(x, y, z); };
  auto f4 = [](s64 x, u32 y, u32 z) { return bfeF<s64>(x, y, z); };
  if (ty == Ty::U32)
    mk(g3<u32, u32, u32, u32, decltype(f1)>);
  else if (ty == Ty::S32)
    mk(g3<s32, s32, u32, u32, decltype(f2)>);
  else if (ty == Ty::U64)
    mk(g3<u64, u64, u32, u32, decltype(f3)>);
  else
    mk(g3<s64, s64, u32, u32, decltype(f4)>);
}
OP(bfi) {
  Ty ty = t.type();
  bool q = tyBits(ty) == 64;
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, Ty::U32), e = t.S(4, Ty::U32), d = t.D(0, ty);
  auto h32 = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    auto* c = srcw(w, I.c);
    auto* e = srcw(w, I.e);
    FOR_LANES(i, m) {
      u32 pos = c[i] & 255, len = e[i] & 255;
      u64 mask = len >= 32 ? 0xffffffffu : ((1ull << len) - 1);
      u64 mm = pos >= 32 ? 0 : (u32)(mask << pos);
      d[i] = (u32)((b[i] & ~mm) | (((u64)a[i] << (pos & 63)) & mm));
    }
  };
  auto h64 = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u64>(w, I.d);
    auto* a = src<u64>(w, I.a);
    auto* b = src<u64>(w, I.b);
    auto* c = srcw(w, I.c);
    auto* e = srcw(w, I.e);
    FOR_LANES(i, m) {
      u32 pos = c[i] & 255, len = e[i] & 255;
      u64 mask = len >= 64 ? ~0ull : ((1ull << len) - 1);
      u64 mm = pos >= 64 ? 0 : mask << pos;
      d[i] = (b[i] & ~mm) | (pos >= 64 ? 0 : (a[i] << pos) & mm);
    }
  };
  Inst& I = t.out(q ? (Handler)h64 : (Handler)h32, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.e = e;
  I.d = d;
}
OP(bmsk) {
  t.ignore({"clamp"});
  bool wrap = t.has("wrap");
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, ty), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    FOR_LANES(i, m) {
      u32 x = a[i], y = b[i];
      if (I.fl) {
        x &= 31;
        y &= 31;
      }
      u64 mk = y >= 32 ? 0xffffffffull : (1ull << y) - 1;
      d[i] = x >= 32 ? 0 : (u32)(mk << x);
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.d = d;
  I.fl = wrap;
}
template <int K>
static void logic(Tr& t) {  // and or xor
  Ty ty = t.type();
  if (ty == Ty::PRED) {
    bool na, nb;
    s32 a = t.pred(t.op(1), na), b = t.pred(t.op(2), nb), d = t.predD(t.op(0));
    auto h = [](Warp& w, const Inst& I, u32 m) {
      u32 x = w.preds[I.a] ^ (I.fl & 1 ? ~0u : 0), y = w.preds[I.b] ^ (I.fl & 2 ? ~0u : 0);
      u32 r = K == 0 ? x & y : K == 1 ? x | y : x ^ y;
      w.preds[I.d] = (w.preds[I.d] & ~m) | (r & m);
    };
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.d = d;
    I.fl = (u32)na | (u32)nb << 1;
    return;
  }
  auto go = [&](auto tag) {
    using T = typename decltype(tag)::type;
    emit2<T>(t, ty, [](T a, T b) { return (T)(K == 0 ? a & b : K == 1 ? a | b : a ^ b); });
  };
  int b = tyBits(ty);
  if (b == 64)
    go(Tag<u64>{});
  else if (b == 32)
    go(Tag<u32>{});
  else
    go(Tag<u16>{});
}
OP_NAMED(and_, "and") { logic<0>(t); }
OP_NAMED(or_, "or") { logic<1>(t); }
OP_NAMED(xor_, "xor") { logic<2>(t); }
OP_NAMED(not_, "not") {
  Ty ty = t.type();
  if (ty == Ty::PRED) {
    bool na;
    s32 a = t.pred(t.op(1), na), d = t.predD(t.op(0));
    auto h = [](Warp& w, const Inst& I, u32 m) {
      w.preds[I.d] = (w.preds[I.d] & ~m) | (~(w.preds[I.a] ^ (I.fl ? ~0u : 0)) & m);
    };
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.d = d;
    I.fl = na;
    return;
  }
  int b = tyBits(ty);
  if (b == 64)
    emit1<u64>(t, ty, [](u64 a) { return ~a; });
  else if (b == 32)
    emit1<u32>(t, ty, [](u32 a) { return ~a; });
  else
    emit1<u16>(t, ty, [](u16 a) { return (u16)~a; });
}
OP(cnot) {
  Ty ty = t.type();
  if (tyBits(ty) == 64)
    emit1<u64>(t, ty, [](u64 a) { return (u64)(a == 0); });
  else
    emit1<u32>(t, ty, [](u32 a) { return (u32)(a == 0); });
}
OP(lop3) {
  Ty ty = t.type();
  bool isOr = t.has("or"), isAnd = t.has("and");
  if (isOr || isAnd) {  // d|p = (a op b op c), p = (d != 0) or/and q
    const Operand& o = t.op(0);
    if (o.k != Operand::PAIR) t.err("lop3 d|p expected");
    if (t.op(4).k != Operand::INT) t.err("lop3 table must be a constant");
    bool n;
    s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty), q = t.pred(t.op(5), n), d = t.D(o.v[0], 4), p = t.predD(o.v[1]);
    const s32* v = t.aux({p, q, (s32)n});
    auto h = [](Warp& w, const Inst& I, u32 m) {
      auto* d = dst<u32>(w, I.d);
      auto* a = srcw(w, I.a);
      auto* b = srcw(w, I.b);
      auto* c = srcw(w, I.c);
      u32 nz = 0;
      FOR_LANES(i, m) {
        u32 r = 0;
        for (int k = 0; k < 8; ++k)
          if (I.fl >> k & 1) r |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
        d[i] = r;
        nz |= (u32)(r != 0) << i;
      }
      u32 q = w.preds[I.v[1]] ^ (I.v[2] ? ~0u : 0), r = I.t ? nz | q : nz & q;
      w.preds[I.v[0]] = (w.preds[I.v[0]] & ~m) | (r & m);
    };
    u32 lut = (u32)t.op(4).imm & 255;
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.c = c;
    I.d = d;
    I.v = v;
    I.fl = lut;
    I.t = isOr;
    return;
  }
  s32 a = t.S(1, ty), b = t.S(2, ty), c = t.S(3, ty), d = t.D(0, ty);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    auto* d = dst<u32>(w, I.d);
    auto* a = srcw(w, I.a);
    auto* b = srcw(w, I.b);
    auto* c = srcw(w, I.c);
    u32 L = I.fl;
    u32 k[8];
    for (int j = 0; j < 8; ++j) k[j] = L >> j & 1 ? ~0u : 0;
    auto f = [&](u32 x, u32 y, u32 z) {
      return (~x & ~y & ~z & k[0]) | (~x & ~y & z & k[1]) | (~x & y & ~z & k[2]) | (~x & y & z & k[3]) |
             (x & ~y & ~z & k[4]) | (x & ~y & z & k[5]) | (x & y & ~z & k[6]) | (x & y & z & k[7]);
    };
    if (m == ~0u) {
#pragma GCC ivdep
      for (int i = 0; i < 32; ++i) d[i] = f(a[i], b[i], c[i]);
    } else
      FOR_LANES(i, m) d[i] = f(a[i], b[i], c[i]);
  };
  if (t.op(4).k != Operand::INT) t.err("lop3 table must be a constant");
  u32 lut = (u32)t.op(4).imm & 255;
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
  I.fl = lut;
}
OP(shl) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, ty);
  auto mk = [&](Handler h) {
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.d = d;
  };
  auto f32 = [](u32 x, u32 s) { return s > 31 ? 0u : x << s; };
  auto f64 = [](u64 x, u32 s) { return s > 63 ? 0ull : x << s; };
  auto f16 = [](u16 x, u32 s) { return (u16)(s > 15 ? 0 : x << s); };
  int bb = tyBits(ty);
  if (bb == 64)
    mk(g2<u64, u64, u32, decltype(f64)>);
  else if (bb == 32)
    mk(g2<u32, u32, u32, decltype(f32)>);
  else
    mk(g2<u16, u16, u32, decltype(f16)>);
}
OP(shr) {
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, ty);
  auto mk = [&](Handler h) {
    Inst& I = t.out(h, C_INT);
    I.a = a;
    I.b = b;
    I.d = d;
  };
  auto f32 = [](u32 x, u32 s) { return s > 31 ? 0u : x >> s; };
  auto f64 = [](u64 x, u32 s) { return s > 63 ? 0ull : x >> s; };
  auto f16 = [](u16 x, u32 s) { return (u16)(s > 15 ? 0 : x >> s); };
  auto g32 = [](s32 x, u32 s) { return x >> (s > 31 ? 31 : s); };
  auto g64 = [](s64 x, u32 s) { return x >> (s > 63 ? 63 : s); };
  auto g16 = [](s16 x, u32 s) { return (s16)(x >> (s > 15 ? 15 : s)); };
  int bb = tyBits(ty);
  if (tySigned(ty)) {
    if (bb == 64)
      mk(g2<s64, s64, u32, decltype(g64)>);
    else if (bb == 32)
      mk(g2<s32, s32, u32, decltype(g32)>);
    else
      mk(g2<s16, s16, u32, decltype(g16)>);
  } else {
    if (bb == 64)
      mk(g2<u64, u64, u32, decltype(f64)>);
    else if (bb == 32)
      mk(g2<u32, u32, u32, decltype(f32)>);
    else
      mk(g2<u16, u16, u32, decltype(f16)>);
  }
}
OP(shf) {
  bool l = t.has("l");
  t.has("r");
  bool wrap = t.has("wrap");
  t.has("clamp");
  Ty ty = t.type();
  auto lw = [](u32 a, u32 b, u32 c) {
    u32 n = c & 31;
    return (u32)(((u64)b << 32 | a) << n >> 32);
  };
  auto lc = [](u32 a, u32 b, u32 c) {
    u32 n = std::min(c, 32u);
    return n == 32 ? a : (u32)(((u64)b << 32 | a) << n >> 32);
  };
  auto rw = [](u32 a, u32 b, u32 c) {
    u32 n = c & 31;
    return (u32)(((u64)b << 32 | a) >> n);
  };
  auto rc = [](u32 a, u32 b, u32 c) {
    u32 n = std::min(c, 32u);
    return n == 32 ? b : (u32)(((u64)b << 32 | a) >> n);
  };
  if (l) {
    if (wrap)
      emit3<u32>(t, ty, lw);
    else
      emit3<u32>(t, ty, lc);
  } else {
    if (wrap)
      emit3<u32>(t, ty, rw);
    else
      emit3<u32>(t, ty, rc);
  }
}
static u32 prmtF(u32 a, u32 b, u32 sel, u32 mode) {
  u64 s = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) {
    u32 n;
    u32 k = sel & 3;
    switch (mode) {
      case 0: {
        u32 x = sel >> (4 * i) & 15;
        u32 by = (u32)(s >> ((x & 7) * 8)) & 255;
        if (x & 8) by = by & 0x80 ? 255 : 0;
        r |= by << (8 * i);
        continue;
      }
      case 1: n = k + i; break;                   // f4e
      case 2: n = (k - i) & 7; break;             // b4e
      case 3: n = k; break;                       // rc8
      case 4: n = std::max<u32>(k, i); break;     // ecl
      case 5: n = std::min<u32>(k, i); break;     // ecr
      default: n = (k & 1) * 2 + (i & 1); break;  // rc16
    }
    r |= ((u32)(s >> (n * 8)) & 255) << (8 * i);
  }
  return r;
}
OP(prmt) {
  Ty ty = t.type();
  const char* md[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  u32 mode = 0;
  for (u32 i = 1; i < 7; ++i)
    if (t.has(md[i])) mode = i;
  emitS3<u32>(t, ty, [](const Inst& I, u32 a, u32 b, u32 c) { return prmtF(a, b, c, I.fl); }).fl = mode;
}

OP(fns) {  // position of the n-th set bit counted from |base|
  t.type();
  s32 a = t.S(1, Ty::B32), b = t.S(2, Ty::B32), c = t.S(3, Ty::S32), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u32 mask = srcw(w, I.a)[i], r = ~0u;
      s64 base = srcw(w, I.b)[i];
      s32 n = (s32)srcw(w, I.c)[i];
      if (n == 0) {
        if (base < 32 && (mask >> base & 1)) r = (u32)base;
      } else {
        s64 step = n > 0 ? 1 : -1, left = std::llabs((s64)n);
        for (s64 p = base; p >= 0 && p < 32; p += step)
          if ((mask >> p & 1) && --left == 0) {
            r = (u32)p;
            break;
          }
      }
      w.regs[I.d + i] = r;
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.c = c;
  I.d = d;
}
OP(szext) {
  bool wrap = t.has("wrap");
  t.has("clamp");
  Ty ty = t.type();
  s32 a = t.S(1, ty), b = t.S(2, Ty::U32), d = t.D(0, 4);
  auto h = [](Warp& w, const Inst& I, u32 m) {
    FOR_LANES(i, m) {
      u32 x = srcw(w, I.a)[i], n = srcw(w, I.b)[i];
      if (I.fl & 2) n &= 31;
      w.regs[I.d + i] = n == 0     ? 0
                        : n >= 32  ? x
                        : I.fl & 1 ? (u32)((s32)(x << (32 - n)) >> (32 - n))
                                   : x & ((1u << n) - 1);
    }
  };
  Inst& I = t.out(h, C_INT);
  I.a = a;
  I.b = b;
  I.d = d;
  I.fl = (u32)tySigned(ty) | (u32)wrap << 1;
}

}  // namespace ptxsim

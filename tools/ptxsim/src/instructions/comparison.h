// Relations of PTX: ordered ones are false for NaN, those with U are true.
#pragma once
#include "number.h"
#include <type_traits>

namespace ptxsim {

enum Cmp : int { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
template <class T>
bool cmpF(int c, T a, T b) {
  bool un = false;
  if constexpr (std::is_floating_point_v<T>) un = (a != a) || (b != b);
  switch (c) {
    case EQ: return !un && a == b;
    case NE: return !un && a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case EQU: return un || a == b;
    case NEU: return un || a != b;
    case LTU: return un || a < b;
    case LEU: return un || a <= b;
    case GTU: return un || a > b;
    case GEU: return un || a >= b;
    case NUM: return !un;
    case NAN_: return un;
  }
  return false;
}

}  // namespace ptxsim

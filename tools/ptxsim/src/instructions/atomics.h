// Read-modify-write of one element: what atom, red and bulk reductions share.
#pragma once
#include "ptx/module.h"

namespace ptxsim {

enum AOp : u8 { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };

// The new value: op on the old one, the operand, and the one of inc, dec and cas.
u64 atomApply(u8 op, Ty ty, u64 o, u64 v, u64 c);

template <class T>
T atomMem(u8* p, u8 op, Ty ty, u64 v, u64 c) {
  T* q = (T*)p;
  T o = __atomic_load_n(q, __ATOMIC_SEQ_CST);
  for (;;) {
    T nv = (T)atomApply(op, ty, o, v, c);
    if (__atomic_compare_exchange_n(q, &o, nv, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return o;
  }
}

}  // namespace ptxsim

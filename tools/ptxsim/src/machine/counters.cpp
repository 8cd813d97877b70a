// Names and groups of the classes of instructions.
#include "machine/counters.h"

namespace ptxsim {

const char* kClsName[C_COUNT] = {"int",       "float",      "half",           "sfu",      "cvt.frnd",    "cvt.f2i",
                                 "cvt.i2f",   "cvt.f2f",    "cvt.i2i",        "mov",      "control",     "ld.global",
                                 "st.global", "ld.shared",  "st.shared",      "param",    "ld/st.other", "atomic",
                                 "cp.async",  "tma",        "ldmatrix",       "stmatrix", "movmatrix",   "mma",
                                 "wgmma",     "wgmma.sync", "barrier",        "fence",    "mbarrier",    "shuffle",
                                 "vote",      "redux",      "griddepcontrol", "other"};
const char* kGrpName[G_COUNT] = {"tensor", "integer", "float",   "conversion", "move",    "shared", "global",
                                 "atomic", "async",   "shuffle", "branch",     "barrier", "other"};
Grp clsGroup(int c) {
  switch (c) {
    case C_MMA:
    case C_WGMMA: return G_TENSOR;
    case C_INT: return G_INT;
    case C_FLOAT:
    case C_HALF:
    case C_SFU: return G_FLOAT;
    case C_FRND:
    case C_F2I:
    case C_I2F:
    case C_F2F:
    case C_I2I: return G_CVT;
    case C_MOV:
    case C_PARAM: return G_MOV;
    case C_LDS:
    case C_STS:
    case C_LDMATRIX:
    case C_STMATRIX: return G_SHARED;
    case C_LDG:
    case C_STG: return G_GLOBAL;
    case C_ATOM: return G_ATOM;
    case C_CPASYNC:
    case C_TMA: return G_ASYNC;
    case C_SHFL:
    case C_VOTE:
    case C_REDUX:
    case C_MOVMATRIX: return G_SHFL;
    case C_CTRL: return G_BRANCH;
    case C_BAR:
    case C_FENCE:
    case C_MBAR:
    case C_WGSYNC:
    case C_GRIDDEP: return G_BAR;
    default: return G_OTHER;
  }
}

}  // namespace ptxsim

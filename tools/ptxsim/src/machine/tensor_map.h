// Tensor-map descriptor as encoded by this runtime's cuTensorMapEncodeTiled.
#pragma once
#include "number.h"

namespace ptxsim {

struct TMap {
  u32 magic;  // kTMapMagic
  u8 dtype, rank, interleave, swizzle, oobNan, esize, pad[2];
  u64 base;
  u32 dim[5];
  u16 box[5];
  u8 estride[5], pad2;
  u64 stride[4];  // bytes, dimensions 1..4
  u8 pad3[8];
};
static_assert(sizeof(TMap) <= 128);
constexpr u32 kTMapMagic = 0x50545854;

}  // namespace ptxsim

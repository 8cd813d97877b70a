// Bulk and tensor copies: their translation and their tiles.
#pragma once
#include "machine/tensor_map.h"
#include "translate/translator.h"

namespace ptxsim {

void emitBulk(Tr& t, bool red);
// Bytes of a tile that lie inside the tensor, and all of them.
u64 boxInside(const TMap& t, const int* coord);
u32 boxBytes(const TMap& t);

}  // namespace ptxsim

// The table of GEMM kernels: one row per instance, read from the generated kernels.inc (source: cmake/kernels.cmake).
// Selection, kernel_table(), launch tables and tests are all readings of it.
#pragma once
#include <cstdint>

#include "plan/family.h"

namespace pyquant {

struct Row {
  const char* name;
  Family family;
  int32_t tile_m, tile_n, tile_k;  // of the output: tokens, channels, codes; whichever operand the kernel calls A
  int32_t cluster_m, cluster_n;
  int32_t stages;        // shared-memory buffers of the main loop; 0: as many as fit
  const char* schedule;  // simt, multistage, splitk, pingpong, cooperative, streamk, swapped_..., decode, decode256
  bool selectable;       // false: measured by the bench only
  bool compiled;         // has machine code in this build

  const FamilyFacts& facts() const { return facts_of(family); }
};

const Row* rows();
int row_count();
const Row* find_row(const char* name);  // null when there is none

}  // namespace pyquant

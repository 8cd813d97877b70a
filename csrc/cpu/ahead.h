// What a product may call into the caches while it multiplies. No result depends on it.
#pragma once
#include <cstdint>

namespace pyquant::cpu {

struct Ahead {
  // The weights that the call after this one reads: as many bytes as this one does. Null: none.
  const void* weights = nullptr;
  // Where the epilogue writes the rows of this product: out_bytes of each, a row every out_stride bytes. Null:
  // elsewhere.
  const unsigned char* out = nullptr;
  int64_t out_stride = 0, out_bytes = 0;
  // These rows are the first to read the weights of this product, which may still be far away.
  bool first_use = false;

  // The lines of rows [first, first + rows), to be owned before they are written: a store that misses has to read the
  // line first, and a row of 64 outputs is too short to hide that.
  void call_out(int64_t first, int64_t rows) const {
    if (!out) return;
    for (int64_t r = first; r < first + rows; ++r)
      for (int64_t at = 0; at < out_bytes; at += 64) __builtin_prefetch(out + r * out_stride + at, 1, 3);
  }

  // One of them: the lines of row `first` come before those of the next. Precondition: out.
  static constexpr int64_t kRowLines = 4;
  void call_line(int64_t first, int64_t line) const {
    const int64_t at = line % kRowLines * 64;
    if (at < out_bytes) __builtin_prefetch(out + (first + line / kRowLines) * out_stride + at, 1, 3);
  }
};

}  // namespace pyquant::cpu

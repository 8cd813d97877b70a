// The engine below linear() and gemm(): rows in, blocks of weights, epilogue out, in one parallel region.
#pragma once
#include <cstdint>

#include "cpu/blocks.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"
#include "cpu/windows.h"

namespace pyquant::cpu {

// Where the activation codes come from.
struct RowSource {
  const void* x = nullptr;
  DType type = DType::f32;  // f32, f16, bf16: quantised here; s8, u8: codes
  int64_t ld = 0;
  const Windows* windows = nullptr;  // u8 codes that a convolution reads; x and ld then mean nothing
  // Floats.
  bool dynamic = false, symmetric = true;
  int32_t qmin = -127, qmax = 127;
  float recip = 1.f;  // static
  // Static floats (in s8 terms) and codes (in terms of their own type); per row when step is 1. Null: 0.
  const int32_t* zero_point = nullptr;
  int64_t zero_point_step = 0;
  // Scale that the epilogue multiplies last; ignored for dynamic rows, which bring their own. Null: none.
  const float* scale = nullptr;
  int64_t scale_step = 0;
  int64_t rows_each = 1;  // neighbouring rows that share an entry where a step is 1: the pixels of an image
};

// What the kernels read of one block of 64 channels; vectors are [groups][64], bias [64].
struct BlockView {
  const int8_t* codes_s8 = nullptr;  // one of the two
  const uint8_t* codes_s4 = nullptr;
  const int32_t* w_sum = nullptr;
  const float* w_scale = nullptr;
  const float* bias = nullptr;
};

struct Layer {
  int64_t m = 0, n = 0;
  Extent extent;
  RowSource rows;
  // Weights ready in blocks: strides in bytes or entries between blocks; or plain ones, packed on the way.
  BlockView first;
  int64_t block_bytes = 0;
  bool plain = false;
  PlainWeights plain_weights;
  const float* plain_scale = nullptr;  // [n] or [n, groups]; null: 1
  float plain_scale_factor = 1.f;      // static scale of the inputs, multiplied into each per-channel scale
  const float* plain_bias = nullptr;   // [n]; null: none
  Tile tile;                           // activation, residual and out of element (0, 0); the rest is filled in here
  int64_t plane = 0;  // above 0: out is [images][n][plane] of `plane` rows an image, and tile.ldo means nothing
};

// A layer that is packed, without its rows and results.
Layer packed_layer(const LinearSpec& spec, const void* packed);
void run(const Layer& layer);

// Layers of one K that have nothing to do with each other, in one parallel region: their blocks are dealt out by cost.
void run_all(const Layer* layers, int64_t count);

}  // namespace pyquant::cpu

// The weight layout blocked128: int4 codes in the order in which Hopper's wgmma and, its operands exchanged, mma.sync
// want them in registers, so that a kernel loads 16 bytes and spends three instructions on 8 codes
// (cuda/gemm/main90_w4.cuh, sm80_w4_blocked.cuh).
//
//   A matrix [n, k] is cut into blocks of 128 channels x 128 codes of 8192 contiguous bytes; blocks of a row of blocks
//   follow each other along k. Channels and codes beyond n and k are zero codes.
//
//   block  = 2 halves of 64 channels x 2 halves of 64 codes x 128 threads x 16 bytes
//   thread = 32 * (channel / 16 % 4) + 4 * (channel % 8) + k / 4 % 4
//   word   = k / 16 % 4 of the 4 words of a thread;  byte = k % 4 of a word
//   nibble = low for channels 0 .. 7 of each 16, high for 8 .. 15
//
// Thus the low nibbles of a word are one 32-bit register of the fragment of a 64 x 32 step and the high ones another.
//
// Of weights with steps (docs/numerics.md 4.1) every block has 256 bytes more, a step for 64 codes of a channel:
//
//   word = 32 * (channel / 64) + 8 * (channel / 16 % 4) + channel % 8;  byte = 2 * (k / 64 % 2) + channel / 8 % 2
//
// so that a word is what a thread needs of a block. Steps beyond n and k are anything: they meet zero codes.
#pragma once
#include <cstdint>

#include "core/arith.h"

namespace pyquant {

constexpr int32_t kBlocked128Side = 128;  // channels and codes of a block
constexpr int64_t kBlocked128BlockBytes = 8192;
constexpr int64_t kBlocked128StepBytes = 256;  // of a block's steps
constexpr int64_t kBlocked128StepCodes = 64;   // along k under a step

// n or k rounded up to whole blocks.
PYQ_HD constexpr int64_t blocked128_padded(int64_t size) {
  return (size + kBlocked128Side - 1) / kBlocked128Side * kBlocked128Side;
}

PYQ_HD constexpr int64_t blocked128_bytes(int64_t n, int64_t k, bool has_steps = false) {
  const int64_t bytes = kBlocked128BlockBytes + (has_steps ? kBlocked128StepBytes : 0);
  return blocked128_padded(n) / kBlocked128Side * (blocked128_padded(k) / kBlocked128Side) * bytes;
}

// Position of the code of channel n, depth k: byte, and whether it is the high nibble of it.
struct Blocked128Place {
  int64_t byte;
  bool high;
};

PYQ_HD constexpr Blocked128Place blocked128_place(int64_t n, int64_t k, int64_t depth) {
  const int64_t blocks = blocked128_padded(depth) / kBlocked128Side;
  const int64_t block = n / kBlocked128Side * blocks + k / kBlocked128Side;
  const int32_t channel = static_cast<int32_t>(n % kBlocked128Side), code = static_cast<int32_t>(k % kBlocked128Side);
  const int32_t half = channel / 64 * 2 + code / 64;
  const int32_t thread = channel / 16 % 4 * 32 + channel % 8 * 4 + code / 4 % 4;
  return {block * kBlocked128BlockBytes + half * 2048 + thread * 16 + code / 16 % 4 * 4 + code % 4,
          channel / 8 % 2 != 0};
}

// Which channel and depth the low nibble of a byte holds; the high nibble holds channel + 8.
struct Blocked128Code {
  int64_t n, k;
};

// byte: of the blocks of 128 channels, the row'th such.
PYQ_HD constexpr Blocked128Code blocked128_code_of_row(int64_t row, int64_t byte) {
  const int32_t at = static_cast<int32_t>(byte % kBlocked128BlockBytes);
  const int32_t half = at / 2048, thread = at / 16 % 128;
  const int32_t channel = half / 2 * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int32_t code = half % 2 * 64 + at / 4 % 4 * 16 + thread % 4 * 4 + at % 4;
  return {row * kBlocked128Side + channel, byte / kBlocked128BlockBytes * kBlocked128Side + code};
}

// Nibble k of a row of natural codes (two per byte, low nibble = even k).
PYQ_HD inline uint32_t natural_nibble(const uint8_t* row, int64_t k) { return (row[k / 2] >> (4 * (k & 1))) & 15u; }

// The byte of the blocked matrix that holds these codes, from natural codes at a row stride of ldw nibbles.
PYQ_HD inline uint8_t blocked128_byte(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, const Blocked128Code& at) {
  const auto code = [&](int64_t channel) {
    return channel < n && at.k < k ? natural_nibble(w + channel * (ldw / 2), at.k) : 0u;
  };
  return static_cast<uint8_t>(code(at.n) | code(at.n + 8) << 4);
}

// Byte `byte` of channel `channel` in natural order, from the blocked matrix; the nibble after an odd k is 0.
PYQ_HD inline uint8_t natural_byte(const uint8_t* blocked, int64_t k, int64_t channel, int64_t byte) {
  const auto code = [&](int64_t depth) -> uint32_t {
    if (depth >= k) return 0u;
    const Blocked128Place place = blocked128_place(channel, depth, k);
    return (blocked[place.byte] >> (place.high ? 4 : 0)) & 15u;
  };
  return static_cast<uint8_t>(code(2 * byte) | code(2 * byte + 1) << 4);
}

// w: [n, ldw / 2] bytes, blocked: blocked128_bytes(n, k) bytes. On the host; on the device: cuda/cuda.h.
inline void pack_blocked128(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, uint8_t* blocked) {
  const int64_t rows = blocked128_padded(n) / kBlocked128Side, bytes = blocked128_bytes(kBlocked128Side, k);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < bytes; ++i)
      blocked[row * bytes + i] = blocked128_byte(w, n, k, ldw, blocked128_code_of_row(row, i));
  }
}

// Writes the first (k + 1) / 2 bytes of every row of w.
inline void unpack_blocked128(const uint8_t* blocked, int64_t n, int64_t k, int64_t ldw, uint8_t* w) {
  for (int64_t channel = 0; channel < n; ++channel) {
    for (int64_t i = 0; i < (k + 1) / 2; ++i) w[channel * (ldw / 2) + i] = natural_byte(blocked, k, channel, i);
  }
}

}  // namespace pyquant

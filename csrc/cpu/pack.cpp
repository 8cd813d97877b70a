// int4 codes two a byte, and sums of codes.
#include "cpu/cpu.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 18;  // codes worth a task

int8_t nibble(int v) { return static_cast<int8_t>(((v & 15) ^ 8) - 8); }

template <class Function>
void each_row(int64_t rows, int64_t cols, Function function) {
  Shares(rows, rows * cols, kGrain).run([&](Share share) {
    for (int64_t r = share.begin; r < share.end; ++r) function(r);
  });
}

}  // namespace

void pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed) {
  each_row(rows, cols, [=](int64_t r) {
    const int8_t* from = q + r * cols;
    uint8_t* to = packed + r * ((cols + 1) / 2);
    for (int64_t i = 0; i < cols / 2; ++i)
      to[i] = static_cast<uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
    if (cols % 2) to[cols / 2] = static_cast<uint8_t>(from[cols - 1] & 15);
  });
}

void unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q) {
  each_row(rows, cols, [=](int64_t r) {
    const uint8_t* from = packed + r * ((cols + 1) / 2);
    int8_t* to = q + r * cols;
    for (int64_t i = 0; i < cols / 2; ++i) {
      to[2 * i] = nibble(from[i]);
      to[2 * i + 1] = nibble(from[i] >> 4);
    }
    if (cols % 2) to[cols - 1] = nibble(from[cols / 2]);
  });
}

void weight_sums(const void* w, DType w_type, int64_t n, int64_t k, int64_t ldw, int64_t group_size, int32_t* sums) {
  const int64_t group = group_size > 0 ? group_size : k, groups = group_size > 0 ? k / group_size : 1;
  each_row(n, k, [=](int64_t r) {
    const auto* bytes = static_cast<const uint8_t*>(w) + r * columns_of(w_type, ldw);
    for (int64_t g = 0; g < groups; ++g) {
      int32_t sum = 0;
      for (int64_t i = g * group; i < (g + 1) * group; ++i)
        sum += is_packed(w_type) ? nibble(i % 2 ? bytes[i / 2] >> 4 : bytes[i / 2]) : static_cast<int8_t>(bytes[i]);
      sums[r * groups + g] = sum;
    }
  });
}

}  // namespace pyquant::cpu

// Matrices of 1, 2 or 4 bytes an element, transposed in registers: 16 x 16, 8 x 8 or 4 x 4 at a time.
#pragma once
#include <cstdint>
#include <cstring>

namespace pyquant::cpu {

template <class T>
struct Square;  // N elements of 16 bytes, and the two halves of a perfect shuffle of two such vectors

template <>
struct Square<uint8_t> {
  static constexpr int N = 16;
  typedef uint8_t V __attribute__((vector_size(16)));
  static V low(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static V high(V a, V b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};

template <>
struct Square<uint16_t> {
  static constexpr int N = 8;
  typedef uint16_t V __attribute__((vector_size(16)));
  static V low(V a, V b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
  static V high(V a, V b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
};

template <>
struct Square<uint32_t> {
  static constexpr int N = 4;
  typedef uint32_t V __attribute__((vector_size(16)));
  static V low(V a, V b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  static V high(V a, V b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};

// After log2(N) rounds of shuffling row i with row i + N / 2, row i is column i.
template <class T>
inline void transpose_square(const T* from, int64_t ld, T* to, int64_t ldt) {
  using S = Square<T>;
  constexpr int N = S::N;
  typename S::V a[N], b[N];
  for (int i = 0; i < N; ++i) std::memcpy(&a[i], from + i * ld, 16);
  for (int round = 1; round < N; round *= 2) {
    for (int i = 0; i < N / 2; ++i) {
      b[2 * i] = S::low(a[i], a[i + N / 2]);
      b[2 * i + 1] = S::high(a[i], a[i + N / 2]);
    }
    for (int i = 0; i < N; ++i) a[i] = b[i];
  }
  for (int i = 0; i < N; ++i) std::memcpy(to + i * ldt, &a[i], 16);
}

// Up to four rows of bytes, the channels of a picture, which lie side by side in `to`: a pixel is written as four
// bytes, of which the next one overwrites what is too many. -> columns that are done.
inline int64_t transpose_few(const uint8_t* from, int64_t ld, int64_t rows, int64_t columns, uint8_t* to) {
  using S = Square<uint8_t>;
  using Pairs = Square<uint16_t>;
  int64_t c = 0;
  for (; c + S::N + 4 <= columns; c += S::N) {
    S::V a[4] = {};
    for (int64_t r = 0; r < rows; ++r) std::memcpy(&a[r], from + r * ld + c, 16);
    const S::V pairs[4] = {S::low(a[0], a[1]), S::high(a[0], a[1]), S::low(a[2], a[3]), S::high(a[2], a[3])};
    Pairs::V p[4];
    std::memcpy(p, pairs, sizeof p);
    const Pairs::V pixels[4] = {Pairs::low(p[0], p[2]), Pairs::high(p[0], p[2]), Pairs::low(p[1], p[3]),
                                Pairs::high(p[1], p[3])};
    uint8_t four[64];
    std::memcpy(four, pixels, 64);
    for (int64_t i = 0; i < S::N; ++i) std::memcpy(to + (c + i) * rows, four + 4 * i, 4);
  }
  return c;
}

// to[column][row] = from[row][column].
template <class T>
inline void transpose(const T* from, int64_t ld, int64_t rows, int64_t columns, T* to, int64_t ldt) {
  constexpr int64_t N = Square<T>::N;
  if constexpr (sizeof(T) == 1) {
    if (rows > 0 && rows <= 4 && ldt == rows) {
      const int64_t done = transpose_few(from, ld, rows, columns, to);
      for (int64_t c = done; c < columns; ++c)
        for (int64_t r = 0; r < rows; ++r) to[c * ldt + r] = from[r * ld + c];
      return;
    }
  }
  const int64_t whole_rows = rows / N * N, whole_columns = columns / N * N;
  for (int64_t c = 0; c < whole_columns; c += N)
    for (int64_t r = 0; r < whole_rows; r += N) transpose_square(from + r * ld + c, ld, to + c * ldt + r, ldt);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = c < whole_columns ? whole_rows : 0; r < rows; ++r) to[c * ldt + r] = from[r * ld + c];
}

}  // namespace pyquant::cpu

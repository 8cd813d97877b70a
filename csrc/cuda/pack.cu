// int4 codes two per byte (low nibble = even column), the layout blocked128, and the sums of weight codes that a zero
// point needs.
#include <algorithm>

#include "core/blocked128.h"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kLanes = 32, kRows = 8, kBlock = kLanes * kRows;
constexpr int64_t kMostRows = 1 << 20, kMostColumns = 1 << 15;  // blocks

// use(row, column) for a matrix's items: blockIdx.x and threadIdx.y walk rows, blockIdx.y and threadIdx.x columns, so
// that nobody divides. A warp has a row.
template <class Use>
__device__ __forceinline__ void walk(int64_t rows, int64_t columns, Use use) {
#pragma unroll 1
  for (int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.y; row < rows; row += int64_t{kRows} * gridDim.x) {
#pragma unroll 1
    for (int64_t c = blockIdx.y * int64_t{kLanes} + threadIdx.x; c < columns; c += int64_t{kLanes} * gridDim.y)
      use(row, c);
  }
}

LaunchShape cover(int64_t rows, int64_t columns) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min((rows + kRows - 1) / kRows, kMostRows)),
                    static_cast<unsigned>(std::min((columns + kLanes - 1) / kLanes, kMostColumns)));
  shape.block = dim3(kLanes, kRows);
  return shape;
}

__global__ void __launch_bounds__(kBlock)
    pack_int4_kernel(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed) {
  const int64_t bytes = (cols + 1) / 2;
  walk(rows, bytes, [&](int64_t row, int64_t byte) {
    const int8_t* from = q + row * cols + 2 * byte;
    const uint32_t low = static_cast<uint32_t>(from[0]) & 15u;
    const uint32_t high = 2 * byte + 1 < cols ? static_cast<uint32_t>(from[1]) & 15u : 0u;
    packed[row * bytes + byte] = static_cast<uint8_t>(low | high << 4);
  });
}

__device__ __forceinline__ int32_t nibble_code(const uint8_t* row, int64_t c) {
  const int32_t nibble = (row[c / 2] >> (4 * (c & 1))) & 15;
  return (nibble ^ 8) - 8;
}

__global__ void __launch_bounds__(kBlock)
    unpack_int4_kernel(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q) {
  const int64_t bytes = (cols + 1) / 2;
  walk(rows, cols,
       [&](int64_t row, int64_t c) { q[row * cols + c] = static_cast<int8_t>(nibble_code(packed + row * bytes, c)); });
}

// One warp a sum, blockIdx.y walks a row's groups. Wraps like the accumulator; a weight row within the K bound fits.
__global__ void __launch_bounds__(kBlock)
    weight_sums_kernel(const uint8_t* w, bool packed, int64_t rows, int64_t groups, int64_t group, int64_t row_bytes,
                       int32_t* sums) {
  const int64_t n = blockIdx.x * int64_t{kRows} + threadIdx.y;
  if (n >= rows) return;
  const uint8_t* row = w + n * row_bytes;
#pragma unroll 1
  for (int64_t g = blockIdx.y; g < groups; g += gridDim.y) {
    const int64_t begin = g * group;
    int32_t sum = 0;
    for (int64_t c = begin + threadIdx.x; c < begin + group; c += kLanes)
      sum += packed ? nibble_code(row, c) : static_cast<int32_t>(static_cast<int8_t>(row[c]));
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x == 0) sums[n * groups + g] = sum;
  }
}

// One thread a word of a row of blocks: runs of 4 codes of two channels.
__global__ void __launch_bounds__(kBlock)
    pack_blocked128_kernel(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, uint32_t* blocked) {
  const int64_t words = blocked128_bytes(kBlocked128Side, k) / 4;
  walk(blocked128_padded(n) / kBlocked128Side, words, [&](int64_t row, int64_t i) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b)
      word |= static_cast<uint32_t>(blocked128_byte(w, n, k, ldw, blocked128_code_of_row(row, 4 * i + b))) << (8 * b);
    blocked[row * words + i] = word;
  });
}

__global__ void __launch_bounds__(kBlock)
    unpack_blocked128_kernel(const uint8_t* blocked, int64_t n, int64_t k, int64_t ldw, uint8_t* w) {
  walk(n, (k + 1) / 2,
       [&](int64_t row, int64_t byte) { w[row * (ldw / 2) + byte] = natural_byte(blocked, k, row, byte); });
}

}  // namespace

void pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed, const Context& context) {
  if (rows == 0 || cols == 0) return;
  launch<pack_int4_kernel>("pack_int4", cover(rows, (cols + 1) / 2), context, q, rows, cols, packed);
}

void unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q, const Context& context) {
  if (rows == 0 || cols == 0) return;
  launch<unpack_int4_kernel>("unpack_int4", cover(rows, cols), context, packed, rows, cols, q);
}

void pack_blocked128(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, uint8_t* blocked, const Context& context) {
  if (n == 0 || k == 0) return;
  const LaunchShape shape = cover(blocked128_padded(n) / kBlocked128Side, blocked128_bytes(kBlocked128Side, k) / 4);
  launch<pack_blocked128_kernel>("pack_blocked128", shape, context, w, n, k, ldw, reinterpret_cast<uint32_t*>(blocked));
}

void unpack_blocked128(const uint8_t* blocked, int64_t n, int64_t k, int64_t ldw, uint8_t* w, const Context& context) {
  if (n == 0 || k == 0) return;
  launch<unpack_blocked128_kernel>("unpack_blocked128", cover(n, (k + 1) / 2), context, blocked, n, k, ldw, w);
}

void weight_sums(const void* w, DType w_type, int64_t n, int64_t k, int64_t ldw, int64_t group_size, int32_t* sums,
                 const Context& context) {
  const int64_t groups = group_size ? k / group_size : 1, group = group_size ? group_size : k;
  if (n == 0 || groups == 0) return;
  LaunchShape shape;
  shape.grid =
      dim3(static_cast<unsigned>((n + kRows - 1) / kRows), static_cast<unsigned>(std::min(groups, kMostColumns)));
  shape.block = dim3(kLanes, kRows);
  launch<weight_sums_kernel>("weight_sums", shape, context, static_cast<const uint8_t*>(w), is_packed(w_type), n,
                             groups, group, columns_of(w_type, ldw), sums);
}

}  // namespace pyquant::cuda

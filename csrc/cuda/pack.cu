// int4 codes two per byte (low nibble = even column), the layout blocked128, and the sums of weight codes that a zero
// point needs.
#include "core/blocked128.h"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kBlock = 256;

__global__ void __launch_bounds__(kBlock)
    pack_int4_kernel(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed) {
  const int64_t bytes = (cols + 1) / 2;
  for (int64_t i = blockIdx.x * int64_t{kBlock} + threadIdx.x; i < rows * bytes; i += int64_t{kBlock} * gridDim.x) {
    const int64_t row = i / bytes, c = 2 * (i % bytes);
    const uint32_t low = static_cast<uint32_t>(q[row * cols + c]) & 15u;
    const uint32_t high = c + 1 < cols ? static_cast<uint32_t>(q[row * cols + c + 1]) & 15u : 0u;
    packed[i] = static_cast<uint8_t>(low | high << 4);
  }
}

__device__ __forceinline__ int32_t nibble_code(const uint8_t* row, int64_t c) {
  const int32_t nibble = (row[c / 2] >> (4 * (c & 1))) & 15;
  return (nibble ^ 8) - 8;
}

__global__ void __launch_bounds__(kBlock)
    unpack_int4_kernel(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q) {
  const int64_t bytes = (cols + 1) / 2;
  for (int64_t i = blockIdx.x * int64_t{kBlock} + threadIdx.x; i < rows * cols; i += int64_t{kBlock} * gridDim.x)
    q[i] = static_cast<int8_t>(nibble_code(packed + i / cols * bytes, i % cols));
}

// One warp a sum. Wraps like the accumulator; a weight row within the K bound fits.
__global__ void __launch_bounds__(kBlock)
    weight_sums_kernel(const uint8_t* w, bool packed, int64_t sums_count, int64_t groups, int64_t group,
                       int64_t row_bytes, int32_t* sums) {
  const int64_t warp = (blockIdx.x * int64_t{kBlock} + threadIdx.x) / 32;
  if (warp >= sums_count) return;
  const uint8_t* row = w + warp / groups * row_bytes;
  const int64_t begin = warp % groups * group;
  int32_t sum = 0;
  for (int64_t c = begin + threadIdx.x % 32; c < begin + group; c += 32)
    sum += packed ? nibble_code(row, c) : static_cast<int32_t>(static_cast<int8_t>(row[c]));
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
}

// One thread a word of the blocked matrix: runs of 4 codes of two channels.
__global__ void __launch_bounds__(kBlock)
    pack_blocked128_kernel(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, int64_t words, uint32_t* blocked) {
  for (int64_t i = blockIdx.x * int64_t{kBlock} + threadIdx.x; i < words; i += int64_t{kBlock} * gridDim.x) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) word |= static_cast<uint32_t>(blocked128_byte(w, n, k, ldw, 4 * i + b)) << (8 * b);
    blocked[i] = word;
  }
}

__global__ void __launch_bounds__(kBlock)
    unpack_blocked128_kernel(const uint8_t* blocked, int64_t n, int64_t k, int64_t ldw, uint8_t* w) {
  const int64_t bytes = (k + 1) / 2;
  for (int64_t i = blockIdx.x * int64_t{kBlock} + threadIdx.x; i < n * bytes; i += int64_t{kBlock} * gridDim.x)
    w[i / bytes * (ldw / 2) + i % bytes] = natural_byte(blocked, k, i / bytes, i % bytes);
}

LaunchShape cover(int64_t items) {
  const int64_t blocks = (items + kBlock - 1) / kBlock;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks < (int64_t{1} << 20) ? blocks : int64_t{1} << 20));
  shape.block = dim3(kBlock);
  return shape;
}

}  // namespace

void pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed, const Context& context) {
  if (rows == 0 || cols == 0) return;
  launch<pack_int4_kernel>("pack_int4", cover(rows * ((cols + 1) / 2)), context, q, rows, cols, packed);
}

void unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q, const Context& context) {
  if (rows == 0 || cols == 0) return;
  launch<unpack_int4_kernel>("unpack_int4", cover(rows * cols), context, packed, rows, cols, q);
}

void pack_blocked128(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, uint8_t* blocked, const Context& context) {
  const int64_t words = blocked128_bytes(n, k) / 4;
  if (words == 0) return;
  launch<pack_blocked128_kernel>("pack_blocked128", cover(words), context, w, n, k, ldw, words,
                                 reinterpret_cast<uint32_t*>(blocked));
}

void unpack_blocked128(const uint8_t* blocked, int64_t n, int64_t k, int64_t ldw, uint8_t* w, const Context& context) {
  if (n == 0 || k == 0) return;
  launch<unpack_blocked128_kernel>("unpack_blocked128", cover(n * ((k + 1) / 2)), context, blocked, n, k, ldw, w);
}

void weight_sums(const void* w, DType w_type, int64_t n, int64_t k, int64_t ldw, int64_t group_size, int32_t* sums,
                 const Context& context) {
  const int64_t groups = group_size ? k / group_size : 1, group = group_size ? group_size : k;
  const int64_t count = n * groups;
  if (count == 0) return;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((count + kBlock / 32 - 1) / (kBlock / 32)));
  shape.block = dim3(kBlock);
  launch<weight_sums_kernel>("weight_sums", shape, context, static_cast<const uint8_t*>(w), is_packed(w_type), count,
                             groups, group, columns_of(w_type, ldw), sums);
}

}  // namespace pyquant::cuda

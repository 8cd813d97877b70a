// What the machine can do, for benchmarks: the products and the bytes a second that layers are held to.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace pyquant::cpu {

namespace {

// Bytes of both signs and all sizes: chips clock down on them, and zeros would flatter the peak. They repeat after 256,
// so that the copies of the first ones cost next to nothing compared with the timed products.
void fill(void* target, size_t count, size_t step) {
  constexpr size_t kPeriod = 256;
  auto* bytes = static_cast<uint8_t*>(target);
  for (size_t i = 0; i < std::min(count, kPeriod); ++i) bytes[i] = static_cast<uint8_t>(i * step);
  for (size_t i = kPeriod; i < count; i += kPeriod) std::memcpy(bytes + i, bytes, std::min(kPeriod, count - i));
}

}  // namespace

int64_t multiply_in_cache(int64_t rows, int64_t quads, int64_t calls) {
  const Kernels& in_use = kernels();
  const auto shares = Shares::of_one_unit(thread_count());
  shares.run([&](Share) {
    const int64_t k = quads * 4, lda = k + 64;  // rows a multiple of 4 KiB apart would share sets of the cache
    auto& scratch = Scratch::of_this_thread();
    const auto a_bytes = static_cast<size_t>((rows + kRowSlack) * lda), b_bytes = static_cast<size_t>(k * kBlockN);
    scratch.reset(Scratch::rounded(a_bytes) + Scratch::rounded(b_bytes) + Scratch::rounded(kMaxRowBlock * kBlockN * 4));
    auto* a = scratch.take<uint8_t>(a_bytes);
    auto* b = scratch.take<int8_t>(b_bytes);
    auto* acc = scratch.take<int32_t>(kMaxRowBlock * kBlockN);
    fill(a, a_bytes, 37);
    fill(b, b_bytes, 91);
    in_use.begin(rows);
    for (int64_t c = 0; c < calls; ++c) in_use.gemm_s8(a, lda, rows, b, quads, acc, false, {});
    in_use.end(rows);
  });
  return shares.count() * calls * rows * quads * 4 * kBlockN;
}

float read_all(const float* x, int64_t count, int64_t times) {
  constexpr int64_t kPiece = 4096, kGrain = 1 << 15;  // a page of floats; floats worth a thread
  const Kernels& in_use = kernels();
  const Shares shares((count + kPiece - 1) / kPiece, count, kGrain);
  std::vector<float> most(static_cast<size_t>(shares.count()), 0.f);
  shares.run([&](Share s) {
    const int64_t begin = s.begin * kPiece, end = std::min(s.end * kPiece, count);
    for (int64_t i = 0; i < times; ++i)
      most[static_cast<size_t>(s.index)] = in_use.stats(x + begin, DType::f32, end - begin, false).amax;
  });
  return *std::max_element(most.begin(), most.end());
}

}  // namespace pyquant::cpu

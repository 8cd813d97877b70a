// A number that tells whether memory has changed since it was computed last.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/threads.h"

namespace pyquant::cpu {

namespace {

constexpr int64_t kWords = 1024, kLanes = 16;  // of 32 bits: of a block; that are added up side by side
constexpr int64_t kBlock = 4 * kWords, kChunk = 16 * kBlock;

// For either argument a bijection of the other.
constexpr uint64_t mixed(uint64_t into, uint64_t word) {
  const uint64_t v = into ^ word;
  return (v << 29 | v >> 35) * 0x9e3779b97f4a7c15u + 0x165667b19e3779f9u;
}

// A factor for each place, odd, so that a word that changes changes the sum of products, and words that change together
// (signs, exponents, what trades places) do not make up for each other.
constexpr std::array<uint32_t, kWords> kFactors = [] {
  std::array<uint32_t, kWords> factors{};
  uint64_t state = 0;
  for (uint32_t& factor : factors) {
    state = mixed(state, 0x5851f42d4c957f2du);
    factor = static_cast<uint32_t>(state >> 32) | 1u;
  }
  return factors;
}();

// The products of 32 bits are vectors' business, for each kind of processor that has them. (g++ knows these levels from
// 12 on; what other compilers make of the default is the same number. The loader asks which kind it is before a thread
// sanitizer can watch.)
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
uint64_t of_block(const unsigned char* bytes) {
  uint64_t sums[kLanes] = {};
  for (int64_t at = 0; at < kWords; at += kLanes) {
    __builtin_prefetch(bytes + 4 * at + kBlock);  // the machine's own prefetchers stop at every page
    uint32_t words[kLanes];
    std::memcpy(words, bytes + 4 * at, sizeof words);
    for (int64_t i = 0; i < kLanes; ++i) sums[i] += uint64_t{words[i]} * kFactors[static_cast<size_t>(at + i)];
  }
  uint64_t all = 0;
  for (const uint64_t sum : sums) all += sum;
  return all;
}

uint64_t of_chunk(const unsigned char* bytes, int64_t count) {
  uint64_t all = static_cast<uint64_t>(count);
  int64_t at = 0;
  for (; at + kBlock <= count; at += kBlock) all = mixed(all, of_block(bytes + at));
  if (at == count) return all;
  unsigned char rest[kBlock] = {};
  std::memcpy(rest, bytes + at, static_cast<size_t>(count - at));
  return mixed(all, of_block(rest));
}

}  // namespace

int64_t fingerprint(const void* data, int64_t bytes) {
  constexpr int64_t kGrain = 1 << 19;  // bytes worth a thread
  const int64_t chunks = (bytes + kChunk - 1) / kChunk;
  const Shares shares(chunks, bytes, kGrain);
  std::vector<uint64_t> of(static_cast<size_t>(chunks));
  shares.run([&](Share s) {
    for (int64_t c = s.begin; c < s.end; ++c)
      of[static_cast<size_t>(c)] =
          of_chunk(static_cast<const unsigned char*>(data) + c * kChunk, std::min(kChunk, bytes - c * kChunk));
  });
  uint64_t all = 0;
  for (const uint64_t one : of) all = mixed(all, one);
  int64_t told;
  std::memcpy(&told, &all, sizeof told);
  return told;
}

}  // namespace pyquant::cpu

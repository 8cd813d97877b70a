// Products of pairs of bfloat16 against plain sums of small whole numbers, which are exact in any order: ends of
// channels, of groups and of the block among them.
#include <vector>

#include "core/arith.h"
#include "cpu/self_test.h"

namespace pyquant::cpu {
namespace {

// Rows of bfloat16 times codes less their zero points, under a scale for each group.
struct PairProblem {
  static constexpr int64_t kRows = 13, kMostColumns = 138, kGroup = 32, kGroups = 3, kChannels = 21;
  std::vector<uint16_t> x = std::vector<uint16_t>(kRows * kMostColumns);
  std::vector<uint8_t> w = std::vector<uint8_t>(kChannels * kMostColumns);
  std::vector<float> scale = std::vector<float>(kChannels * kGroups);
  std::vector<int32_t> zero = std::vector<int32_t>(kChannels * kGroups);
  DType type;
  int64_t group_size, columns;

  // Small whole numbers, whose sums are exact in any order.
  PairProblem(DType weights, int64_t group, Random& random)
      : type(weights), group_size(group), columns(group ? kGroup * kGroups : kMostColumns) {
    const auto small = [&] { return static_cast<int32_t>(random.next() % 15) - 7; };
    for (auto& v : x) v = static_cast<uint16_t>(bits_from_float(static_cast<float>(small())) >> 16);
    for (auto& v : w) v = static_cast<uint8_t>(random.next());
    for (auto& v : scale) v = static_cast<float>(small());
    for (auto& v : zero) v = small();
  }

  int64_t row_bytes() const { return columns_of(type, columns); }
  int64_t groups() const { return group_size ? kGroups : 1; }
  float want(int64_t row, int64_t channel) const {
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const uint8_t byte = w[static_cast<size_t>(channel * row_bytes() + (type == DType::s8 ? i : i / 2))];
      const auto nibble = static_cast<int8_t>((i % 2 ? byte : byte << 4) & 0xf0);
      const auto at = static_cast<size_t>(channel * groups() + (group_size ? i / group_size : 0));
      const int code = (type == DType::s8 ? static_cast<int8_t>(byte) : nibble / 16) - zero[at];
      const float value = float_from_bits(uint32_t{x[static_cast<size_t>(row * columns + i)]} << 16);
      sum += value * static_cast<float>(code) * scale[at];
    }
    return sum;
  }
};

bool multiplies_few_pairs(const Kernels& candidate, const PairProblem& p) {
  constexpr int64_t kPadded = 256, kFew = 7;
  std::vector<uint16_t> ordered(kFew * kPadded);
  std::vector<float> out(kFew * kBlockN);
  for (int64_t r = 0; r < kFew; ++r)
    candidate.order_pairs(p.type, p.x.data() + r * p.columns, p.columns, ordered.data() + r * kPadded);
  WeightRun run;
  run.w = p.w.data();
  run.type = p.type;
  run.ldw = p.row_bytes();
  run.channels = p.kChannels;
  run.k = p.columns;
  run.group_size = p.group_size;
  run.scale = p.scale.data();
  run.zero_point = p.zero.data();
  run.ld_scale = p.groups();
  for (int64_t rows : {int64_t{1}, kFew}) {
    candidate.few_pairs(run, ordered.data(), rows, kPadded, out.data(), kBlockN);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < p.kChannels; ++c)
        if (out[static_cast<size_t>(r * kBlockN + c)] != p.want(r, c)) return false;
  }
  return true;
}

bool multiplies_many_pairs(const Kernels& candidate, const PairProblem& p) {
  std::vector<uint32_t> pairs((p.columns / 2 + 4) * kBlockN);
  std::vector<float> zeros(p.kGroups * kBlockN), scale(p.kGroups * kBlockN), sum(p.kRows * kBlockN);
  for (int64_t g = 0; g < p.groups(); ++g)
    for (int64_t c = 0; c < p.kChannels; ++c) {
      const auto from = static_cast<size_t>(c * p.groups() + g), to = static_cast<size_t>(g * kBlockN + c);
      zeros[to] = static_cast<float>(p.zero[from]);
      scale[to] = p.scale[from];
    }
  const int64_t group = p.group_size ? p.group_size : p.columns + 2;
  candidate.pair_codes(
      {p.w.data(), p.type, p.row_bytes(), p.kChannels, 0, p.columns, zeros.data(), group, pairs.data()});
  for (int64_t at = 0, g = 0; at < p.columns; at += group, ++g) {
    const int64_t count = (p.columns - at < group ? p.columns - at : group) / 2;
    candidate.pair_products(p.x.data() + at, p.kRows, p.columns, pairs.data() + at / 2 * kBlockN, count,
                            scale.data() + g * kBlockN, sum.data(), at > 0);
  }
  for (int64_t r = 0; r < p.kRows; ++r)
    for (int64_t c = 0; c < p.kChannels; ++c)
      if (sum[static_cast<size_t>(r * kBlockN + c)] != p.want(r, c)) return false;
  return true;
}

}  // namespace

bool multiplies_pairs(const Kernels& candidate, Random& random) {
  if (!candidate.pair_products) return true;
  for (DType type : {DType::s8, DType::s4})
    for (int64_t group : {int64_t{0}, PairProblem::kGroup}) {
      const PairProblem problem(type, group, random);
      if (!multiplies_many_pairs(candidate, problem)) return false;
      if ((group == 0 || type == DType::s4) && !multiplies_few_pairs(candidate, problem)) return false;
    }
  return true;
}

}  // namespace pyquant::cpu

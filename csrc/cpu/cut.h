// Layers that have nothing to do with each other, in one parallel region: their blocks are dealt out by cost.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/threads.h"

namespace pyquant::cpu {

struct Range {
  int64_t begin, end;
};

inline Range part(int64_t total, int64_t parts, int64_t index) {
  return {total * index / parts, total * (index + 1) / parts};
}

// What one layer is cut into: so many blocks of channels, each of which costs so many products along K.
struct Blocks {
  int64_t count, cost;
};

// Block b of layer l is a unit, in order, and a share ends where its part of the cost does, so that all but a few
// layers are whole.
class Cut {
 public:
  explicit Cut(std::vector<Blocks> layers) : layers_(std::move(layers)) {
    for (const Blocks& one : layers_) {
      total_ += one.count * one.cost;
      if (one.cost > 0) units_ += one.count;
    }
  }

  int64_t total() const { return total_; }

  // body(layer, its blocks) for every piece, on all threads; on this one alone where that would cost more.
  template <class Function>
  void run(bool is_small, Function&& body) const {
    const int64_t shares = is_small ? 1 : std::clamp<int64_t>(thread_count(), 1, std::max<int64_t>(units_, 1));
    Shares::of_one_unit(shares).run([&](Share share) { each(part(total_, shares, share.index), body); });
  }

 private:
  template <class Function>
  void each(Range wanted, Function&& body) const {
    int64_t at = 0;
    for (size_t l = 0; l < layers_.size() && at < wanted.end; ++l) {
      const auto [count, cost] = layers_[l];
      if (cost == 0 || count == 0) continue;
      // a unit belongs to the share in which it begins
      const Range mine = {first_from(wanted.begin - at, cost, count), first_from(wanted.end - at, cost, count)};
      if (mine.begin < mine.end) body(l, mine);
      at += cost * count;
    }
  }

  // The first of the blocks that begins at `from` or later.
  static int64_t first_from(int64_t from, int64_t cost, int64_t blocks) {
    return std::clamp<int64_t>(from <= 0 ? 0 : (from + cost - 1) / cost, 0, blocks);
  }

  std::vector<Blocks> layers_;
  int64_t total_ = 0, units_ = 0;
};

}  // namespace pyquant::cpu

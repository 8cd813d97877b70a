// The experts of a mixture in one launch: rows of x sorted by expert, each multiplied by its expert's weights. How many
// rows an expert has is known on the device alone: a block finds the expert of its tile in the ends of their rows.
//   partition: as many tiles of rows as any distribution can make (plan/expert_tiles.h), times the tiles of channels,
//   those of one tile of rows next to one another; blocks beyond the last tile end at once. The rows of no expert are a
//   last expert whose blocks write zeros. More experts than the table holds are shared out to launches.
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/expert_table.h"
#include "cuda/launch.h"
#include "plan/expert_tiles.h"

namespace pyquant::cuda {

// Passed by value to kernels, as a grid constant.
struct Experts : ExpertTable {
  int32_t rows;  // of all
  int32_t tiles_n;
};

struct ExpertTile {
  int32_t expert;      // counted from ExpertTable::first; ExpertTable::count: no expert's
  int32_t begin, end;  // rows from the tile's first to the expert's last
};

// An expert that has rows, and a number among its tiles.
struct ExpertShare {
  int32_t expert, begin, end;  // as above, of all its rows
  int32_t tiles, number;       // of rows; counted from the expert's first
};

// Where a search ended: one for a larger number goes on from there.
struct ExpertSearch {
  int32_t base = 0, before = 0;  // experts, and their tiles
};

// Whether there is a tile of that number, where every tile of rows is `each` tiles; every lane of a warp asks for the
// same one. Ends that descend or lie beyond the rows never lead out of the matrices.
template <int kTileM, class Ends>
__device__ __forceinline__ bool find_expert(const Ends& experts, int32_t number, int32_t each, ExpertSearch& search,
                                            ExpertShare& share) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, all = experts.count + (experts.rest ? 1 : 0);
  const auto end_of = [&](int32_t e) { return e < 0 ? 0 : min(max(__ldg(experts.ends + e), 0), experts.rows); };
  for (; search.base < all; search.base += 32) {
    const int32_t e = search.base + lane;
    const int32_t begin = e < all ? end_of(experts.first + e - 1) : 0;
    const int32_t end = e >= all ? 0 : e < experts.count ? end_of(experts.first + e) : experts.rows;
    const int32_t tiles = end > begin ? (end - begin - 1) / kTileM + 1 : 0, own = tiles * each;
    int32_t until = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, until, step);
      if (lane >= step) until += other;
    }
    const uint32_t beyond = __ballot_sync(0xffffffffu, search.before + until > number);
    if (beyond != 0) {
      const int owner = __ffs(static_cast<int>(beyond)) - 1;
      share.expert = search.base + owner;
      share.begin = __shfl_sync(0xffffffffu, begin, owner);
      share.end = __shfl_sync(0xffffffffu, end, owner);
      share.tiles = __shfl_sync(0xffffffffu, tiles, owner);
      share.number = number - search.before - __shfl_sync(0xffffffffu, until - own, owner);
      return true;
    }
    search.before += __shfl_sync(0xffffffffu, until, 31);
  }
  return false;
}

template <int kTileM>
__device__ __forceinline__ bool find_expert_tile(const Experts& experts, int32_t number, ExpertTile& tile) {
  ExpertSearch search;
  ExpertShare share;
  if (!find_expert<kTileM>(experts, number, 1, search, share)) return false;
  tile = {share.expert, share.begin + share.number * kTileM, share.end};
  return true;
}

// The epilogue's operands for one tile of an expert: its channels', its inputs' where all its tokens share them, and no
// row beyond its last.
__device__ __forceinline__ void take_expert(EpilogueParams& p, int64_t shift, int32_t end) {
  p.w_scale = shifted(p.w_scale, shift);
  p.w_sum = shifted(p.w_sum, shift);
  p.bias = shifted(p.bias, shift);
  if (p.x_scale_step == 0) p.x_scale = shifted(p.x_scale, shift);
  if (p.x_zero_point_step == 0) p.x_zero_point = shifted(p.x_zero_point, shift);
  p.m = end;
  if (shift % 8 != 0) p.plain = p.plain90 = PlainOut::none;  // which read scales by twos
}
__device__ __forceinline__ void take_expert(EpilogueParams& p, const Experts& experts, const ExpertTile& tile) {
  take_expert(p, experts.shift[tile.expert], tile.end);
}

// Zeros in the rows of no expert, one tile, by so many threads.
template <int kTileM, int kTileN>
__device__ __forceinline__ void write_no_expert(const EpilogueParams& p, int32_t begin, int32_t end, int32_t n0,
                                                int32_t thread, int32_t threads) {
  const bool is_wide = p.out_type == DType::f32;
  for (int32_t i = thread; i < kTileM * kTileN; i += threads) {
    const int32_t m = begin + i / kTileN, n = n0 + i % kTileN;
    if (m >= end || n >= p.n) continue;
    const int64_t at = static_cast<int64_t>(m) * p.ldo + n;
    if (is_wide)
      static_cast<float*>(p.out)[at] = 0.f;
    else
      static_cast<uint16_t*>(p.out)[at] = 0;
  }
}
template <int kTileM, int kTileN>
__device__ __forceinline__ void write_no_expert(const EpilogueParams& p, const ExpertTile& tile, int32_t n0) {
  write_no_expert<kTileM, kTileN>(p, tile.begin, tile.end, n0, static_cast<int32_t>(threadIdx.x),
                                  static_cast<int32_t>(blockDim.x));
}

// launch_one(experts, blocks) for every share of the experts that a launch takes.
template <class LaunchOne>
void for_experts(const GemmCall& call, int32_t tile_m, int32_t tile_n, LaunchOne launch_one) {
  const GemmProblem& p = call.problem;
  const GemmOperands& o = call.operands;
  if (o.expert_ends == nullptr || o.expert_shifts == nullptr)
    throw std::runtime_error(std::string(call.name) + ": operands 'expert_ends' and 'expert_shifts' are missing");
  const auto tiles_n = static_cast<int32_t>(ceil_div(p.n, tile_n));
  for_expert_tables(o.expert_ends, o.expert_shifts, p.experts, [&](const ExpertTable& table) {
    launch_one(Experts{table, static_cast<int32_t>(p.m), tiles_n},
               expert_tiles_most(p.m, table.count, tile_m) * tiles_n);
  });
}

}  // namespace pyquant::cuda

// Products of float rows with channels of integer weights over a vector type V (isa_*.cpp). V lives in an anonymous
// namespace, as in rows.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

namespace pyquant::cpu {

template <class V>
struct WeightRows {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int64_t W = V::W;
  static constexpr bool kManyRegisters = W == 16;

  // A piece is what one load of a channel brings: W dwords of packed codes, or W int8.
  template <DType T>
  static constexpr int kVectors = is_packed(T) ? 32 / bits_of(T) : 1;
  template <DType T>
  static constexpr int64_t kPieceBytes = kVectors<T> * W * bits_of(T) / 8;

  // One channel: where it stands, its current piece, and the scale of that. kLanes: each lane has its own.
  template <DType T, bool kZero, bool kLanes>
  struct Channel {
    // The products of a scale with all sixteen codes, of which an instruction chooses.
    static constexpr bool kTable = T == DType::s4 && !kLanes && V::kLooksUp;
    const uint8_t* codes;
    const float* scales;
    const int32_t* zeros;
    F scale, zero;
    I piece;

    void start(const WeightRun& run, int64_t channel) {
      codes = static_cast<const uint8_t*>(run.w) + channel * run.ldw;
      scales = run.scale + channel * run.ld_scale;
      if constexpr (kZero) zeros = run.zero_point + channel * run.ld_scale;
    }
    void take_scale(int64_t group) {
      scale = V::set(scales[group]);
      if constexpr (kZero) zero = V::set(static_cast<float>(zeros[group]));
      if constexpr (kTable) scale = V::mul(kZero ? V::sub(V::int4_codes(), zero) : V::int4_codes(), scale);
    }
    void take_scales(int64_t group, int64_t count, I lanes) {
      scale = V::spread(scales + group, count, lanes);
      if constexpr (kZero) {
        const auto* bits = reinterpret_cast<const float*>(zeros + group);
        zero = V::to_float(V::bits(V::spread(bits, count, lanes)));
      }
    }
    void take(const uint8_t* from) {
      if constexpr (T == DType::s4)
        piece = V::load_i(reinterpret_cast<const int32_t*>(from));
      else
        piece = V::load_s8(reinterpret_cast<const int8_t*>(from));
    }
    void load(int64_t at) { take(codes + at * kPieceBytes<T>); }
    // The last piece of a channel that ends within it.
    void load_tail(int64_t at, int64_t bytes) {
      alignas(64) uint8_t padded[4 * W] = {};
      std::memcpy(padded, codes + at * kPieceBytes<T>, static_cast<size_t>(bytes));
      take(padded);
    }
    void prefetch(int64_t at, int64_t ahead) const { __builtin_prefetch(codes + at * kPieceBytes<T> + ahead, 0, 2); }
    F real(int i) const {
      if constexpr (kTable) return V::look_up(scale, piece, i);
      F code;
      if constexpr (T == DType::s4)
        code = V::nibble(piece, i);
      else
        code = V::to_float(piece);
      if constexpr (kZero) code = V::sub(code, zero);
      return V::mul(code, scale);
    }
  };

  // Several groups a piece: the number among them of each lane, which has eight codes of one.
  template <bool kLanes>
  static I group_of_lanes(const WeightRun& run) {
    if constexpr (!kLanes) return V::set_i(0);
    const auto lanes = static_cast<int32_t>(run.group_size / 8);  // of a group
    alignas(64) int32_t group[W];
    int32_t number = 0, left = lanes;
    for (int64_t l = 0; l < W; ++l) {
      group[l] = number;
      if (--left == 0) {
        ++number;
        left = lanes;
      }
    }
    return V::load_i(group);
  }

  // Pieces [begin, end) of some channels in order: step(piece), after each channel holds its codes and scales.
  template <DType T, bool kZero, bool kLanes, int C, class Step>
  __attribute__((always_inline)) static inline void walk(const WeightRun& run, Channel<T, kZero, kLanes> (&channels)[C],
                                                         I lanes, int64_t begin, int64_t end, Step step) {
    constexpr int64_t kCodes = kVectors<T> * W;
    const int64_t whole = run.k / kCodes, ahead = run.ldw * C;
    const int64_t whole_end = end < whole ? end : whole;
    int64_t at = begin;
    if constexpr (kLanes) {
      const int64_t each = kCodes / run.group_size, groups = run.k / run.group_size;
      for (; at < whole_end; ++at) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          channels[c].take_scales(at * each, each, lanes);
          channels[c].load(at);
          channels[c].prefetch(at, ahead);
        }
        step(at);
      }
      if (at == end) return;
      for (int c = 0; c < C; ++c) channels[c].take_scales(at * each, groups - at * each, lanes);
    } else {
      const int64_t each = run.group_size ? run.group_size / kCodes : whole + 1;
      for (int64_t group = at / each; at < whole_end; ++group) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) channels[c].take_scale(group);
        const int64_t group_end = (group + 1) * each < whole_end ? (group + 1) * each : whole_end;
        for (; at < group_end; ++at) {
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            channels[c].load(at);
            channels[c].prefetch(at, ahead);
          }
          step(at);
        }
      }
      if (at == end) return;
      for (int c = 0; c < C; ++c) channels[c].take_scale(at / each);
    }
    const int64_t tail = columns_of(T, run.k) - whole * kPieceBytes<T>;
    for (int c = 0; c < C; ++c) channels[c].load_tail(at, tail);
    step(at);
  }

  // ---- A few rows: the real numbers stay in registers.
  template <DType T, bool kZero, bool kLanes, int R, int C>
  static void few_tile(const WeightRun& run, I lanes, int64_t channel, const float* x, int64_t ldx, float* out,
                       int64_t ldo) {
    Channel<T, kZero, kLanes> channels[C];
    F sum[R][C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      channels[c].start(run, channel + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = V::set(0.f);
    }
    const int64_t pieces = (run.k + kVectors<T> * W - 1) / (kVectors<T> * W);
    walk<T, kZero, kLanes, C>(run, channels, lanes, 0, pieces, [&](int64_t at) __attribute__((always_inline)) {
      const float* row = x + at * kVectors<T> * W;
#pragma GCC unroll 8
      for (int i = 0; i < kVectors<T>; ++i) {
        F w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) w[c] = channels[c].real(i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const F v = V::load_f32(row + r * ldx + i * W);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sum[r][c] = V::mul_add(w[c], v, sum[r][c]);
        }
      }
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) out[r * ldo + channel + c] = V::reduce_add(sum[r][c]);
  }

  template <DType T, bool kZero, bool kLanes, int C>
  static void few_rows(const WeightRun& run, I lanes, int64_t channel, const float* x, int64_t rows, int64_t ldx,
                       float* out, int64_t ldo) {
    for (int64_t done = 0; done < rows;) {
      const int64_t left = rows - done;
      const int64_t now = left <= 4 ? left : left < 7 ? 3 : 4;
      const float* from = x + done * ldx;
      float* to = out + done * ldo;
      switch (now) {
        case 1: few_tile<T, kZero, kLanes, 1, C>(run, lanes, channel, from, ldx, to, ldo); break;
        case 2: few_tile<T, kZero, kLanes, 2, C>(run, lanes, channel, from, ldx, to, ldo); break;
        case 3: few_tile<T, kZero, kLanes, 3, C>(run, lanes, channel, from, ldx, to, ldo); break;
        default: few_tile<T, kZero, kLanes, 4, C>(run, lanes, channel, from, ldx, to, ldo);
      }
      done += now;
    }
  }

  template <DType T, bool kZero, bool kLanes>
  static void few(const WeightRun& run, const float* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
    constexpr int kChannels = kManyRegisters ? 4 : 2;
    const I lanes = group_of_lanes<kLanes>(run);
    int64_t c = 0;
    for (; c + kChannels <= run.channels; c += kChannels)
      few_rows<T, kZero, kLanes, kChannels>(run, lanes, c, x, rows, ldx, out, ldo);
    for (; c < run.channels; ++c) few_rows<T, kZero, kLanes, 1>(run, lanes, c, x, rows, ldx, out, ldo);
  }

  // ---- The real numbers in memory.
  template <DType T, bool kZero, bool kLanes>
  static void reals(const WeightRun& run, int64_t begin, int64_t end, float* out, int64_t ldo) {
    constexpr int64_t kCodes = kVectors<T> * W;
    const I lanes = group_of_lanes<kLanes>(run);
    for (int64_t c = 0; c < run.channels; ++c) {
      Channel<T, kZero, kLanes> channel[1];
      channel[0].start(run, c);
      float* to = out + c * ldo - begin;
      walk<T, kZero, kLanes, 1>(run, channel, lanes, begin / kCodes, (end + kCodes - 1) / kCodes,
                                [&](int64_t at) __attribute__((always_inline)) {
#pragma GCC unroll 8
                                  for (int i = 0; i < kVectors<T>; ++i)
                                    V::store_f32(to + at * kCodes + i * W, channel[0].real(i));
                                });
    }
  }

  // ---- Rows times a panel of real numbers, [columns][kBlockN].
  // panel[i][c] = reals[c][i] for W channels and a multiple of W columns.
  static void transpose(const float* reals, int64_t ldr, int64_t columns, float* panel) {
    for (int64_t i = 0; i < columns; i += W) V::transpose(reals + i, ldr, panel + i * kBlockN, kBlockN);
  }

  template <int R, int C>
  static void panel_tile(const float* x, int64_t ldx, const float* panel, int64_t columns, float* sum, bool add) {
    F acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = add ? V::load_f32(sum + r * kBlockN + c * W) : V::set(0.f);
    for (int64_t line = 0; line < columns; line += 16) {
      // The rows of the next tile: short pieces of rows far apart, which the machine does not foresee.
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) __builtin_prefetch(x + (R + r) * ldx + line, 0, 3);
      const int64_t end = line + 16 < columns ? line + 16 : columns;
      for (int64_t i = line; i < end; ++i) {
        F w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) w[c] = V::load_f32(panel + i * kBlockN + c * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const F v = V::set(x[r * ldx + i]);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) acc[r][c] = V::mul_add(w[c], v, acc[r][c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) V::store_f32(sum + r * kBlockN + c * W, acc[r][c]);
  }

  template <int R>
  static void panel_rows(const float* x, int64_t ldx, const float* panel, int64_t columns, float* sum, bool add) {
    constexpr int C = kManyRegisters ? 4 : 2;
    for (int64_t c = 0; c < kBlockN; c += C * W) panel_tile<R, C>(x, ldx, panel + c, columns, sum + c, add);
  }

  static void panel_products(const float* x, int64_t rows, int64_t ldx, const float* panel, int64_t columns, float* sum,
                             bool add) {
    for (int64_t done = 0; done < rows;) {
      const int64_t left = rows - done, now = left >= 6 && left != 7 && left != 8 ? 6 : left > 4 ? 4 : left;
      const float* from = x + done * ldx;
      float* to = sum + done * kBlockN;
      switch (now) {
        case 1: panel_rows<1>(from, ldx, panel, columns, to, add); break;
        case 2: panel_rows<2>(from, ldx, panel, columns, to, add); break;
        case 3: panel_rows<3>(from, ldx, panel, columns, to, add); break;
        case 4: panel_rows<4>(from, ldx, panel, columns, to, add); break;
        default: panel_rows<6>(from, ldx, panel, columns, to, add);
      }
      done += now;
    }
  }

  // ---- By type, zero points and the place of scales.
  template <DType T, bool Zero, bool Lanes>
  struct Form {
    static constexpr DType kType = T;
    static constexpr bool kZero = Zero, kLanes = Lanes;
  };

  template <bool kZero, class Function>
  static void choose(const WeightRun& run, Function function) {
    if (run.type == DType::s8) return function(Form<DType::s8, kZero, false>());
    if (run.group_size && run.group_size < 8 * W) return function(Form<DType::s4, kZero, true>());
    function(Form<DType::s4, kZero, false>());
  }

  static void products(const WeightRun& run, const float* x, int64_t rows, int64_t ldx, float* out, int64_t ldo) {
    const auto form = [&](auto f) { few<f.kType, f.kZero, f.kLanes>(run, x, rows, ldx, out, ldo); };
    if (run.zero_point) return choose<true>(run, form);
    choose<false>(run, form);
  }

  static void real_weights(const WeightRun& run, int64_t begin, int64_t end, float* out, int64_t ldo) {
    const auto form = [&](auto f) { reals<f.kType, f.kZero, f.kLanes>(run, begin, end, out, ldo); };
    if (run.zero_point) return choose<true>(run, form);
    choose<false>(run, form);
  }
};

}  // namespace pyquant::cpu

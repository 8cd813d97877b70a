// How many rows the next tile of registers takes.
#pragma once
#include <cstdint>

namespace pyquant::cpu {
namespace {  // each instruction set compiles its own

// Six fill the registers; seven to eleven are split evenly, as 4 + 4 is faster than 6 + 2.
constexpr int64_t tile_rows(int64_t rows) { return rows >= 10 || rows == 6 ? 6 : rows > 6 ? (rows + 1) / 2 : rows; }

}  // namespace
}  // namespace pyquant::cpu

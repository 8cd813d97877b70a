// Limits of a launch whose size grows with the operands: refused by name, never cut off.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pyquant::cuda {

// The blocks of a launch: a GPU starts no more along x and y (CUDA C++ programming guide, technical specifications).
inline dim3 grid_of(const char* name, int64_t x, int64_t y = 1) {
  constexpr int64_t kMostX = 2147483647, kMostY = 65535;
  if (x > kMostX || y > kMostY)
    throw std::runtime_error(std::string(name) + ": operands of " + std::to_string(x) + " x " + std::to_string(y) +
                             " blocks; allowed: " + std::to_string(kMostX) + " x " + std::to_string(kMostY));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

// Columns whose group a thread finds by a division of 32 bits.
inline void check_columns_of_groups(const char* name, int64_t columns) {
  constexpr int64_t kMost = 4294967295;
  if (columns > kMost)
    throw std::runtime_error(std::string(name) + ": rows of " + std::to_string(columns) +
                             " columns in groups; allowed: " + std::to_string(kMost));
}

}  // namespace pyquant::cuda

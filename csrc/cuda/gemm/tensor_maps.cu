// Tensor maps, made once. CuTe describes x and w to the TMA unit at every launch and calls the driver for it by name
// (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL); that name stands here. A map is a function of what the driver is asked and
// of nothing else, so a map is kept under the whole question: weights that move, change or are freed, and other shapes
// at an old address, are other questions. The table is of fixed size; the oldest of a set gives way.
#include <cuda.h>

#include <array>
#include <cstring>
#include <mutex>

#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kMostDimensions = 5;

// Every argument of cuTensorMapEncodeTiled, and the device. No bytes between the members: compared as memory.
struct Question {
  uint64_t address, sizes[kMostDimensions], strides[kMostDimensions];
  uint32_t box[kMostDimensions], element_strides[kMostDimensions];
  int32_t device, type, rank, interleave, swizzle, promotion, fill, unused;
};
static_assert(sizeof(Question) == 8 * (1 + 2 * kMostDimensions) + 4 * (2 * kMostDimensions + 8), "no padding");

uint64_t hash_of(const Question& question) {
  uint64_t words[sizeof(Question) / 8], hash = 0;
  std::memcpy(words, &question, sizeof(words));
  for (const uint64_t word : words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

class TensorMaps {
 public:
  // False: not kept.
  bool find(const Question& question, CUtensorMap* map) {
    Set& set = set_of(question);
    const std::lock_guard<std::mutex> lock(set.mutex);
    for (const Entry& entry : set.entries) {
      if (entry.is_full && std::memcmp(&entry.question, &question, sizeof(question)) == 0) {
        *map = entry.map;
        return true;
      }
    }
    return false;
  }

  void keep(const Question& question, const CUtensorMap& map) {
    Set& set = set_of(question);
    const std::lock_guard<std::mutex> lock(set.mutex);
    set.entries[set.oldest] = {question, map, true};
    set.oldest = (set.oldest + 1) % kWays;
  }

 private:
  static constexpr size_t kSets = 512, kWays = 4;  // 2048 maps in 700 KB: two a layer of the largest models
  struct Entry {
    Question question;
    CUtensorMap map;
    bool is_full = false;
  };
  struct Set {
    std::mutex mutex;
    std::array<Entry, kWays> entries{};
    size_t oldest = 0;
  };
  Set& set_of(const Question& question) { return sets_[hash_of(question) % kSets]; }
  std::array<Set, kSets> sets_{};
};

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's own, asked for once; a runtime that does not find it is asked again.
Encode encode_of_driver() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess || !found)
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled (CUDA 12.0)");
  return reinterpret_cast<Encode>(found);
}

template <class To, class From>
void copy(To (&to)[kMostDimensions], const From* from, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] = from[i];
}

}  // namespace

}  // namespace pyquant::cuda

// Hidden: other libraries of the process mean the driver's. A refusal is thrown; CuTe would print it and go on.
__attribute__((visibility("hidden"))) CUresult CUDAAPI
cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  using namespace pyquant::cuda;
  if (rank < 1 || rank > kMostDimensions) return CUDA_ERROR_INVALID_VALUE;
  Question question{};
  question.address = reinterpret_cast<uint64_t>(address);
  copy(question.sizes, sizes, rank);
  copy(question.strides, strides, rank - 1);
  copy(question.box, box, rank);
  copy(question.element_strides, element_strides, rank);
  check(cudaGetDevice(&question.device), "cudaGetDevice", 0);
  question.type = type;
  question.rank = static_cast<int32_t>(rank);
  question.interleave = interleave;
  question.swizzle = swizzle;
  question.promotion = promotion;
  question.fill = fill;
  static auto* maps = new TensorMaps;  // threads may launch until the process ends
  if (maps->find(question, map)) return CUDA_SUCCESS;
  static const Encode encode = encode_of_driver();
  const CUresult result =
      encode(map, type, rank, address, sizes, strides, box, element_strides, interleave, swizzle, promotion, fill);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled: driver error " + std::to_string(static_cast<int>(result)));
  maps->keep(question, *map);
  return result;
}

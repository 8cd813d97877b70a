// Threads and scratch memory of the CPU backend.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "cpu/cpu.h"

namespace pyquant::cpu {

int thread_count();  // 1 without a pool

// Runs body(begin, end) over [0, tasks) on the pool, or here when there is one task or no pool.
template <class Function>
void parallel_for(int64_t tasks, Function&& function);

void run_on_pool(int64_t tasks, Body body, void* context);

template <class Function>
void parallel_for(int64_t tasks, Function&& function) {
  if (tasks <= 0) return;
  if (tasks == 1) {
    function(int64_t{0}, int64_t{1});
    return;
  }
  run_on_pool(
      tasks, [](void* context, int64_t begin, int64_t end) { (*static_cast<Function*>(context))(begin, end); },
      &function);
}

// Tasks into which `work` (in units of which `grain` are worth a task) is cut: 1 below two grains.
int64_t task_count(int64_t work, int64_t grain);

// Asks for 2 MiB pages behind a large buffer that has not been written yet: streaming weights from memory gains about a
// third, as the prefetcher stops at every page. Only a hint.
void advise_huge_pages(void* memory, size_t bytes);

// One growing buffer a thread, handed out piece by piece: no allocation in the steady state.
class Scratch {
 public:
  static constexpr size_t kAlign = 64;
  static constexpr size_t rounded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
  static Scratch& of_this_thread();
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Forgets what was handed out and makes room for this many bytes, the sum of rounded() sizes. Throws std::bad_alloc.
  void reset(size_t bytes);
  template <class T>
  T* take(size_t count) {
    auto* p = reinterpret_cast<T*>(memory_ + used_);
    used_ += rounded(count * sizeof(T));
    return p;
  }

 private:
  unsigned char* memory_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
};

}  // namespace pyquant::cpu

#include "cpu/threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pyquant::cpu {
namespace {

ParallelFor pool = nullptr;
int (*pool_size)() = nullptr;

}  // namespace

void set_parallel_for(ParallelFor parallel_for, int (*thread_count)()) {
  pool = parallel_for;
  pool_size = thread_count;
}

int thread_count() {
  const int n = pool && pool_size ? pool_size() : 1;
  return n > 0 ? n : 1;
}

void run_on_pool(int64_t tasks, Body body, void* context) {
  if (pool)
    pool(0, tasks, 1, body, context);
  else
    body(context, 0, tasks);
}

int64_t task_count(int64_t work, int64_t grain) {
  const int64_t most = work / grain, threads = thread_count();
  return most < 2 ? 1 : most < threads ? most : threads;
}

void advise_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const auto first = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
  const auto last = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  static_cast<void>(memory);
  static_cast<void>(bytes);
#endif
}

Scratch& Scratch::of_this_thread() {
  thread_local Scratch scratch;
  return scratch;
}

void Scratch::reset(size_t bytes) {
  used_ = 0;
  if (bytes <= capacity_) return;
  std::free(memory_);
  capacity_ = 0;
  memory_ = static_cast<unsigned char*>(std::aligned_alloc(kAlign, rounded(bytes)));
  if (!memory_) throw std::bad_alloc();
  capacity_ = rounded(bytes);
}

}  // namespace pyquant::cpu

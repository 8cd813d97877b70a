#include "cpu/threads.h"

#include <algorithm>
#include <stdexcept>

#include "core/float_state.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pyquant::cpu {
namespace {

ParallelFor pool = nullptr;
int (*pool_size)() = nullptr;
thread_local bool in_body = false;

struct InBody {
  bool before = in_body;
  InBody() { in_body = true; }
  ~InBody() { in_body = before; }
};

// What the pool calls: marks the thread for as long as the body runs.
struct Marked {
  Body body;
  void* context;
  static void run(void* self, int64_t begin, int64_t end) {
    const auto& marked = *static_cast<Marked*>(self);
    const InBody mark;
    const DefaultFloats floats;
    marked.body(marked.context, begin, end);
  }
};

}  // namespace

void set_parallel_for(ParallelFor parallel_for, int (*thread_count)()) {
  pool = parallel_for;
  pool_size = thread_count;
}

int64_t thread_count() {
  if (in_body) throw std::logic_error("pyquant: a body of parallel work asked for the number of threads");
  return std::max(pool && pool_size ? pool_size() : 1, 1);
}

Shares::Shares(int64_t units, int64_t work, int64_t grain)
    : Shares(units, in_body || work / grain < 2 ? 1 : std::min({work / grain, thread_count(), units})) {}

void Shares::run_on_pool(Body body, void* context) const {
  Marked marked{body, context};
  if (pool && count_ > 1)
    pool(0, count_, 1, Marked::run, &marked);
  else
    Marked::run(&marked, 0, count_);
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

// Threads and scratch memory of the CPU backend.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "cpu/cpu.h"

namespace pyquant::cpu {

// Threads that the pool would use now; 1 without a pool. Only for deciding how to cut work: inside a body the answer
// would be another one (torch's pool says 1 there), so asking there throws std::logic_error.
int64_t thread_count();

// All that a body learns of the cut: the units that are its own, and its number among the shares.
struct Share {
  int64_t index, begin, end;
};

// Units that stay whole (rows, blocks, runs), dealt out to the pool. The cut is made here, once, before anything runs.
class Shares {
 public:
  // At most one share a thread, none of them empty; one share when `work` (`grain` of it is worth a thread) is small,
  // or inside the body of other work.
  Shares(int64_t units, int64_t work, int64_t grain);
  // A share for each unit: for callers that have cut the work themselves.
  static Shares of_one_unit(int64_t units) { return Shares(units, units); }

  int64_t count() const { return count_; }  // at least 1, so a table for each share can be allocated first

  // body(Share) once for every share, at the same time where there is a pool; not at all without units.
  template <class Function>
  void run(Function&& body) const {
    if (units_ <= 0) return;
    struct Call {
      const Shares& shares;
      Function& body;
    } call{*this, body};
    run_on_pool(
        [](void* context, int64_t begin, int64_t end) {
          const Call& at = *static_cast<Call*>(context);
          for (int64_t i = begin; i < end; ++i) at.body(at.shares.share(i));
        },
        &call);
  }

 private:
  Shares(int64_t units, int64_t count) : units_(units), count_(count > 1 ? count : 1) {}
  // The first units_ % count_ shares have one unit more: no product of sizes that could overflow.
  Share share(int64_t i) const {
    const int64_t each = units_ / count_, more = units_ % count_;
    const int64_t begin = i * each + (i < more ? i : more);
    return {i, begin, begin + each + (i < more ? 1 : 0)};
  }
  void run_on_pool(Body body, void* context) const;

  int64_t units_, count_;
};

// Requests 2 MiB pages for a large buffer that has not been written yet: streaming weights from memory gains about a
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

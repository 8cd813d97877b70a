// Every loop that the pool shares out, on real threads and from two callers at once, for ThreadSanitizer. Ends with 0
// when the results are those of one thread; the sanitizer itself ends the process with another code at a race.
// With PLANT_RACE, shares write to one counter: the sanitizer must see that.
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/histogram_math.h"
#include "cpu/cpu.h"
#include "cpu/threads.h"

using namespace pyquant;

namespace {

constexpr int kThreads = 3;

// Workers that live on, as a pool's do, so that what they keep (scratch memory) meets the next piece of work.
class Pool {
 public:
  Pool() {
    for (int i = 0; i < kThreads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  void run(int64_t tasks, cpu::Body body, void* context) {
    struct Call {
      std::mutex mutex;
      std::condition_variable done;
      int64_t left;
    };
    const auto call = std::make_shared<Call>();
    call->left = tasks;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t t = 0; t < tasks; ++t)
        queue_.emplace_back([=] {
          body(context, t, t + 1);
          const std::lock_guard<std::mutex> finished(call->mutex);
          if (--call->left == 0) call->done.notify_one();
        });
    }
    wake_.notify_all();
    std::unique_lock<std::mutex> lock(call->mutex);
    call->done.wait(lock, [&] { return call->left == 0; });
  }

 private:
  void work() {
    while (true) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        job = std::move(queue_.front());
        queue_.erase(queue_.begin());
      }
      job();
    }
  }
  std::vector<std::thread> workers_;
  std::vector<std::function<void()>> queue_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
};

Pool* pool = nullptr;

void lend(bool threads) {
  if (!threads) return cpu::set_parallel_for(nullptr, nullptr);
  cpu::set_parallel_for(
      [](int64_t begin, int64_t end, int64_t, cpu::Body body, void* context) { pool->run(end - begin, body, context); },
      [] { return kThreads; });
}

using Bytes = std::vector<unsigned char>;

template <class T>
void add(Bytes& all, const std::vector<T>& v) {
  const auto* p = reinterpret_cast<const unsigned char*>(v.data());
  all.insert(all.end(), p, p + v.size() * sizeof(T));
}

// Sizes a little above two grains of each loop.
Bytes everything(uint32_t seed) {
  Bytes all;
  std::mt19937 random(seed);
  const int64_t rows = 600, cols = 1792, n = 1100, k = 2000;
  std::vector<float> x(static_cast<size_t>(rows * cols));
  for (auto& v : x) v = static_cast<float>(static_cast<int32_t>(random() % 2001) - 1000) / 256.f;
  for (const auto granularity : {Granularity::tensor, Granularity::rows, Granularity::groups}) {
    const int64_t group = granularity == Granularity::groups ? 64 : 0;
    const auto scales = static_cast<size_t>(granularity == Granularity::tensor ? 1
                                            : group                            ? rows * cols / group
                                                                               : rows);
    std::vector<int8_t> q(x.size());
    std::vector<float> scale(scales), back(x.size());
    std::vector<int32_t> zero(scales);
    cpu::quantize_dynamic(x.data(), DType::f32, rows, cols, cols, granularity, group, false, -128, 127, q.data(),
                          scale.data(), zero.data());
    add(all, q);
    add(all, scale);
    cpu::quantize(x.data(), DType::f32, rows, cols, cols, granularity, group, scale.data(), zero.data(), -128, 127,
                  q.data());
    add(all, q);
    cpu::dequantize(q.data(), DType::s8, rows, cols, cols, granularity, group, scale.data(), zero.data(), back.data(),
                    DType::f32);
    add(all, back);
  }
  std::vector<int64_t> counts(2 * kHistogramBins);
  cpu::magnitude_histogram(x.data(), DType::f32, rows, cols, cols, 3, counts.data());
  add(all, counts);
  const double ratios[] = {1.0, 0.9, 0.8, 0.7};
  std::vector<double> steps(static_cast<size_t>(rows * cols / 64));
  cpu::least_squares_steps(x.data(), rows * cols / 64, 64, -7, 7, ratios, 4, steps.data());
  add(all, steps);
  std::vector<int8_t> codes(static_cast<size_t>(n * k));
  for (auto& c : codes) c = static_cast<int8_t>(static_cast<int32_t>(random() % 16) - 8);
  std::vector<uint8_t> nibbles(static_cast<size_t>(n * ((k + 1) / 2)));
  cpu::pack_int4(codes.data(), n, k, nibbles.data());
  add(all, nibbles);
  for (const int32_t bits : {8, 4}) {
    LinearSpec spec;
    spec.n = n;
    spec.k = k;
    spec.w = weight_type(bits);
    spec.group_size = bits == 4 ? 100 : 0;
    std::vector<float> scale(static_cast<size_t>(spec.group_size ? n * (k / spec.group_size) : n), 0.01f);
    Bytes packed(cpu::packed_bytes(spec), static_cast<unsigned char>(seed));
    const void* source = bits == 4 ? static_cast<const void*>(nibbles.data()) : codes.data();
    cpu::pack_linear(spec, {source, scale.data(), nullptr, nullptr, nullptr, nullptr, nullptr}, packed.data());
    for (const int64_t m : {1, 9, 70}) {
      std::vector<float> y(static_cast<size_t>(m * n));
      cpu::linear(spec, packed.data(), x.data(), DType::f32, m, cols, nullptr, DType::f32, n, y.data(), DType::f32);
      add(all, y);
    }
  }
#ifdef PLANT_RACE
  // long enough that the shares run at the same time: what one thread does after another is no race
  volatile int64_t units = 0;
  cpu::Shares(kThreads, kThreads, 1).run([&](cpu::Share) {
    for (int i = 0; i < 1 << 20; ++i) units = units + 1;
  });
#endif
  return all;
}

}  // namespace

int main() {
  lend(false);
  const Bytes want = everything(1);
  Pool threads;
  pool = &threads;
  lend(true);
  for (int round = 0; round < 2; ++round) {
    Bytes one, other;
    std::thread caller([&] { one = everything(1); });
    other = everything(1);
    caller.join();
    if (one != want || other != want) {
      std::printf("other bytes than one thread's\n");
      return 2;
    }
  }
  lend(false);
  std::printf("%zu bytes, equal\n", want.size());
  return 0;
}

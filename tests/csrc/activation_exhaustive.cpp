// Largest error of gelu_erf, gelu_tanh and silu against the true functions, in fp32 ulps: of the result for positive
// inputs, of at least 1/8 for negative ones, whose results are small; and the largest relative error of the latter.
//
//   activation_exhaustive [--full | --stride K] [--threads N] [--bound ULP] [gelu_erf|gelu_tanh|silu ...]
//
// --full visits all 2^32 bit patterns; --stride K every K-th, and every pattern near the landmarks below.
// Exit status 0 when every error is within the bound and every special value is right, 1 otherwise, 2 for bad
// arguments.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/activation_math.h"

namespace {

using pyquant::bits_from_float;
using pyquant::float_from_bits;

constexpr uint64_t kPatterns = uint64_t{1} << 32;
constexpr uint64_t kBlock = 1 << 14;
constexpr uint64_t kDenseRadius = 1 << 14;

// The truth in double: rounding an argument of exp by 2^-53 moves a result of size exp(-105) by 2^-46 of itself, which
// is a millionth of an fp32 ulp.
double true_gelu_erf(double x) { return 0.5 * x * std::erfc(-x * std::sqrt(0.5)); }
double true_gelu_tanh(double x) {
  const double slope = 2 * std::sqrt(2 / M_PI);
  return x / (1 + std::exp(-slope * x * (1 + 0.044715 * x * x)));
}
double true_silu(double x) { return x / (1 + std::exp(-x)); }

struct Function {
  const char* name;
  float (*tested)(float);
  double (*truth)(double);
  double bound;     // the full sweep's figure, rounded up to the next hundredth
  double limit;     // negative inputs from this magnitude on give -0
  double relative;  // bound of the relative error of negative results that are normal numbers
};

constexpr double kFloor = 0.125;

const Function kFunctions[] = {
    {"gelu_erf", pyquant::gelu_erf, true_gelu_erf, 1.86, 8, 4.1e-5},
    {"gelu_tanh", pyquant::gelu_tanh, true_gelu_tanh, 1.97, 6, 1.4e-4},
    {"silu", pyquant::silu, true_silu, 3.03, 86, 2.3e-7},
};

// Zero, the smallest normal, powers of two, the largest finite value; where one of the functions passes its limit or
// reaches its extremum, and where the last of them would leave the normal numbers.
const float kLandmarks[] = {0.f,
                            1.17549435e-38f,
                            2.3509887e-38f,
                            1.4e-45f,
                            1e-30f,
                            5.9604645e-8f,
                            0.34657359f,
                            0.5f,
                            0.75179f,
                            1.f,
                            1.27846f,
                            2.f,
                            4.f,
                            5.5f,
                            6.f,
                            8.f,
                            16.f,
                            17.3f,
                            64.f,
                            86.f,
                            88.7f,
                            91.8f,
                            103.97f,
                            108.6f,
                            120.f,
                            128.f,
                            3.4028235e38f};

double ulp_of(double value) {
  const int exponent = value == 0 ? -126 : std::ilogb(value);
  return std::ldexp(1.0, (exponent < -126 ? -126 : exponent) - 23);
}

struct Worst {
  double error = -1, relative = 0;
  float x = 0, got = 0;
  double want = 0;
  uint64_t checked = 0, faults = 0;
  uint32_t fault_bits = 0;

  void fault(float at) {
    if (faults++ == 0) fault_bits = bits_from_float(at);
  }
  void merge(const Worst& other) {
    checked += other.checked;
    if (faults == 0) fault_bits = other.fault_bits;
    faults += other.faults;
    if (other.relative > relative) relative = other.relative;
    if (other.error > error) {
      error = other.error, x = other.x, got = other.got, want = other.want;
    }
  }
};

// Signs, infinities and NaN first; the error bound only speaks of finite inputs.
void check(const Function& f, float x, float got, Worst& worst) {
  ++worst.checked;
  if (std::isnan(x)) {
    if (bits_from_float(got) != bits_from_float(x)) worst.fault(x);
    return;
  }
  if (std::signbit(got) != std::signbit(x)) worst.fault(x);
  if (std::isinf(x)) {
    if (!(got == (x > 0 ? x : 0.f))) worst.fault(x);
    return;
  }
  if (x <= -f.limit) {
    if (got != 0) worst.fault(x);
    return;
  }
  const double want = f.truth(x), off = std::fabs(got - want);
  const double error = off / ulp_of(x < 0 && want > -kFloor ? kFloor : want);
  if (x < 0 && want < -0x1p-126) worst.relative = std::fmax(worst.relative, -off / want);
  if (!(error <= worst.error)) {  // a NaN result is the worst of all
    worst.error = std::isnan(error) ? HUGE_VAL : error, worst.x = x, worst.got = got, worst.want = want;
  }
}

void check_patterns(const Function& f, const std::vector<uint32_t>& patterns, Worst& worst) {
  std::vector<float> x(patterns.size()), y(patterns.size());
  std::memcpy(x.data(), patterns.data(), 4 * patterns.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = f.tested(x[i]);
  for (size_t i = 0; i < x.size(); ++i) check(f, x[i], y[i], worst);
}

Worst sweep(const Function& f, uint64_t stride, unsigned thread_count) {
  std::atomic<uint64_t> next{0};
  std::vector<Worst> parts(thread_count);
  std::vector<std::thread> threads;
  for (Worst& part : parts) {
    threads.emplace_back([&f, &next, &part, stride] {
      std::vector<uint32_t> patterns;
      for (;;) {
        const uint64_t first = next.fetch_add(kBlock * stride);
        if (first >= kPatterns) return;
        patterns.clear();
        for (uint64_t i = 0; i < kBlock && first + i * stride < kPatterns; ++i) patterns.push_back(first + i * stride);
        check_patterns(f, patterns, part);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Worst worst;
  for (const Worst& part : parts) worst.merge(part);
  return worst;
}

Worst sweep_landmarks(const Function& f) {
  Worst worst;
  for (float landmark : kLandmarks) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const uint64_t centre = bits_from_float(landmark);
      std::vector<uint32_t> patterns;
      for (uint64_t b = centre < kDenseRadius ? 0 : centre - kDenseRadius; b <= centre + kDenseRadius; ++b) {
        patterns.push_back(static_cast<uint32_t>(b) | sign);
      }
      check_patterns(f, patterns, worst);
    }
  }
  return worst;
}

int usage(const char* wrong) {
  std::fprintf(stderr, "bad argument '%s'\n", wrong);
  std::fprintf(stderr,
               "usage: activation_exhaustive [--full | --stride K] [--threads N] [--bound ULP] [FUNCTION ...]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t stride = 257;
  unsigned thread_count = 1;
  double bound = 0;  // 0: each function's own
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--full") {
      stride = 1;
    } else if (argument == "--stride" && has_value) {
      stride = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--threads" && has_value) {
      thread_count = static_cast<unsigned>(std::strtoul(argv[++i], nullptr, 10));
    } else if (argument == "--bound" && has_value) {
      bound = std::strtod(argv[++i], nullptr);
    } else {
      names.push_back(argument);
    }
  }
  if (stride == 0 || thread_count == 0) return usage("0");
  if (names.empty()) {
    for (const Function& f : kFunctions) names.push_back(f.name);
  }
  bool good = true;
  for (const std::string& name : names) {
    const Function* found = nullptr;
    for (const Function& f : kFunctions) {
      if (name == f.name) found = &f;
    }
    if (found == nullptr) return usage(name.c_str());
    Worst worst = sweep(*found, stride, thread_count);
    worst.merge(sweep_landmarks(*found));
    good = good && worst.error <= (bound > 0 ? bound : found->bound) && worst.error >= 0 &&
           worst.relative <= found->relative && worst.faults == 0;
    std::printf(
        "%s checked=%llu max_ulp=%.4f x=%.9g got=%.9g want=%.17g relative=%.3g special_faults=%llu "
        "first_fault=0x%08x\n",
        found->name, static_cast<unsigned long long>(worst.checked), worst.error, worst.x, worst.got, worst.want,
        worst.relative, static_cast<unsigned long long>(worst.faults), worst.fault_bits);
    std::fflush(stdout);
  }
  return good ? 0 : 1;
}

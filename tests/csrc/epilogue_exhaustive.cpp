// The scalar formulas of csrc/core/epilogue_math.h against double precision, over every float.
//
//   epilogue_exhaustive [--full | --stride K] [--threads N]
//
// --full visits all 2^32 bit patterns; --stride K every K-th, and every pattern near the landmarks below. All 2^16
// float16 and bfloat16 inputs, all int8 x zero point pairs and a grid of ranges are always visited.
// Prints "visited <formula> <count>" per formula; exit status 0 when nothing differs, 1 otherwise, 2 for bad arguments.
//
// Why double is exact enough: a product of two floats fits in 53 bits; a quotient or difference rounded to 53 bits and
// then to 24 equals the one rounded at once (53 >= 2 * 24 + 2).
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/epilogue_math.h"

namespace {

using namespace pyquant;

constexpr uint64_t kPatterns = uint64_t{1} << 32;
constexpr int64_t kDenseRadius = 1 << 12;
constexpr float kLandmarks[] = {0.f,          1e-45f, 1.1754944e-38f, 7.888609e-31f, 0.5f,      1.f,
                                1.5f,         2.5f,   6.5f,           7.5f,          8.5f,      126.5f,
                                127.5f,       128.5f, 255.f,          65504.f,       8388608.f, 16777216.f,
                                2147483648.f, 1e30f,  3.4028235e38f,  kInfinity};

struct CodeCase {
  float scale;
  int32_t zero_point, qmin, qmax;
};
const CodeCase kCodeCases[] = {
    {1.f, 0, -127, 127},      {1.f, 0, -8, 7},           {0.1f, 0, -127, 127},           {1.f / 3, -128, -128, 127},
    {0.037f, 127, -128, 127}, {7.888609e-31f, 3, -8, 7}, {1.2676506e30f, -5, -128, 127}, {kNaN, 11, -128, 127},
};

std::atomic<uint64_t> failures{0};

bool same(float a, float b) { return bits_from_float(a) == bits_from_float(b) || (a != a && b != b); }

void report(const char* formula, float x, double got, double want) {
  if (failures.fetch_add(1) < 20) {
    std::printf("%s(%a, 0x%08x): got %.17g, want %.17g\n", formula, static_cast<double>(x), bits_from_float(x), got,
                want);
  }
}

// ---- the truth, in double, each step rounded to float by a conversion

float rounded(double v) { return static_cast<float>(v); }

int32_t true_code(float x, const CodeCase& c) {
  const float recip = rounded(1.0 / static_cast<double>(c.scale));
  const double steps = std::nearbyint(static_cast<double>(rounded(static_cast<double>(x) * recip)));
  if (std::isnan(steps)) return c.zero_point;
  return static_cast<int32_t>(std::fmin(std::fmax(steps + c.zero_point, c.qmin), c.qmax));
}

float true_scale(float amax, int32_t qmax) {
  if (std::isnan(amax) || std::isinf(amax)) return kNaN;
  return static_cast<double>(amax) < std::ldexp(1.0, -100) ? 1.f : rounded(static_cast<double>(amax) / qmax);
}

float true_range_scale(float low, float high, int32_t steps) {
  if (!std::isfinite(low) || !std::isfinite(high)) return kNaN;
  const double l = std::fmin(low, 0.0), h = std::fmax(high, 0.0);
  if (std::fmax(-l, h) < std::ldexp(1.0, -100)) return 1.f;
  return rounded(static_cast<double>(rounded(h / steps)) - static_cast<double>(rounded(l / steps)));
}

int32_t true_zero_point(float low, float scale, int32_t qmin, int32_t qmax) {
  if (std::isnan(scale)) return 0;
  const double recip = rounded(1.0 / static_cast<double>(scale));
  const double zero_point = qmin - std::nearbyint(static_cast<double>(rounded(std::fmin(low, 0.0) * recip)));
  return static_cast<int32_t>(std::fmin(std::fmax(zero_point, qmin), qmax));
}

// relu and clamp on the bit patterns: a negative number is one with the sign bit that is neither -0 nor NaN.
float true_relu(uint32_t bits) {
  const bool negative = bits > 0x80000000u && bits <= 0xff800000u;
  return float_from_bits(negative ? 0u : bits);
}

float true_clamp(float x, float low, float high) {
  if (std::isnan(x)) return x;
  if (static_cast<double>(x) < static_cast<double>(low)) return low;
  return static_cast<double>(x) > static_cast<double>(high) ? high : x;
}

// ---- one float through every formula of one argument

void check_float(uint32_t bits) {
  const float x = float_from_bits(bits);
  for (const CodeCase& c : kCodeCases) {
    const int32_t got = code_from_real(x, scale_recip(c.scale), c.zero_point, c.qmin, c.qmax), want = true_code(x, c);
    if (got != want) report("code_from_real", x, got, want);
  }
  const float recip = scale_recip(x);
  if (!same(recip, rounded(1.0 / static_cast<double>(x)))) report("scale_recip", x, recip, 1.0 / x);
  if (bits <= 0x7fffffffu) {  // amax is never negative
    for (int32_t qmax : {7, 127}) {
      const float got = scale_from_amax(x, qmax), want = true_scale(x, qmax);
      if (!same(got, want)) report("scale_from_amax", x, got, want);
    }
  }
  const float relu = activate(x, Activation::relu, 0.f, 0.f);
  if (!same(relu, true_relu(bits))) report("relu", x, relu, true_relu(bits));
  const float clamped = activate(x, Activation::clamp, -1.5f, 6.f);
  if (!same(clamped, true_clamp(x, -1.5f, 6.f))) report("clamp", x, clamped, true_clamp(x, -1.5f, 6.f));
  const float plain = activate(x, Activation::none, 1.f, 1.f);
  if (!same(plain, x)) report("none", x, plain, x);
}

void in_parallel(int threads, uint64_t count, const std::function<void(uint64_t)>& body) {
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([=, &body] {
      for (uint64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) body(i);
    });
  }
  for (std::thread& worker : workers) worker.join();
}

uint64_t check_floats(uint64_t stride, int threads) {
  const uint64_t count = (kPatterns + stride - 1) / stride;
  in_parallel(threads, count, [=](uint64_t i) { check_float(static_cast<uint32_t>(i * stride)); });
  if (stride == 1) return count;
  uint64_t dense = 0;
  for (float landmark : kLandmarks) {
    const int64_t centre = bits_from_float(landmark);
    for (int64_t at = centre - kDenseRadius; at <= centre + kDenseRadius; ++at) {
      if (at < 0) continue;
      check_float(static_cast<uint32_t>(at));
      check_float(static_cast<uint32_t>(at) ^ 0x80000000u);
      dense += 2;
    }
  }
  return count + dense;
}

// ---- 16-bit inputs: widened here bit by bit

float widened_f16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | mantissa << 13);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25);
  return float_from_bits(sign | bits_from_float(rounded(magnitude)));
}

uint64_t check_16_bit() {
  uint64_t visited = 0;
  for (uint32_t h = 0; h < 65536; ++h) {
    for (float x : {widened_f16(static_cast<uint16_t>(h)), float_from_bits(h << 16)}) {
      for (float scale : {0.001f, 0.0078125f, 0.03f, 1.f, 17.3f, 516.f}) {
        for (int32_t zero_point : {0, -8, 7}) {
          for (const CodeCase& c : {CodeCase{scale, zero_point, -127, 127}, CodeCase{scale, zero_point, -8, 7}}) {
            const int32_t got = code_from_real(x, scale_recip(c.scale), c.zero_point, c.qmin, c.qmax);
            if (got != true_code(x, c)) report("16-bit input", x, got, true_code(x, c));
            ++visited;
          }
        }
      }
    }
  }
  return visited;
}

// ---- codes back to real numbers, and codes of codes

uint64_t check_codes() {
  uint64_t visited = 0;
  for (float scale : {7.888609e-31f, 1e-40f, 0.001f, 1.f / 3, 1.f, 117.7f, 1.2676506e30f, kNaN}) {
    for (int32_t q = -128; q <= 255; ++q) {
      for (int32_t zero_point = -128; zero_point <= 255; ++zero_point, ++visited) {
        const float got = real_from_code(q, scale, zero_point);
        const float want = rounded(static_cast<double>(q - zero_point) * scale);
        if (!same(got, want)) report("real_from_code", scale, got, want);
      }
    }
  }
  // Codes that were dequantised and quantised again under their own scale are the same codes.
  for (float scale : {0.001f, 1.f / 3, 0.1f, 117.7f}) {
    for (int32_t q = -128; q <= 127; ++q) {
      for (int32_t zero_point = -128; zero_point <= 127; ++zero_point, ++visited) {
        const int32_t again =
            code_from_real(real_from_code(q, scale, zero_point), scale_recip(scale), zero_point, -128, 127);
        if (again != q) report("round trip", scale, again, q);
      }
    }
  }
  return visited;
}

// ---- ranges

uint64_t check_ranges() {
  std::vector<float> ends;
  for (float landmark : kLandmarks) {
    for (int32_t offset : {-1, 0, 1}) {
      const int64_t bits = static_cast<int64_t>(bits_from_float(landmark)) + offset;
      if (bits >= 0) ends.push_back(float_from_bits(static_cast<uint32_t>(bits)));
    }
  }
  uint32_t state = 12345;
  for (int i = 0; i < 500; ++i) {
    state = state * 1664525u + 1013904223u;
    ends.push_back(float_from_bits(state >> 1));  // any pattern without a sign
  }
  ends.push_back(kNaN);
  uint64_t visited = 0;
  for (float a : ends) {
    for (float b : ends) {
      const float pairs[][2] = {{-a, b}, {a, a < b ? b : a}, {-a, a < b ? -a : -b}, {-a, a}};
      for (const auto& pair : pairs) {
        const float low = pair[0], high = pair[1];
        if (low > high) continue;  // NaN ends stay in
        for (auto [qmin, qmax] : {std::pair{-128, 127}, std::pair{-8, 7}}) {
          const float scale = scale_from_range(low, high, qmin, qmax), want = true_range_scale(low, high, qmax - qmin);
          if (!same(scale, want)) report("scale_from_range", high, scale, want);
          const int32_t zero_point = zero_point_from_range(low, scale_recip(scale), qmin, qmax);
          const int32_t true_zero = true_zero_point(low, want, qmin, qmax);
          if (zero_point != true_zero) report("zero_point_from_range", low, zero_point, true_zero);
          ++visited;
        }
      }
    }
  }
  return visited;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t stride = 1021;
  int threads = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool has_value = i + 1 < argc && std::atoll(argv[i + 1]) > 0;
    if (flag == "--full") {
      stride = 1;
    } else if (flag == "--stride" && has_value) {
      stride = static_cast<uint64_t>(std::atoll(argv[++i]));
    } else if (flag == "--threads" && has_value) {
      threads = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: epilogue_exhaustive [--full | --stride K] [--threads N]\n");
      return 2;
    }
  }
  std::printf("visited floats %llu\n", static_cast<unsigned long long>(check_floats(stride, threads)));
  std::printf("visited 16-bit %llu\n", static_cast<unsigned long long>(check_16_bit()));
  std::printf("visited codes %llu\n", static_cast<unsigned long long>(check_codes()));
  std::printf("visited ranges %llu\n", static_cast<unsigned long long>(check_ranges()));
  std::printf("failures %llu\n", static_cast<unsigned long long>(failures.load()));
  return failures.load() == 0 ? 0 : 1;
}

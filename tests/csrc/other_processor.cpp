// What a processor makes of numbers that every one can draw (test_other_processors.py): each line is the name of an
// operation and a number that all of its results' bits go into. Instruction sets are compared with the portable one
// first.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/weight_only.h"

using namespace pyquant;

namespace {

class Draw {
 public:
  uint32_t next() { return state_ = state_ * 1664525u + 1013904223u, state_ >> 8 ^ state_ << 16; }
  // Numbers of many sizes and both signs, some of them zeros.
  float real() {
    const auto exponent = static_cast<int32_t>(next() % 24) - 12;
    const auto mantissa = static_cast<float>(static_cast<int32_t>(next() % 4096) - 2048);
    return next() % 16 == 0 ? 0.f
                            : mantissa * (exponent < 0 ? 1.f / (1 << -exponent) : static_cast<float>(1 << exponent));
  }
  template <class T>
  std::vector<T> codes(size_t count) {
    std::vector<T> v(count);
    for (T& one : v) one = static_cast<T>(next());
    return v;
  }
  std::vector<float> reals(size_t count) {
    std::vector<float> v(count);
    for (float& one : v) one = real();
    return v;
  }

 private:
  uint32_t state_ = 20261130u;
};

class Told {
 public:
  template <class T>
  void take(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) bits_ = (bits_ ^ bytes[i]) * 0x100000001b3u;
  }
  void say(const char* name) const { std::printf("%s %016" PRIx64 "\n", name, bits_); }

 private:
  uint64_t bits_ = 0xcbf29ce484222325u;
};

constexpr int64_t kRows = 19, kColumns = 257;

// As many rows as there are numbers for, in 16 bits or 32.
std::vector<uint8_t> stored(const std::vector<float>& reals, DType type) {
  std::vector<uint8_t> bytes(reals.size() * static_cast<size_t>(bytes_of(type)));
  cpu::kernels_of(cpu::Isa::scalar).narrow(reals.data(), static_cast<int64_t>(reals.size()), bytes.data(), type);
  return bytes;
}

void quantise(Draw& draw) {
  Told told;
  const std::vector<float> reals = draw.reals(kRows * kColumns);
  for (const DType type : {DType::f32, DType::f16, DType::bf16})
    for (const bool symmetric : {true, false}) {
      const std::vector<uint8_t> x = stored(reals, type);
      std::vector<int8_t> q(kRows * kColumns);
      std::vector<float> scale(kRows), y(kRows * kColumns);
      std::vector<int32_t> zero(kRows);
      cpu::quantize_dynamic(x.data(), type, kRows, kColumns, kColumns, Granularity::rows, 0, symmetric, -127, 127,
                            q.data(), scale.data(), zero.data());
      cpu::dequantize(q.data(), DType::s8, kRows, kColumns, kColumns, Granularity::rows, 0, scale.data(), zero.data(),
                      y.data(), DType::f32);
      told.take(q), told.take(scale), told.take(zero), told.take(y);
      std::vector<uint8_t> fake(x.size());
      cpu::fake_quantize_dynamic(x.data(), type, kRows, kColumns, kColumns, Granularity::rows, 0, symmetric, -7, 7,
                                 fake.data(), scale.data(), zero.data());
      told.take(fake), told.take(scale);
    }
  told.say("quantise");
}

void transform(Draw& draw) {
  Told told;
  constexpr int64_t kWide = 3 * 80;
  const std::vector<float> x = draw.reals(kRows * kWide), weight = draw.reals(kWide);
  std::vector<int8_t> q(x.size());
  std::vector<float> scale(kRows);
  std::vector<int32_t> zero(kRows);
  const Hadamard by{hadamard_order(80), 0.111803f};
  cpu::hadamard_quantize(x.data(), DType::f32, kRows, kWide, kWide, by, true, -127, 127, q.data(), scale.data(),
                         zero.data());
  told.take(q), told.take(scale);
  for (const bool mean : {false, true}) {
    NormOperands norm;
    norm.subtract_mean = mean;
    norm.weight = weight.data();
    norm.eps = 1e-5f;
    cpu::norm_quantize(x.data(), DType::f32, kRows, kWide, kWide, norm, false, -128, 127, q.data(), scale.data(),
                       zero.data());
    told.take(q), told.take(scale), told.take(zero);
  }
  told.say("transform");
}

void multiply(Draw& draw, DType type, int64_t group) {
  Told told;
  constexpr int64_t kN = 70, kK = 320;
  LinearSpec spec;
  spec.n = kN;
  spec.k = kK;
  spec.w = &code_type(type);
  spec.group_size = group;
  spec.has_bias = true;
  std::vector<int8_t> codes = draw.codes<int8_t>(kN * kK);
  if (type == DType::s8)
    for (int8_t& code : codes) code = code == -128 ? int8_t{127} : code;
  std::vector<float> scale(static_cast<size_t>(kN * (group ? kK / group : 1)));
  for (float& one : scale) one = static_cast<float>(draw.next() % 1000 + 1) / 65536.f;
  const std::vector<float> bias = draw.reals(kN), reals = draw.reals(kRows * kK), residual = draw.reals(kRows * kN);
  for (int activation = 0; activation < kActivations; ++activation) {
    spec.activation = static_cast<Activation>(activation);
    spec.clamp_min = -0.75f;
    spec.clamp_max = 1.5f;
    spec.x_symmetric = activation % 2 == 0;
    std::vector<uint8_t> packed(cpu::packed_bytes(spec) + 64);
    void* at = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64;
    cpu::pack_linear(spec, {codes.data(), scale.data(), bias.data(), nullptr, nullptr, nullptr, nullptr}, at);
    for (const DType x_type : {DType::f32, DType::f16, DType::bf16}) {
      const std::vector<uint8_t> x = stored(reals, x_type);
      for (const int64_t m : {int64_t{1}, int64_t{3}, kRows}) {
        std::vector<float> y(static_cast<size_t>(m * kN));
        cpu::linear(spec, at, x.data(), x_type, m, kK, residual.data(), DType::f32, kN, y.data(), DType::f32);
        told.take(y);
      }
    }
  }
  told.say(type == DType::s8 ? "s8" : group ? "s4, groups" : "s4");
}

}  // namespace

int main() {
  bool right = true;
  for (int32_t i = 0; i < cpu::kIsas; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    if (!cpu::machine_has(isa)) continue;
    const bool passed = cpu::self_test(cpu::kernels_of(isa));
    std::fprintf(stderr, "%s: self-test %s\n", cpu::name_of(isa), passed ? "passed" : "FAILED");
    right = right && passed;
  }
  std::fprintf(stderr, "in use: %s\n", cpu::name_of(cpu::isa()));
  Draw draw;
  quantise(draw);
  transform(draw);
  multiply(draw, DType::s8, 0);
  multiply(draw, DType::s4, 0);
  multiply(draw, DType::s4, 32);
  return right ? 0 : 1;
}

#include "plan/tuned.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

namespace pyquant {

namespace {

constexpr size_t kRemarks = 100;
constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr size_t kFields = 12, kAllFields = 14;  // of a line

// What a choice holds for besides types and sizes.
enum class With : uint64_t { neither, zero_point, residual, both, any };

using Key = std::tuple<uint64_t, uint64_t, int64_t, int64_t, int64_t, int64_t>;  // gpu, types, group, n, k, bucket

struct Hash {
  size_t operator()(const Key& key) const {
    const auto [gpu, types, group, n, k, bucket] = key;
    uint64_t h = gpu;
    for (const uint64_t v : {types, static_cast<uint64_t>(group), static_cast<uint64_t>(n), static_cast<uint64_t>(k),
                             static_cast<uint64_t>(bucket)})
      h = (h ^ v) * 0x9e3779b97f4a7c15u, h ^= h >> 32;
    return h;
  }
};

struct Table {
  uint64_t generation = 0;
  std::unordered_map<Key, Tuned, Hash> choices;
};

std::atomic<const Table*> g_table{nullptr};
std::mutex g_mutex;  // writers of the table; the remarks
std::vector<std::unique_ptr<const Table>>& tables() {
  static auto& kept = *new std::vector<std::unique_ptr<const Table>>;  // threads may ask while the process ends
  return kept;
}
std::vector<std::string>& remarks() {
  static auto& kept = *new std::vector<std::string>;
  return kept;
}

With with(bool zero_point, bool residual) { return static_cast<With>(int{zero_point} + 2 * int{residual}); }

Key key_of(const GemmProblem& p, With with, uint64_t gpu) {
  const uint64_t types = static_cast<uint64_t>(p.x) | static_cast<uint64_t>(p.w) << 4 |
                         static_cast<uint64_t>(p.out) << 8 | static_cast<uint64_t>(p.w_layout) << 12 |
                         uint64_t{p.x_packed} << 16 | static_cast<uint64_t>(with) << 20;
  // Sizes are below 2^31; the table has no entry of weights with steps, whose problems must not find others'.
  return {gpu, types, p.group_size | p.step_size << 32, p.n, p.k, m_bucket(p.m)};
}

template <class T, size_t N>
T word_of(const std::string& word, const T (&values)[N], const char* (*name)(T)) {
  for (const T value : values)
    if (word == name(value)) return value;
  throw std::invalid_argument("tuned table: unknown word '" + word + "'");
}

DType type_of(const std::string& word) {
  return word_of<DType>(word, kTypes, [](DType type) { return name_of(type); });
}

WeightLayout layout_of(const std::string& word) {
  constexpr WeightLayout kLayouts[] = {WeightLayout::natural, WeightLayout::blocked128};
  return word_of<WeightLayout>(
      word, kLayouts, [](WeightLayout layout) { return layout == WeightLayout::natural ? "natural" : "blocked128"; });
}

int64_t number_of(const std::string& word) {
  size_t used = 0;
  int64_t value = -1;
  try {
    value = std::stoll(word, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != word.size() || value < 0 || value >= kMaxSize)
    throw std::invalid_argument("tuned table: '" + word + "' is not a whole number from 0 to 2147483647");
  return value;
}

double time_of(const std::string& word) {
  size_t used = 0;
  double value = -1;
  try {
    value = std::stod(word, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != word.size() || !(value >= 0) || value > 1e12)
    throw std::invalid_argument("tuned table: '" + word + "' is not a number of microseconds");
  return value;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

}  // namespace

int64_t m_bucket(int64_t m) {
  int64_t bucket = 1;
  while (bucket < m && bucket <= INT64_MAX / 2) bucket *= 2;
  return bucket >= 64 && bucket / 4 * 3 >= m ? bucket / 4 * 3 : bucket;
}

std::vector<std::string> set_tuned(const std::string& text) {
  auto table = std::make_unique<Table>();
  std::vector<std::string> left_out;
  for (const std::string& line : split(text, '\n')) {
    const std::vector<std::string> f = split(line, '\t');
    if (f.size() != kFields && f.size() != kAllFields)
      throw std::invalid_argument("tuned table: a line has 12 or 14 fields, got '" + line + "'");
    const double us = time_of(f[11]);
    const With known = f.size() == kFields ? With::any : with(number_of(f[12]) != 0, number_of(f[13]) != 0);
    GemmProblem p;
    p.x = type_of(f[1]), p.w = type_of(f[2]), p.out = type_of(f[3]);
    p.x_packed = number_of(f[4]) != 0;
    p.w_layout = layout_of(f[5]);
    p.group_size = number_of(f[6]), p.n = number_of(f[7]), p.k = number_of(f[8]), p.m = number_of(f[9]);
    const Row* row = find_row(f[10].c_str());
    if (row == nullptr && f[10] != "torch") {
      left_out.push_back(f[10] + ": no kernel of this build has that name (" + f[0] + ", M " + f[9] + ", N " + f[7] +
                         ", K " + f[8] + ")");
      continue;
    }
    table->choices[key_of(p, known, gpu_id(f[0].c_str()))] = {row, us};
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  table->generation = tables().size() + 1;
  g_table.store(table.get(), std::memory_order_release);
  tables().push_back(std::move(table));
  remarks() = left_out;
  return left_out;
}

const Tuned* find_tuned(const GemmProblem& problem, bool has_residual, const DeviceInfo& device) {
  const Table* table = g_table.load(std::memory_order_acquire);
  if (table == nullptr || device.gpu == 0 || table->choices.empty()) return nullptr;
  if (problem.experts > 0 || problem.image.channels > 0) return nullptr;  // measured for one matrix of each
  const bool zero_point = problem.has_zero_point;
  for (const With known : {with(zero_point, has_residual), with(zero_point, false), With::any}) {
    const auto found = table->choices.find(key_of(problem, known, device.gpu));
    if (found != table->choices.end()) return &found->second;
  }
  return nullptr;
}

uint64_t tuned_generation() {
  const Table* table = g_table.load(std::memory_order_acquire);
  return table == nullptr ? 0 : table->generation;
}

void remark_tuned(const std::string& text) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  std::vector<std::string>& kept = remarks();
  if (kept.size() < kRemarks && std::find(kept.begin(), kept.end(), text) == kept.end()) kept.push_back(text);
}

std::vector<std::string> tuned_remarks() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return remarks();
}

}  // namespace pyquant

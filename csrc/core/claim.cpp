#include "core/claim.h"

#include <mutex>
#include <set>
#include <string>

namespace pyquant {

bool claim(const char* name) {
  static std::mutex mutex;
  static std::set<std::string> claimed;
  const std::lock_guard<std::mutex> lock(mutex);
  return claimed.insert(name).second;
}

}  // namespace pyquant

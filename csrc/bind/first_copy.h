// Whether this library is the first copy of itself in the process: only that one registers ops. Others, opened under
// other paths, would replace its kernels, with torch's warnings, or define its ops again, which torch refuses.
#pragma once
#include "core/claim.h"

#define PYQUANT_TEXT_OF(NAME) #NAME
#define PYQUANT_TEXT(NAME) PYQUANT_TEXT_OF(NAME)

namespace pyquant::bind {

// library: the name of its ops, always the same. Hidden, so that every copy has its own answer.
inline bool is_first_copy(const char* library) {
  static const bool first = claim(library);
  return first;
}

}  // namespace pyquant::bind

// How an op becomes a kernel of torch: every one is entered by this.
#pragma once
#include <torch/csrc/stable/library.h>

#include <utility>

#include "core/float_state.h"

namespace pyquant::bind {

template <auto op>
struct Entered;

template <class Result, class... Arguments, Result (*op)(Arguments...)>
struct Entered<op> {
  static Result call(Arguments... arguments) {
    const DefaultFloats floats;
    return op(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace pyquant::bind

#define PYQUANT_BOX(op) TORCH_BOX(&pyquant::bind::Entered<op>::call)

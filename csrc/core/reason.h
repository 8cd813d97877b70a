// Refusals are values: what a kernel row wants, what the problem has. The error message, doctor() and the
// tests print the same text.
#pragma once
#include <cstdint>
#include <string>

namespace pyquant {

enum class Reason : int32_t {
  accepted = 0,
  wrong_device,        // needs sm >= wanted, device has got
  wrong_device_above,  // needs sm < wanted, device has got
  shared_memory,       // bytes of a block
  type_pair,           // x / w types differ from the row's
  out_type,
  k_multiple,  // K must be a multiple of wanted
  k_least,     // K must be at least wanted
  n_multiple,
  x_alignment,  // bytes
  w_alignment,
  out_alignment,
  residual_alignment,
  residual_type,
  group_size,     // a multiple of wanted; wanted 0: one scale per channel
  groups_only,    // the kernel needs a group size
  step_size,      // a multiple of wanted; wanted 0: no steps
  steps_only,     // the kernel needs steps
  image,          // channels a multiple of wanted; wanted 0: x is a matrix
  experts,        // wanted 1: the kernel needs experts; wanted 0: it takes one matrix of weights
  chosen_rows,    // x has to lie in the order of its rows
  exact_weights,  // the kernel rounds them
  m_limit,
  zero_point,  // of activations; not taken
  w_zero_point,
  x_packing,  // int4 activations: wanted 1 = two per byte
  w_layout,
  k_bound,     // K beyond the int32 bound
  size_limit,  // a dimension or byte offset beyond what the kernel indexes
};

struct Refusal {
  Reason reason = Reason::accepted;
  int64_t wanted = 0, got = 0;
  bool ok() const { return reason == Reason::accepted; }
};

std::string text_of(const Refusal& refusal);

}  // namespace pyquant

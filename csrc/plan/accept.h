// Why a row cannot take a problem on a device. Pure: no driver, no memory is looked at.
#pragma once
#include "core/device.h"
#include "core/problem.h"
#include "core/reason.h"
#include "plan/row.h"

namespace pyquant {

// Largest K (per group, with group scales) whose int32 sums are exact for every value of the codes' types.
int64_t k_bound(const GemmProblem& problem);

// What a block of an mma.sync row keeps of x and w in its stages, of a decode row of x; the kernel holds nothing more
// that counts.
int64_t shared_bytes(const Row& row);

// The first reason against the row, or accepted. Does not look at row.compiled.
Refusal accept(const Row& row, const GemmProblem& problem, bool has_residual, const DeviceInfo& device);

}  // namespace pyquant

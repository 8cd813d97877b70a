#include "core/reason.h"

namespace pyquant {

namespace {

std::string two(const char* before, int64_t wanted, const char* between, int64_t got, const char* after = "") {
  return before + std::to_string(wanted) + between + std::to_string(got) + after;
}

}  // namespace

std::string text_of(const Refusal& r) {
  switch (r.reason) {
    case Reason::accepted: return "accepted";
    case Reason::wrong_device:
      return two("needs compute capability ", r.wanted, " (times ten), the device has ", r.got);
    case Reason::wrong_device_above:
      return two("needs compute capability below ", r.wanted, " (times ten), the device has ", r.got);
    case Reason::shared_memory:
      return two("needs ", r.wanted, " bytes of shared memory a block, the device has ", r.got);
    case Reason::type_pair: return two("operand types: takes the set ", r.wanted, ", got type ", r.got);
    case Reason::out_type: return two("output type: takes the set ", r.wanted, ", got type ", r.got);
    case Reason::k_multiple: return two("K must be a multiple of ", r.wanted, ", got K = ", r.got);
    case Reason::k_least: return two("K must be at least ", r.wanted, ", got K = ", r.got);
    case Reason::n_multiple: return two("N must be a multiple of ", r.wanted, ", got N = ", r.got);
    case Reason::x_alignment: return two("x rows need ", r.wanted, "-byte alignment, got ", r.got);
    case Reason::w_alignment: return two("w rows need ", r.wanted, "-byte alignment, got ", r.got);
    case Reason::out_alignment: return two("output rows need ", r.wanted, "-byte alignment, got ", r.got);
    case Reason::residual_alignment: return two("residual rows need ", r.wanted, "-byte alignment, got ", r.got);
    case Reason::residual_type: return two("residual type: takes the set ", r.wanted, ", got type ", r.got);
    case Reason::group_size:
      return r.wanted == 0 ? two("group size must be ", r.wanted, " (0: one scale per channel), got ", r.got)
                           : two("group size must be a multiple of ", r.wanted, ", got ", r.got);
    case Reason::groups_only: return two("group size must be a multiple of ", r.wanted, ", got ", r.got);
    case Reason::step_size:
      return r.wanted == 0 ? two("codes that share a step must be ", r.wanted, " (no steps), got ", r.got)
                           : two("codes that share a step must be a multiple of ", r.wanted, ", got ", r.got);
    case Reason::steps_only: return two("codes that share a step must be a multiple of ", r.wanted, ", got ", r.got);
    case Reason::image:
      return r.wanted == 0 ? two("channels of images must be ", r.wanted, " (x is a matrix), got ", r.got)
                           : two("channels of images must be a multiple of ", r.wanted, ", got ", r.got);
    case Reason::experts:
      return r.wanted == 0 ? two("experts must be ", r.wanted, " (one matrix of weights), got ", r.got)
                           : two("experts must be at least ", r.wanted, ", got ", r.got);
    case Reason::exact_weights: return "weights are rounded, the problem wants them exact";
    case Reason::chosen_rows: return "rows of x must lie in the order of the rows of the result, got chosen ones";
    case Reason::m_limit: return two("M must be at most ", r.wanted, ", got M = ", r.got);
    case Reason::zero_point: return two("zero points of x: takes ", r.wanted, ", got ", r.got);
    case Reason::w_zero_point: return two("zero points of w: takes ", r.wanted, ", got ", r.got);
    case Reason::x_packing: return two("int4 codes of x in a byte: takes ", r.wanted + 1, ", got ", r.got + 1);
    case Reason::w_layout: return two("weight layout: takes the set ", r.wanted, ", got layout ", r.got);
    case Reason::k_bound: return two("K must be at most ", r.wanted, " for an exact int32 sum, got K = ", r.got);
    case Reason::size_limit: return two("a dimension must be at most ", r.wanted, ", got ", r.got);
  }
  return "unknown reason";
}

}  // namespace pyquant

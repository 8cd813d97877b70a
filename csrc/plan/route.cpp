#include "plan/route.h"

#include <limits>

#include "core/rows_layout.h"
#include "plan/chip.h"
#include "plan/accept.h"
#include "plan/cost.h"
#include "plan/expert_tiles.h"
#include "plan/tuned.h"

namespace pyquant {
namespace {

constexpr int64_t kDecoded = 16;  // rows of an expert, spread evenly

bool on_tensor_cores(const Row* row) { return row != nullptr && row->facts().engine != Engine::byte_wise; }

// The rules of the entries. Every candidate is a form of the activations and the row that is best for it.
class Router {
 public:
  Router(const Request& request, const DeviceInfo& device, PickRow pick)
      : request_(request), device_(device), pick_(pick) {}

  // int4 activations in the packing that the quickest row reads, if that pays for the pass.
  Route gemm() const {
    const GemmProblem& p = request_.problem;
    const Route given = with_row(Form::given, p);
    if (p.x != DType::s4) return given;
    const int64_t row = padded_row(p.k);
    const bool is_dense = row == p.k && p.ldx == p.k;
    if (!p.x_packed && !is_dense) return given;  // rows to be packed are copied as one piece
    return cheaper(given, rewritten(p.x_packed ? Form::bytes : Form::nibbles, DType::s4, p.k), kPassUs);
  }

  // Codes stay where they are if a tensor-core row reads them there, or none would read them rewritten.
  Route linear() const {
    if (is_float(request_.problem.x)) return padded();
    const Route given = with_row(Form::given, request_.problem);
    if (on_tensor_cores(given.row)) return given;
    if (given.row != nullptr && !on_tensor_cores(padded_bytes(DType::s8).row)) return given;
    return padded();
  }

  // A framework's product of float weights is tuned for its device: only a measurement puts a row in its place. Integer
  // weights it cannot read; dequantised they are twice a layer's bytes, in 16 bits, written and read again, most of the
  // time for few rows. A row reads the codes once: it is taken unless the framework was measured to be quicker or,
  // where many rows share the dequantised weights, is predicted to be.
  Route float_linear() const {
    const GemmProblem& p = request_.problem;
    if (p.experts > 0) return experts();  // no framework reads the codes of several
    const bool are_floats = is_float(p.w);
    const Tuned* tuned = find_tuned(p, request_.has_residual, device_);
    if (tuned == nullptr ? are_floats : tuned->row == nullptr) return {Form::framework, nullptr, p};
    const Route given = with_row(Form::given, p);
    const bool is_chosen =
        given.row != nullptr && (are_floats || tuned != nullptr || given.row->facts().engine == Engine::decode ||
                                 (on_tensor_cores(given.row) && !framework_is_quicker(*given.row, p, device_)));
    return is_chosen ? given : Route{Form::framework, nullptr, p};
  }

  // Rows that a table chooses, by kernels that read it, or copied first, which any kernel reads. While experts decode,
  // weights are as exact as those of one matrix.
  Route experts() const {
    GemmProblem p = request_.problem;
    p.exact_weights = p.m <= kDecoded * experts_at_work(p.m, p.experts);
    const Route given = with_row(Form::given, p);
    if (!p.chooses_rows) return given;
    p.chooses_rows = false;
    p.ldx = p.k;
    p.x_align = 16;
    return cheaper(given, with_row(Form::sorted, p), sorting_us(p, device_));
  }

  // Out of the images, or from rows that are written once more for every window they are in, which any kernel reads.
  Route conv() const {
    const Route given = with_row(Form::given, request_.problem);
    GemmProblem p = request_.problem;
    p.image = {};
    p.ldx = padded_row(p.k);
    p.x_align = 16;
    p.k = padded_k();
    const Route patches = with_row(Form::patches, p);
    if (given.row == nullptr) return patches;
    const double written = static_cast<double>(p.m * p.ldx) / chip_of(device_).dram_bytes_per_us;
    return cheaper(given, patches, kPassUs + written);
  }

 private:
  Route with_row(Form form, const GemmProblem& problem) const {
    return {form, pick_(problem, request_.has_residual, device_), problem};
  }

  // The form in new memory, which starts on a boundary of 16 bytes at least.
  Route rewritten(Form form, DType type, int64_t k) const {
    GemmProblem p = request_.problem;
    p.x = type;
    p.x_packed = form == Form::nibbles;
    p.ldx = padded_row(p.k);
    p.x_align = 16;
    p.k = k;
    return with_row(form, p);
  }

  // Padded rows meet the zero weights of the padding, up to the bound of K. Group scales and steps end at k.
  int64_t padded_k() const {
    GemmProblem p = request_.problem;
    p.x = DType::s8;
    const int64_t whole = padded_row(p.k);
    return p.group_size != 0 || p.step_size != 0 || whole > k_bound(p) ? p.k : whole;
  }

  Route padded_bytes(DType type) const { return rewritten(Form::bytes, type, padded_k()); }

  // Codes of 4 bits are also offered as int4, a byte or a nibble each: some rows multiply them faster.
  Route padded() const {
    const Route bytes = padded_bytes(DType::s8);
    if (!request_.int4_range) return bytes;
    return cheaper(cheaper(bytes, padded_bytes(DType::s4), 0), rewritten(Form::nibbles, DType::s4, padded_k()),
                   kPassUs);
  }

  double us(const Route& route) const {
    return route.row ? cost_us(*route.row, route.problem, device_) : std::numeric_limits<double>::infinity();
  }

  // The first of two routes, unless the second is predicted to take less time, what comes before it included.
  Route cheaper(const Route& first, const Route& second, double before_second_us) const {
    return us(second) + before_second_us < us(first) ? second : first;
  }

  const Request& request_;
  const DeviceInfo& device_;
  PickRow pick_;
};

}  // namespace

double sorting_us(const GemmProblem& sorted, const DeviceInfo& device) {
  const auto bytes = static_cast<double>(sorted.m * sorted.k * stored_bits(sorted.x, sorted.x_packed) / 8);
  return kPassUs + 2 * bytes / chip_of(device).dram_bytes_per_us;
}

Route route(const Request& request, const DeviceInfo& device, PickRow pick) {
  const Router router(request, device, pick);
  switch (request.entry) {
    case Entry::gemm: return router.gemm();
    case Entry::linear: return router.linear();
    case Entry::float_linear: return router.float_linear();
    case Entry::conv: return router.conv();
  }
  return {};
}

}  // namespace pyquant

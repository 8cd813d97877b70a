// The route of a product: the form in which the activations reach the kernel, the kernel's row, or the framework's own
// product instead. One pure function of the problem and the device; bindings carry out what it says and choose nothing.
#pragma once
#include "core/device.h"
#include "core/problem.h"
#include "plan/choice.h"
#include "plan/row.h"

namespace pyquant {

// The op that needs the product. They differ in what may be done to the activations:
//   gemm          read as they are given; int4 codes may also be rewritten into their other packing.
//   linear        weights are padded rows: floats are quantised into padded rows of bytes, codes may be rewritten so.
//   float_linear  the activations stay floats; the framework may multiply instead.
//   conv          codes that lie in images (GemmProblem::image), which may be written out as rows.
enum class Entry : int32_t { gemm, linear, float_linear, conv };
constexpr const char* kEntryNames[] = {"gemm", "linear", "float_linear", "conv"};  // by value

// How the row finds the activations, by what is done to them first.
//   given      nothing: in the caller's memory.
//   bytes      rows of padded_row(k) bytes, a code each: quantised floats, rewritten codes.
//   nibbles    such rows, two codes a byte: one more pass, or for gemm a pass over the caller's bytes.
//   framework  there is no row: the framework multiplies floats, of weights that are codes their dequantised values.
//   patches    rows of padded_row(k) bytes again, that the window reads out of the images.
//   sorted     chosen rows copied in the order of their experts, one behind the other.
enum class Form : int32_t { given, bytes, nibbles, framework, patches, sorted };
constexpr const char* kFormNames[] = {"given", "bytes", "nibbles", "framework", "patches", "sorted"};  // by value

struct Request {
  Entry entry = Entry::gemm;
  GemmProblem problem;  // as the caller has it: of x its type, row length and alignment; linear: x may be floats
  bool has_residual = false;
  bool int4_range = false;  // linear: every code of x lies in [-8, 7], whatever type holds it
};

struct Route {
  Form form = Form::given;
  const Row* row = nullptr;  // null unless form is framework: no row takes the problem, select() says why
  GemmProblem problem;       // as the row gets it
};

// Picks the row of one form: choose(), which remembers, or select() over the whole table.
using PickRow = const Row* (*)(const GemmProblem& problem, bool has_residual, const DeviceInfo& device);

// Microseconds to copy chosen rows in the order of their experts, for the problem of Form::sorted.
double sorting_us(const GemmProblem& sorted, const DeviceInfo& device);

Route route(const Request& request, const DeviceInfo& device, PickRow pick = &choose);

}  // namespace pyquant

#include "bind/weight_only_cpu.h"

#include <array>
#include <cstring>

#include "bind/cpu_tensor.h"
#include "bind/float_layer.h"
#include "bind/grouped_cpu.h"
#include "cpu/weight_only.h"

namespace pyquant::bind {
namespace {

// The layer's weights and epilogue, without rows and results; refuses zero points that are no codes. w: dense rows, or
// owned by `keep`.
cpu::WeightOnlyLayer layer_of(FloatLayer& layer, const Tensor& w, const MaybeTensor& w_zero_point) {
  const GemmProblem& p = layer.problem;
  if (w_zero_point) {
    const CodeType& code = code_type(p.w);
    zero_points("w_zero_point", layer.operands.w_zero_point, w_zero_point->numel(), code.qmin, code.qmax);
  }
  const Matrix weights = matrix(w);
  layer.keep.push_back(weights.keep);
  cpu::WeightOnlyLayer made;
  made.weights.codes = weights.data;
  made.weights.type = p.w;
  made.weights.n = p.n;
  made.weights.k = p.k;
  made.weights.row_bytes = weights.ld;
  made.weights.group_size = p.group_size;
  made.weights.scale = layer.operands.w_scale;
  made.weights.zero_point = layer.operands.w_zero_point;
  made.epilogue.n = p.n;
  made.epilogue.bias = layer.operands.bias;
  made.epilogue.activation = layer.epilogue.activation;
  made.epilogue.clamp_min = layer.epilogue.clamp_min;
  made.epilogue.clamp_max = layer.epilogue.clamp_max;
  made.epilogue.residual = layer.operands.residual;
  made.epilogue.residual_type = p.residual;
  made.epilogue.ldr = p.ldr;
  made.epilogue.out_type = p.out;
  return made;
}

// The rows of layers of one K, type and group size, made once for all of them in each form that they take: m rows of x,
// those that `rows` names.
class PreparedRows {
 public:
  // of_layer: how many rows each has.
  PreparedRows(const cpu::IntegerWeights& weights, const Tensor& x, int64_t m, const int64_t* rows,
               const std::vector<int64_t>& of_layer)
      : weights_(weights), from_(matrix(x)) {
    for (const int64_t count : of_layer) {
      if (count == 0) continue;
      Made& made = made_[static_cast<size_t>(cpu::form_of(weights, from_.type, count))];
      if (made.x == nullptr) made = make(cpu::form_of(weights, from_.type, count), m, rows);
    }
  }

  // Of a layer that has `count` of them, from `first` on.
  cpu::LayerRows of(int64_t first, int64_t count) const {
    const cpu::RowsForm form = cpu::form_of(weights_, from_.type, count);
    const Made& made = made_[static_cast<size_t>(form)];
    if (made.x == nullptr) return {form, nullptr, 0, count};
    const int64_t bytes = form == cpu::RowsForm::ordered ? 4 : 2;
    return {form, static_cast<const char*>(made.x) + first * made.ld * bytes, made.ld, count};
  }

 private:
  struct Made {
    MaybeTensor keep;
    const void* x = nullptr;
    int64_t ld = 0;
  };

  Made make(cpu::RowsForm form, int64_t m, const int64_t* rows) const {
    if (form == cpu::RowsForm::pairs && rows == nullptr && weights_.k % 2 == 0)
      return {std::nullopt, from_.data, from_.ld};
    const int64_t columns = cpu::columns_in(form, weights_);
    const ScalarType type = form == cpu::RowsForm::ordered ? ScalarType::Float : ScalarType::BFloat16;
    const Tensor out = empty_cpu({m, columns}, type);
    cpu::prepare_rows(form, weights_, from_.data, from_.type, m, from_.ld, out.mutable_data_ptr(), rows);
    return {out, out.const_data_ptr(), columns};
  }

  const cpu::IntegerWeights& weights_;
  const Matrix from_;
  std::array<Made, 3> made_;
};

}  // namespace

Tensor weight_only_linear_cpu(const Tensor& x, const Tensor& w, const Tensor& w_scale, MaybeTensor w_zero_point,
                              MaybeTensor bias, MaybeTensor residual, int64_t w_bits, int64_t group_size,
                              Text activation, double clamp_min, double clamp_max,
                              std::optional<ScalarType> out_dtype) {
  FloatLayer layer = weight_only_layer(x, w, w_scale, w_zero_point, bias, residual, w_bits, group_size, activation,
                                       clamp_min, clamp_max, out_dtype);
  cpu::WeightOnlyLayer call = layer_of(layer, w, w_zero_point);
  const int64_t m = layer.problem.m;
  const Tensor out = empty_cpu(layer.out_shape, layer.out_type);
  if (out.numel() == 0) return out;
  const PreparedRows rows(call.weights, x, m, nullptr, {m});
  call.rows = rows.of(0, m);
  call.epilogue.out = out.mutable_data_ptr();
  cpu::weight_only(call);
  return out;
}

Tensor grouped_weight_only_cpu(const Tensor& x, std::vector<Tensor> w, std::vector<Tensor> w_scale,
                               std::vector<Tensor> w_zero_point, std::vector<Tensor> bias, const Tensor& ends,
                               int64_t w_bits, int64_t group_size, Text activation, double clamp_min, double clamp_max,
                               MaybeTensor rows) {
  GroupedFloatLayers g = grouped_weight_only_layers(x, w, w_scale, w_zero_point, bias, ends, w_bits, group_size,
                                                    activation, clamp_min, clamp_max, rows);
  std::vector<cpu::WeightOnlyLayer> layers;
  for (size_t i = 0; i < w.size(); ++i)
    layers.push_back(layer_of(g.layers[i], w[i], w_zero_point.empty() ? MaybeTensor() : MaybeTensor(w_zero_point[i])));
  const std::vector<int64_t> counts = counts_of(g, w.size(), x.size(0));
  const int64_t n = layers[0].weights.n;
  const Tensor out = empty_cpu({g.count, n}, g.layers[0].out_type);
  if (out.numel() == 0) return out;
  const int64_t present = g.ends[w.size() - 1], row_bytes = n * bits_of(layers[0].epilogue.out_type) / 8;
  auto* const results = static_cast<char*>(out.mutable_data_ptr());
  std::memset(results + present * row_bytes, 0, static_cast<size_t>((g.count - present) * row_bytes));
  if (present == 0) return out;
  const PreparedRows of_layers(layers[0].weights, x, present, g.rows, counts);
  int64_t first = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].rows = of_layers.of(first, counts[i]);
    layers[i].epilogue.out = results + first * row_bytes;
    first += counts[i];
  }
  cpu::weight_only_all(layers);
  return out;
}

}  // namespace pyquant::bind

// Linear layers with ReLU between them, of packed weights, in one call: a request of a few candidates spends more time
// between the calls of torch than in its products.
#include "dense_layers/products.h"
#include "jagged.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 21;  // multiplications
constexpr int64_t kBlock = 64;               // rows that pass through all layers together: they stay in the L2 cache

// Built once per model.
class DenseLayers {
 public:
  DenseLayers(const std::vector<Input>& weights, const std::vector<OptionalInput>& biases, bool ends_with_relu)
      : ends_with_relu(ends_with_relu) {
    if (weights.empty() || biases.size() != weights.size()) refuse("expected a bias, or none, for each of the layers");
    for (size_t n = 0; n < weights.size(); ++n) {
      layers.emplace_back(weights[n], biases[n], static_cast<int64_t>(n));
      if (n > 0 && layers[n].num_inputs != layers[n - 1].num_outputs)
        refuse("layer " + std::to_string(n) + " has " + std::to_string(layers[n].num_inputs) + " inputs, expected " +
               std::to_string(layers[n - 1].num_outputs));
      widest = std::max(widest, layers[n].width);
      work += layers[n].width * layers[n].num_inputs;
    }
  }

  const bool ends_with_relu;
  std::vector<PackedLayer> layers;
  int64_t widest = 0, work = 0;  // work: multiplications per row
};

// What the sums of the first layer start from: row `rows[n]` for row n, or one row for all.
struct Start {
  const float* from;
  const int64_t* rows;
};

struct Call {
  const DenseLayers& dense;
  const float* in;
  Start start;
  float* out;
};

RECMILL_INLINE void copy_padded(const float* from, const PackedLayer& layer, float* to) {
  std::copy(from, from + layer.num_outputs, to);
  std::fill(to + layer.num_outputs, to + layer.width, 0.0f);
}

template <typename V>
RECMILL_INLINE void run_layer(const PackedLayer& layer, bool has_relu, int64_t count, const Rows& rows) {
  if (has_relu) multiply_rows<V, true>(count, layer.width, layer.num_inputs, rows, layer.right());
  else multiply_rows<V, false>(count, layer.width, layer.num_inputs, rows, layer.right());
}

// Rows [first, first + count), at most kBlock.
template <typename V>
RECMILL_INLINE void run_block(const Call& call, int64_t first, int64_t count, float* one, float* other) {
  const DenseLayers& dense = call.dense;
  const int64_t num_layers = static_cast<int64_t>(dense.layers.size());
  const float* from = call.in + first * dense.layers[0].num_inputs;
  int64_t from_step = dense.layers[0].num_inputs;
  for (int64_t n = 0; n < num_layers; ++n) {
    const PackedLayer& layer = dense.layers[n];
    const bool is_last = n + 1 == num_layers, fits = is_last && layer.width == layer.num_outputs;
    float* to = fits ? call.out + first * layer.width : one;
    Rows rows{from, from_step, layer.bias.data(), 0, to, layer.width};
    if (n == 0 && call.start.from != nullptr) {
      for (int64_t row = 0; row < count; ++row) {
        const int64_t own = call.start.rows == nullptr ? 0 : call.start.rows[first + row];
        copy_padded(call.start.from + own * layer.num_outputs, layer, to + row * layer.width);
      }
      rows.start = to;
      rows.start_step = layer.width;
    }
    run_layer<V>(layer, !is_last || dense.ends_with_relu, count, rows);
    if (is_last && !fits)
      for (int64_t row = 0; row < count; ++row)
        std::copy(to + row * layer.width, to + row * layer.width + layer.num_outputs,
                  call.out + (first + row) * layer.num_outputs);
    from = to;
    from_step = layer.width;
    std::swap(one, other);
  }
}

void dense_layers(const DenseLayers& dense, const Input& in, const OptionalInput& start, const OptionalInput& rows,
                  const Output& out) {
  const PackedLayer &first = dense.layers.front(), &last = dense.layers.back();
  const int64_t num_rows = in.dim(0);
  if (in.ndim() != 2 || in.dim(1) != first.num_inputs)
    refuse("expected rows of " + std::to_string(first.num_inputs) + " inputs");
  const Call call{dense, in.as<const float>("rows"),
                  {as_or_null<float>(start, "start"), as_or_null<int64_t>(rows, "start_rows", num_rows)},
                  out.as<float>("out", num_rows * last.num_outputs)};
  if (start) {
    if (start->ndim() != 2 || start->dim(1) != first.num_outputs || (!rows && start->dim(0) != 1))
      refuse("start: expected one row of " + std::to_string(first.num_outputs) + " numbers, or a row for each row");
    if (rows && !are_rows(call.start.rows, 0, num_rows, start->dim(0)))
      refuse("start_rows: expected rows in [0, " + std::to_string(start->dim(0)) + ")");
  }
  const int64_t blocks = (num_rows + kBlock - 1) / kBlock;
  const int threads = std::min<int64_t>(std::max<int64_t>(blocks, 1), choose_threads(dense.work * num_rows, kWorkPerThread));
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(2 * kBlock * dense.widest);
    float *one = scratch.take(kBlock * dense.widest), *other = scratch.take(kBlock * dense.widest);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
      run_widest([&](auto lanes) RECMILL_BODY {
        run_block<typename decltype(lanes)::V>(call, block * kBlock, std::min(kBlock, num_rows - block * kBlock), one,
                                               other);
      });
  }
}

}  // namespace

void bind_dense_layers(nb::module_& m) {
  nb::class_<DenseLayers>(m, "DenseLayers")
      .def(nb::init<const std::vector<Input>&, const std::vector<OptionalInput>&, bool>());
  add_function(m, "dense_layers", &dense_layers);
}

}  // namespace recmill

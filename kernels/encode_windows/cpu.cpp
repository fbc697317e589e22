// A transformer over short windows and its attention pooling in one call, without gradients. The rows of neighbouring
// windows pass through a layer together; everything that they need stays in the L2 cache.
#include <cmath>

#include "dense_layers/products.h"
#include "windows.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 21;  // multiplications
constexpr int64_t kBlock = 64;               // rows of neighbouring windows that are encoded together; queries of a window

// x + attention(norm(x)) + feed_forward(norm(x)), with the norm's scale and shift in the layers.
struct Block {
  PackedLayer packed;      // queries, keys and values, head by head; heads are padded to whole panels
  PackedLayer project;     // of the padded heads
  PackedLayer first, last;  // of the feed-forward layer
};

// Built once per model.
class WindowEncoder {
 public:
  // `arrays` has seven per block: weights and biases of queries (scaled), keys and values, of the layer behind the heads,
  // and of the first feed-forward layer; then the weights of the last one, whose bias is part of that behind the heads.
  WindowEncoder(const std::vector<Input>& arrays, const OptionalInput& positions, const Input& query, const Input& mix,
                const Input& mix_bias, int64_t num_heads, double epsilon)
      : query(query, std::nullopt, 0),
        mix(mix, mix_bias, 0),
        num_heads(num_heads),
        width(this->query.num_inputs),
        padded(this->query.num_inputs + (kPanel - this->query.num_inputs % kPanel) % kPanel),
        epsilon(static_cast<float>(epsilon)) {
    constexpr size_t kArrays = 7;
    if (arrays.size() % kArrays || num_heads < 1) refuse("expected seven arrays per block, and at least one head");
    for (size_t n = 0; n < arrays.size(); n += kArrays) {
      const int64_t number = static_cast<int64_t>(n / kArrays);
      blocks.push_back({{arrays[n], arrays[n + 1], number},
                        {arrays[n + 2], arrays[n + 3], number},
                        {arrays[n + 4], arrays[n + 5], number},
                        {arrays[n + 6], std::nullopt, number}});
      check(blocks.back());
    }
    if (this->mix.num_inputs != this->query.num_outputs * width) refuse("mix: expected a column per head and number");
    if (positions) {
      num_positions = positions->dim(0);
      this->positions.resize(num_positions * padded);
      const float* from = positions->as<const float>("positions", num_positions * width);
      for (int64_t row = 0; row < num_positions; ++row)
        std::copy(from + row * width, from + (row + 1) * width, this->positions.begin() + row * padded);
    }
    mask.resize(padded);
    std::fill(mask.begin(), mask.begin() + width, 1.0f);
  }

  int64_t head_room() const { return blocks.empty() ? 0 : blocks[0].packed.num_outputs / 3 / num_heads; }
  // Multiplications per row, but those of attention.
  int64_t work() const {
    int64_t sum = query.width * width;
    for (const Block& block : blocks)
      for (const PackedLayer* layer : {&block.packed, &block.project, &block.first, &block.last})
        sum += layer->width * layer->num_inputs;
    return sum;
  }

  std::vector<Block> blocks;
  PackedLayer query, mix;
  std::vector<float> positions, mask;  // positions: the newest first; mask: 1 for numbers of a row, 0 for its padding
  const int64_t num_heads, width, padded;
  const float epsilon;
  int64_t num_positions = 0;

 private:
  void check(const Block& block) const {
    const int64_t heads = block.packed.num_outputs / 3;
    if (block.packed.num_inputs != width || block.packed.num_outputs % (3 * num_heads * kPanel) ||
        block.packed.num_outputs != blocks[0].packed.num_outputs)
      refuse("expected queries, keys and values of " + std::to_string(num_heads) + " heads, each padded to 16 numbers");
    if (block.project.num_inputs != heads || block.project.num_outputs != width || block.first.num_inputs != width ||
        block.last.num_inputs != block.first.num_outputs || block.last.num_outputs != width)
      refuse("expected layers from and to rows of " + std::to_string(width));
  }
};

// Windows [first, last) with `rows` rows in all.
struct Group {
  int64_t first, last, rows, longest;
};

std::vector<Group> group_windows(const Windows& windows) {
  std::vector<Group> groups;
  for (int64_t w = 0; w < windows.count; ++w) {
    const int64_t length = windows.lengths[w];
    if (groups.empty() || groups.back().rows + length > kBlock || groups.back().last - groups.back().first == kBlock)
      groups.push_back({w, w, 0, 0});
    Group& group = groups.back();
    group.last = w + 1;
    group.rows += length;
    group.longest = std::max(group.longest, length);
  }
  return groups;
}

// The matrices of a group.
struct Room {
  int64_t rows, count, longest;
  int64_t size = 0;
  float *hidden, *normed, *packed, *attended, *inner, *queries, *scores, *zeros, *weights, *pooled, *mixed;

  Room(const WindowEncoder& encoder, int64_t rows, int64_t count, int64_t longest)
      : rows(rows), count(count), longest(longest) {
    place(encoder, [this](float**, int64_t floats) { size += round_up(floats, kPanel); });
  }

  void take(const WindowEncoder& encoder, Scratch& scratch) {
    place(encoder, [&scratch](float** matrix, int64_t floats) { *matrix = scratch.take(floats); });
    std::fill(zeros, zeros + std::max(kBlock, encoder.head_room()), 0.0f);
  }

 private:
  template <typename Take>
  void place(const WindowEncoder& encoder, Take take) {
    take(&hidden, rows * encoder.padded);
    take(&weights, rows * encoder.query.width);
    take(&pooled, count * (round_up(encoder.mix.num_inputs, kPanel) + kPanel));
    take(&mixed, count * encoder.mix.width);
    take(&zeros, std::max(kBlock, encoder.head_room()));
    int64_t heads = 0, widest = 0;
    for (const Block& block : encoder.blocks) {
      heads = block.project.num_inputs;
      widest = std::max(widest, block.first.width);
    }
    take(&normed, rows * encoder.padded);
    take(&packed, rows * 3 * heads);
    take(&attended, rows * heads);
    take(&inner, rows * widest);
    take(&queries, encoder.head_room() * kBlock);
    take(&scores, kBlock * longest);
  }
};

template <typename V>
RECMILL_INLINE void multiply_layer(const PackedLayer& layer, int64_t count, const float* from, int64_t from_step,
                                   const float* start, int64_t start_step, float* to) {
  multiply_rows<V, false>(count, layer.width, layer.num_inputs,
                          {from, from_step, start, start_step, to, layer.width}, layer.right());
}

template <typename V>
RECMILL_INLINE void normalise(const WindowEncoder& encoder, const float* from, float* to) {
  constexpr int64_t kStep = lanes_of<V>();
  V sums = {};
  for (int64_t i = 0; i < encoder.padded; i += kStep) sums += read<V>(from + i);
  const float mean = sum_of(sums) / static_cast<float>(encoder.width);
  V squares = {};
  for (int64_t i = 0; i < encoder.padded; i += kStep) {
    const V own = (read<V>(from + i) - mean) * read<V>(encoder.mask.data() + i);
    squares += own * own;
    write<V>(to + i, own);
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(encoder.width) + encoder.epsilon);
  for (int64_t i = 0; i < encoder.padded; i += kStep) write<V>(to + i, read<V>(to + i) * scale);
}

// exp(score - highest score of its column) in place for one vector of columns; returns their sums.
template <typename V>
RECMILL_INLINE V soften_columns(float* scores, int64_t rows, int64_t step) {
  V most = read<V>(scores), sum = {};
  for (int64_t row = 1; row < rows; ++row) most = larger(most, read<V>(scores + row * step));
  for (int64_t row = 0; row < rows; ++row) {
    const V value = exp_of(V(read<V>(scores + row * step) - most));
    write<V>(scores + row * step, value);
    sum += value;
  }
  return sum;
}

// The attention of the rows of one window to one another, for one head. Scores have a column per query, so that their
// sums need no sums across a vector.
template <typename V>
RECMILL_INLINE void attend_window(const WindowEncoder& encoder, const Room& room, const float* packed, int64_t step,
                                  int64_t length, float* attended) {
  const int64_t heads = step / 3, own = encoder.head_room();
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    const int64_t count = std::min(kBlock, length - begin), wide = round_up(count, kPanel);
    for (int64_t i = 0; i < own; ++i) {
      for (int64_t row = 0; row < count; ++row) room.queries[i * wide + row] = packed[(begin + row) * step + i];
      for (int64_t row = count; row < wide; ++row) room.queries[i * wide + row] = 0.0f;
    }
    multiply_rows<V, false>(length, wide, own, {packed + heads, step, room.zeros, 0, room.scores, wide},
                            {room.queries, kPanel, wide});
    float sums[kBlock];
    for (int64_t at = 0; at < wide; at += lanes_of<V>())
      write<V>(sums + at, soften_columns<V>(room.scores + at, length, wide));
    float* to = attended + begin * heads;
    multiply_rows<V, false, true>(count, own, length, {room.scores, wide, room.zeros, 0, to, heads},
                            {packed + 2 * heads, kPanel, step});
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < own; i += lanes_of<V>())
        write<V>(to + row * heads + i, read<V>(to + row * heads + i) * (1.0f / sums[row]));
  }
}

template <typename V>
RECMILL_INLINE void apply_block(const WindowEncoder& encoder, const Block& block, const Windows& windows,
                                const Group& group, const Room& room, bool adds_positions) {
  const int64_t rows = group.rows, padded = encoder.padded, heads = block.project.num_inputs;
  for (int64_t row = 0; row < rows; ++row)
    normalise<V>(encoder, room.hidden + row * padded, room.normed + row * padded);
  multiply_layer<V>(block.packed, rows, room.normed, padded, block.packed.bias.data(), 0, room.packed);
  for (int64_t w = group.first; w < group.last; ++w)
    for (int64_t head = 0; head < encoder.num_heads; ++head) {
      const int64_t place = windows.places[w] - windows.places[group.first], at = head * encoder.head_room();
      attend_window<V>(encoder, room, room.packed + place * 3 * heads + at, 3 * heads, windows.lengths[w],
                       room.attended + place * heads + at);
    }
  multiply_layer<V>(block.first, rows, room.normed, padded, block.first.bias.data(), 0, room.inner);
  for (int64_t i = 0; i < rows * block.first.width; i += lanes_of<V>())
    write<V>(room.inner + i, gelu_of(read<V>(room.inner + i)));
  multiply_layer<V>(block.project, rows, room.attended, heads, room.hidden, padded, room.hidden);
  multiply_layer<V>(block.last, rows, room.inner, block.first.width, room.hidden, padded, room.hidden);
  for (int64_t w = group.first, row = 0; w < group.last; ++w)
    for (int64_t age = windows.lengths[w]; age-- > 0; ++row)
      for (int64_t i = 0; i < padded; i += lanes_of<V>()) {
        V sum = read<V>(room.hidden + row * padded + i) + read<V>(block.project.bias.data() + i);
        if (adds_positions) sum += read<V>(encoder.positions.data() + age * padded + i);
        write<V>(room.hidden + row * padded + i, sum);
      }
}

// The mean of a window's rows for each head of the pooling, weighted by the softmax of their scores.
template <typename V>
RECMILL_INLINE void pool_window(const WindowEncoder& encoder, const float* hidden, float* weights, int64_t length,
                                float* to) {
  constexpr int64_t kStep = lanes_of<V>();
  const int64_t step = encoder.query.width;
  for (int64_t at = 0; at < step; at += kStep) {
    const V sum = soften_columns<V>(weights + at, length, step);
    for (int64_t row = 0; row < length; ++row)
      write<V>(weights + row * step + at, read<V>(weights + row * step + at) / sum);
  }
  // In ascending order: the padding of a head is overwritten by the next.
  for (int64_t head = 0; head < encoder.query.num_outputs; ++head)
    for (int64_t i = 0; i < encoder.padded; i += kStep) {
      V sum = {};
      for (int64_t row = 0; row < length; ++row)
        sum += weights[row * step + head] * read<V>(hidden + row * encoder.padded + i);
      write<V>(to + head * encoder.width + i, sum);
    }
}

template <typename V>
RECMILL_INLINE void encode_group(const WindowEncoder& encoder, const float* rows, const Windows& windows,
                                 const Group& group, const Room& room, float* out) {
  const int64_t width = encoder.width, padded = encoder.padded;
  float* to = room.hidden;
  for (int64_t w = group.first; w < group.last; ++w)
    for (int64_t row = 0; row < windows.lengths[w]; ++row, to += padded) {
      const float* from = rows + (windows.starts[w] + row) * width;
      std::copy(from, from + width, to);
      std::fill(to + width, to + padded, 0.0f);
    }
  for (size_t n = 0; n < encoder.blocks.size(); ++n)
    apply_block<V>(encoder, encoder.blocks[n], windows, group, room, n == 0 && encoder.num_positions > 0);
  multiply_layer<V>(encoder.query, group.rows, room.hidden, padded, encoder.query.bias.data(), 0, room.weights);
  const int64_t step = round_up(encoder.mix.num_inputs, kPanel) + kPanel, count = group.last - group.first;
  for (int64_t w = group.first; w < group.last; ++w) {
    const int64_t place = windows.places[w] - windows.places[group.first];
    float* pooled = room.pooled + (w - group.first) * step;
    if (windows.lengths[w] == 0) std::fill(pooled, pooled + step, 0.0f);
    else
      pool_window<V>(encoder, room.hidden + place * padded, room.weights + place * encoder.query.width,
                     windows.lengths[w], pooled);
  }
  multiply_layer<V>(encoder.mix, count, room.pooled, step, encoder.mix.bias.data(), 0, room.mixed);
  for (int64_t w = group.first; w < group.last; ++w) {
    const float* from = room.mixed + (w - group.first) * encoder.mix.width;
    float* own = out + w * encoder.mix.num_outputs;
    if (windows.lengths[w] == 0) std::fill(own, own + encoder.mix.num_outputs, 0.0f);
    else std::copy(from, from + encoder.mix.num_outputs, own);
  }
}

void encode_windows(const WindowEncoder& encoder, const Input& rows, const Input& starts, const Input& lengths,
                    const Output& out) {
  const float* from = rows.as<const float>("rows");
  if (rows.ndim() != 2 || rows.dim(1) != encoder.width)
    refuse("expected rows of " + std::to_string(encoder.width) + " numbers");
  const Windows windows(starts, lengths, rows.dim(0));
  if (encoder.num_positions > 0 && windows.longest > encoder.num_positions)
    refuse("a window has " + std::to_string(windows.longest) + " rows, at most " +
           std::to_string(encoder.num_positions) + " have a position");
  float* to = out.as<float>("out", windows.count * encoder.mix.num_outputs);
  const std::vector<Group> groups = group_windows(windows);
  int64_t most_rows = 0, most_windows = 0;
  for (const Group& group : groups) {
    most_rows = std::max(most_rows, group.rows);
    most_windows = std::max(most_windows, group.last - group.first);
  }
  const int64_t attention = static_cast<int64_t>(encoder.blocks.size()) * 2 * windows.work(encoder.width);
  const int64_t work = windows.places[windows.count] * encoder.work() + attention;
  const int threads =
      std::min<int64_t>(std::max<int64_t>(1, static_cast<int64_t>(groups.size())), choose_threads(work, kWorkPerThread));
#pragma omp parallel num_threads(threads)
  {
    Room room(encoder, most_rows, most_windows, windows.longest);
    Scratch scratch(room.size);
    room.take(encoder, scratch);
#pragma omp for schedule(dynamic)
    for (int64_t group = 0; group < static_cast<int64_t>(groups.size()); ++group)
      run_widest([&](auto lanes) RECMILL_BODY {
        encode_group<typename decltype(lanes)::V>(encoder, from, windows, groups[group], room, to);
      });
  }
}

}  // namespace

void bind_encode_windows(nb::module_& m) {
  nb::class_<WindowEncoder>(m, "WindowEncoder")
      .def(nb::init<const std::vector<Input>&, const OptionalInput&, const Input&, const Input&, const Input&, int64_t,
                    double>());
  add_function(m, "encode_windows", &encode_windows);
}

}  // namespace recmill

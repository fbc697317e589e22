// Causal attention with silu instead of softmax inside windows of a buffer of rows, forward and backward.
//
// The weight of a pair of rows does not depend on the window. It is computed once per chunk of overlapping windows, and
// so are sums: what a row sums in a window is what it sums in the next window that starts later, and the rows between
// the two starts.
//
//     windows:   [a b c d]            d in the second window:   wb b + wc c + wd d
//                  [b c d e]          d in the first window:    the same + wa a
#include <initializer_list>

#include "heads.h"
#include "windows.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;  // multiplications
constexpr int64_t kBlock = 16;               // queries processed together: pairs above the diagonal are mostly skipped
constexpr int64_t kSlabs = 64;               // partial sums of the bias's gradient, whatever the number of threads

struct Task {
  const float* packed;
  const float* bias_ascending;  // bias of distance d at [num_biases - 1 - d], then a vector of zeros
  int64_t num_biases;
  float scale;
  bool is_last_only;
};

// Scratch of a chunk for one head.
struct Scratch {
  int64_t stride;  // of matrices of pairs: whole vectors, and one to spare
  float *query, *key, *key_across, *value, *value_across, *sums, *key_sums, *value_sums;
  float *weights, *slopes, *changes;
  std::vector<int64_t> rows, place;  // rows of the chunk that have queries, in order; a row's place among them

  static int64_t room(int64_t length, const Shape& shape) {
    const int64_t wide = round_up(length, kLanes) + kLanes;
    return 8 * wide * shape.padded + 3 * wide * wide;
  }

  Scratch(int64_t length, const Shape& shape, float* room) : stride(round_up(length, kLanes) + kLanes) {
    for (float** matrix : {&query, &key, &key_across, &value, &value_across, &sums, &key_sums, &value_sums}) {
      *matrix = room;
      room += stride * shape.padded;
    }
    for (float** matrix : {&weights, &slopes, &changes}) {
      *matrix = room;
      room += stride * stride;
    }
  }

  int64_t count() const { return static_cast<int64_t>(rows.size()); }
};

struct Span {  // of a window's queries: rows [first, last) of the chunk, results from row `place`
  int64_t first, last, place;
};

Span find_span(const Windows& windows, int64_t w, const Chunk& chunk, bool is_last_only) {
  const int64_t first = windows.starts[w] - chunk.start, last = first + windows.lengths[w];
  if (!is_last_only) return {first, last, windows.places[w]};
  return {std::max(first, last - 1), last, w};
}

void find_rows(const Windows& windows, const int64_t* order, const Chunk& chunk, bool is_last_only, Scratch& scratch) {
  scratch.place.assign(chunk.length + 1, -1);
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const Span span = find_span(windows, order[at], chunk, is_last_only);
    for (int64_t row = span.first; row < span.last; ++row) scratch.place[row] = 0;
  }
  scratch.rows.clear();
  for (int64_t row = 0; row < chunk.length; ++row) {
    if (scratch.place[row] < 0) continue;
    scratch.place[row] = scratch.count();
    scratch.rows.push_back(row);
  }
}

// Weights of all pairs of a row with a query and a row before it; with kSlopes also their derivatives by the score.
template <bool kSlopes>
RECMILL_INLINE void fill_weights(const Chunk& chunk, const Shape& shape, const Task& task, int64_t head,
                                 Scratch& scratch) {
  const int64_t step = 3 * shape.width, count = scratch.count(), stride = scratch.stride;
  const float* base = task.packed + chunk.start * step + head * shape.head_width;
  for (int64_t at = 0; at < count; ++at)
    copy_rows(base + scratch.rows[at] * step, step, 1, shape, 1.0f, scratch.query + at * shape.padded);
  copy_transposed(base + shape.width, step, chunk.length, shape, stride, scratch.key_across);
  copy_rows(base + 2 * shape.width, step, chunk.length, shape, 1.0f, scratch.value);
  const Vec scale = splat(task.scale), one = splat(1.0f);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    const int64_t columns = round_up(scratch.rows[begin + block - 1] + 1, kLanes);
    float* scores = scratch.weights + begin * stride;
    multiply<false>(block, columns, shape.head_width, scratch.query + begin * shape.padded, shape.padded, 1,
                    scratch.key_across, stride, scores, stride);
    for (int64_t at = 0; at < block; ++at) {
      const int64_t row = scratch.rows[begin + at], low = std::max<int64_t>(0, row - task.num_biases + 1);
      const float* bias = task.bias_ascending + task.num_biases - 1 - row;
      float* weights = scores + at * stride;
      float* slopes = scratch.slopes + (begin + at) * stride;
      for (int64_t j = low; j <= row; j += kLanes) {
        const Vec score = load(weights + j) + load(bias + j);
        const Vec sigmoid = one / (one + exp_vec(-score));
        const Vec weight = score * sigmoid;
        store(weights + j, weight * scale);
        if (kSlopes) store(slopes + j, (sigmoid + weight * (one - sigmoid)) * scale);
      }
      for (int64_t j = 0; j < low; ++j) weights[j] = 0.0f;
      for (int64_t j = row + 1; j < stride; ++j) weights[j] = 0.0f;
    }
  }
}

// The first place of a row with a query that is not before `row`.
RECMILL_INLINE int64_t first_place(const Scratch& scratch, int64_t row) {
  return std::lower_bound(scratch.rows.begin(), scratch.rows.end(), row) - scratch.rows.begin();
}

RECMILL_INLINE void attend(const Windows& windows, const int64_t* order, const Chunk& chunk, const Shape& shape,
                           const Task& task, int64_t head, float* out, Scratch& scratch) {
  fill_weights<false>(chunk, shape, task, head, scratch);
  const int64_t count = scratch.count(), stride = scratch.stride;
  std::memset(scratch.sums, 0, sizeof(float) * count * shape.padded);
  int64_t end = chunk.length;
  for (int64_t at = chunk.last - 1; at >= chunk.first; --at) {
    const Span span = find_span(windows, order[at], chunk, task.is_last_only);
    const int64_t start = windows.starts[order[at]] - chunk.start;
    for (int64_t begin = first_place(scratch, start); start < end && begin < count; begin += kBlock) {
      const int64_t block = std::min(kBlock, count - begin);
      const int64_t depth = std::min(end, scratch.rows[begin + block - 1] + 1) - start;
      multiply<true>(block, shape.padded, depth, scratch.weights + begin * stride + start, stride, 1,
                     scratch.value + start * shape.padded, shape.padded, scratch.sums + begin * shape.padded,
                     shape.padded);
    }
    end = std::min(end, start);
    for (int64_t row = span.first; row < span.last; ++row) {
      float* to = out + (span.place + row - span.first) * shape.width + head * shape.head_width;
      std::memcpy(to, scratch.sums + scratch.place[row] * shape.padded, sizeof(float) * shape.head_width);
    }
  }
}

struct Gradients {
  const float* out;  // of the result
  float* packed;
  float* bias_ascending;  // of one slab and head
};

// The gradients of all windows that start at a row or before it, times what lies between this start and the next.
RECMILL_INLINE void add_segment(int64_t start, int64_t end, const Shape& shape, Scratch& scratch) {
  const int64_t count = scratch.count(), stride = scratch.stride;
  for (int64_t begin = first_place(scratch, start); begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    const int64_t depth = std::min(end, scratch.rows[begin + block - 1] + 1) - start;
    const float* sums = scratch.sums + begin * shape.padded;
    // Columns past the segment are overwritten by the next one.
    multiply<false>(block, round_up(depth, kLanes), shape.head_width, sums, shape.padded, 1,
                    scratch.value_across + start, stride, scratch.changes + begin * stride + start, stride);
    multiply<true>(depth, shape.padded, block, scratch.weights + begin * stride + start, 1, stride, sums, shape.padded,
                   scratch.value_sums + start * shape.padded, shape.padded);
  }
}

RECMILL_INLINE void attend_back(const Windows& windows, const int64_t* order, const Chunk& chunk, const Shape& shape,
                                const Task& task, int64_t head, const Gradients& to, Scratch& scratch) {
  fill_weights<true>(chunk, shape, task, head, scratch);
  const int64_t step = 3 * shape.width, first = chunk.start * step + head * shape.head_width, stride = scratch.stride;
  const int64_t count = scratch.count(), length = chunk.length;
  copy_rows(task.packed + first + shape.width, step, length, shape, 1.0f, scratch.key);
  copy_transposed(task.packed + first + 2 * shape.width, step, length, shape, stride, scratch.value_across);
  std::memset(scratch.sums, 0, sizeof(float) * count * shape.padded);
  for (float* sums : {scratch.key_sums, scratch.value_sums})
    std::memset(sums, 0, sizeof(float) * length * shape.padded);
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const Span span = find_span(windows, order[at], chunk, task.is_last_only);
    for (int64_t row = span.first; row < span.last; ++row) {
      const float* from = to.out + (span.place + row - span.first) * shape.width + head * shape.head_width;
      float* sum = scratch.sums + scratch.place[row] * shape.padded;
      for (int64_t i = 0; i < shape.head_width; ++i) sum[i] += from[i];
    }
    const int64_t start = windows.starts[order[at]] - chunk.start;
    const int64_t end = at + 1 < chunk.last ? windows.starts[order[at + 1]] - chunk.start : length;
    if (start < end) add_segment(start, end, shape, scratch);
  }
  for (int64_t at = 0; at < count; ++at) {
    const int64_t row = scratch.rows[at], low = std::max<int64_t>(0, row - task.num_biases + 1);
    float* changes = scratch.changes + at * stride;
    const float* slopes = scratch.slopes + at * stride;
    float* bias = to.bias_ascending + task.num_biases - 1 - row;
    for (int64_t j = 0; j < low; ++j) changes[j] = 0.0f;
    for (int64_t j = low; j <= row; ++j) {
      changes[j] *= slopes[j];
      bias[j] += changes[j];
    }
    for (int64_t j = row + 1; j < stride; ++j) changes[j] = 0.0f;
  }
  float* target = to.packed + first;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin), depth = scratch.rows[begin + block - 1] + 1;
    const float* changes = scratch.changes + begin * stride;
    multiply<false>(block, shape.padded, depth, changes, stride, 1, scratch.key, shape.padded,
                    scratch.sums + begin * shape.padded, shape.padded);
    multiply<true>(depth, shape.padded, block, changes, 1, stride, scratch.query + begin * shape.padded, shape.padded,
                   scratch.key_sums, shape.padded);
  }
  for (int64_t at = 0; at < count; ++at)
    add_rows(scratch.sums + at * shape.padded, 1, shape, 1.0f, target + scratch.rows[at] * step, step);
  add_rows(scratch.key_sums, length, shape, 1.0f, target + shape.width, step);
  add_rows(scratch.value_sums, length, shape, 1.0f, target + 2 * shape.width, step);
}

struct Plan {
  Clusters clusters;
  std::vector<std::vector<Chunk>> chunks;  // of each cluster
  int64_t longest = 0;
  std::vector<float> bias_ascending;

  Plan(const Windows& windows, const float* bias, int64_t num_biases) : clusters(windows) {
    if (windows.longest > num_biases)
      refuse("bias_R has " + std::to_string(num_biases) + " entries, the longest window has " +
             std::to_string(windows.longest) + " rows");
    for (int64_t cluster = 0; cluster < clusters.count(); ++cluster) {
      chunks.push_back(find_chunks(windows, clusters, cluster));
      for (const Chunk& chunk : chunks.back()) longest = std::max(longest, chunk.length);
    }
    bias_ascending.assign(bias, bias + num_biases);
    std::reverse(bias_ascending.begin(), bias_ascending.end());
    bias_ascending.resize(num_biases + kLanes, 0.0f);
  }
};

void pointwise_attention(const Input& packed, const Input& bias, const Input& starts, const Input& lengths,
                         const Output& out, int64_t num_heads, float scale, bool is_last_only) {
  const Windows windows(starts, lengths, packed.dim(0));
  const Shape shape = read_shape(packed, num_heads);
  const Plan plan(windows, bias.as<const float>("bias"), bias.num_items());
  const int64_t num_out = is_last_only ? windows.count : windows.places[windows.count];
  if (out.dim(0) != num_out)
    refuse("num_values is " + std::to_string(out.dim(0)) + ", the windows hold " + std::to_string(num_out) + " rows");
  const Task task{packed.as<const float>("packed"), plan.bias_ascending.data(), bias.num_items(), scale, is_last_only};
  float* to = out.as<float>("out", num_out * shape.width);
  if (is_last_only && num_out > 0) std::memset(to, 0, sizeof(float) * num_out * shape.width);  // of empty windows
  std::vector<Chunk> jobs;
  for (const auto& chunks : plan.chunks) jobs.insert(jobs.end(), chunks.begin(), chunks.end());
  const int64_t* order = plan.clusters.order.data();
#pragma omp parallel num_threads(choose_threads(windows.work(shape.width), kWorkPerThread))
  {
    std::vector<float> room(Scratch::room(plan.longest, shape), 0.0f);
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < static_cast<int64_t>(jobs.size()); ++job) {
      const Chunk& chunk = jobs[job];
      Scratch scratch(chunk.length, shape, room.data());
      find_rows(windows, order, chunk, is_last_only, scratch);
      for (int64_t head = 0; head < shape.num_heads; ++head)
        run_fma([=, &windows, &chunk, &shape, &task, &scratch]() RECMILL_BODY {
          attend(windows, order, chunk, shape, task, head, to, scratch);
        });
    }
  }
}

void pointwise_attention_backward(const Input& packed, const Input& bias, const Input& starts, const Input& lengths,
                                  const Input& gradient, const Output& packed_gradient, const Output& bias_gradient,
                                  int64_t num_heads, float scale, bool is_last_only) {
  const Windows windows(starts, lengths, packed.dim(0));
  const Shape shape = read_shape(packed, num_heads);
  const int64_t num_biases = bias.num_items();
  const Plan plan(windows, bias.as<const float>("bias"), num_biases);
  const int64_t num_out = is_last_only ? windows.count : windows.places[windows.count];
  const Task task{packed.as<const float>("packed"), plan.bias_ascending.data(), num_biases, scale, is_last_only};
  const float* from = gradient.as<const float>("gradient", num_out * shape.width);
  float* to = packed_gradient.as<float>("packed_gradient", packed.num_items());
  float* to_bias = bias_gradient.as<float>("bias_gradient", num_biases);
  const int64_t* order = plan.clusters.order.data();
  const int64_t num_clusters = plan.clusters.count();
  std::vector<float> partial(kSlabs * shape.num_heads * num_biases, 0.0f);
#pragma omp parallel num_threads(choose_threads(windows.work(shape.width), kWorkPerThread))
  {
    std::vector<float> room(Scratch::room(plan.longest, shape), 0.0f);
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < kSlabs * shape.num_heads; ++job) {
      const int64_t slab = job / shape.num_heads, head = job % shape.num_heads;
      const Gradients gradients{from, to, partial.data() + job * num_biases};
      for (int64_t cluster = num_clusters * slab / kSlabs; cluster < num_clusters * (slab + 1) / kSlabs; ++cluster)
        for (const Chunk& chunk : plan.chunks[cluster]) {
          Scratch scratch(chunk.length, shape, room.data());
          find_rows(windows, order, chunk, is_last_only, scratch);
          run_fma([=, &windows, &chunk, &shape, &task, &gradients, &scratch]() RECMILL_BODY {
            attend_back(windows, order, chunk, shape, task, head, gradients, scratch);
          });
        }
    }
  }
  for (int64_t job = 0; job < kSlabs * shape.num_heads; ++job)
    for (int64_t distance = 0; distance < num_biases; ++distance)
      to_bias[distance] += partial[job * num_biases + num_biases - 1 - distance];
}

}  // namespace

void bind_pointwise_attention(nb::module_& m) {
  add_function(m, "pointwise_attention", &pointwise_attention);
  add_function(m, "pointwise_attention_backward", &pointwise_attention_backward);
}

}  // namespace recmill

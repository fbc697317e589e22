// Self-attention inside windows of a buffer of rows, forward and backward.
//
// Windows may overlap: their rows are projected once and read in place. The queries, keys and values of one head of a
// window are copied into scratch that stays in the L1 cache; the rest consists of products of small matrices.
#include <initializer_list>
#include <type_traits>

#include "window_attention/window.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;  // multiplications

// Windows have the same scores where they overlap: exp(score - highest score of the row in all windows) is computed once
// per pair of rows, and each window sums its own part. A window whose sum is smaller than this would lose precision and
// is computed alone.
constexpr float kSmallest = 1e-25f;

struct Pairs {  // scratch of a chunk, for its rows and pairs of rows
  int64_t wide;
  float *query, *key, *key_across, *value_across, *value, *sums, *key_sums, *value_sums, *own, *core, *exps, *changes;
  float *part, *highest, *core_totals, *core_agreements, *factors;

  static int64_t room(int64_t rows, const Shape& shape) {
    const int64_t wide = round_up(rows, kLanes);
    return 10 * wide * shape.padded + 3 * wide * wide + 4 * wide;
  }

  Pairs(int64_t rows, const Shape& shape, float* room) : wide(round_up(rows, kLanes)) {
    const auto take = [&room](int64_t size, std::initializer_list<float**> matrices) {
      for (float** matrix : matrices) {
        *matrix = room;
        room += size;
      }
    };
    take(wide * shape.padded,
         {&query, &key, &key_across, &value_across, &value, &sums, &key_sums, &value_sums, &own, &core});
    take(wide * wide, {&exps, &changes, &part});
    take(wide, {&highest, &core_totals, &core_agreements, &factors});
  }
};

// The rows [first, last) of a chunk.
struct Range {
  int64_t first, last;

  int64_t length() const { return last - first; }
};

// The rows that all windows of the chunk contain: most of them if windows shift by a row or two. May be empty.
Range find_core(const Windows& windows, const int64_t* order, const Chunk& chunk) {
  Range core{0, chunk.length};
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const int64_t from = windows.starts[order[at]] - chunk.start;
    core.first = std::max(core.first, from);
    core.last = std::min(core.last, from + windows.lengths[order[at]]);
  }
  return core.first < core.last ? core : Range{0, 0};
}

// The rows of a window before and after the core.
struct Outer {
  Range parts[2];

  Outer(const Range& window, const Range& core)
      : parts{core.length() ? Range{window.first, core.first} : window,
              core.length() ? Range{core.last, window.last} : Range{window.last, window.last}} {}
};

RECMILL_INLINE void fill_exps(const Chunk& chunk, const Shape& shape, const float* base, int64_t step, Pairs& pairs) {
  copy_rows(base, step, chunk.length, shape, shape.scale, pairs.query);
  copy_transposed(base + shape.width, step, chunk.length, shape, pairs.wide, pairs.key_across);
  multiply<false>(chunk.length, pairs.wide, shape.head_width, pairs.query, shape.padded, 1, pairs.key_across,
                  pairs.wide, pairs.exps, pairs.wide);
  float sum;
  for (int64_t row = 0; row < chunk.length; ++row)
    soften(pairs.exps + row * pairs.wide, chunk.length, pairs.highest[row], sum);
}

RECMILL_INLINE float sum_row(const float* from, int64_t count) {
  Vec sums = {};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) sums += load(from + at);
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; at < count; ++at) sum += from[at];
  return sum;
}

RECMILL_INLINE void sum_core(const Chunk& chunk, const Range& core, Pairs& pairs) {
  for (int64_t row = 0; row < chunk.length; ++row)
    pairs.core_totals[row] = sum_row(pairs.exps + row * pairs.wide + core.first, core.length());
}

// 1 / (sum of exp(score) inside the window) for each of its rows. False if a sum is too small. The backward pass also
// calls it: computed from the logarithms of the sums, the factors would lose a digit.
RECMILL_INLINE bool fill_factors(const Range& window, const Range& core, Pairs& pairs) {
  const float* exps = pairs.exps + window.first * pairs.wide;
  std::memcpy(pairs.factors, pairs.core_totals + window.first, sizeof(float) * window.length());
  for (const Range& part : Outer(window, core).parts)
    for (int64_t row = 0; row < window.length(); ++row)
      pairs.factors[row] += sum_row(exps + row * pairs.wide + part.first, part.length());
  bool is_good = true;
  for (int64_t row = 0; row < window.length(); ++row) {
    is_good &= pairs.factors[row] > kSmallest;
    pairs.factors[row] = 1.0f / pairs.factors[row];
  }
  return is_good;
}

// A window of a chunk whose scores must be computed alone. Rare, and not inlined because it would slow down the rest.
__attribute__((noinline)) void attend_alone(const Windows& windows, const Shape& shape, const Forward& io, int64_t w,
                                            int64_t head, float* room) {
  attend(windows, shape, io, w, head, room);
}

__attribute__((noinline)) void attend_alone(const Windows& windows, const Shape& shape, const Backward& io, int64_t w,
                                            int64_t head, float* room) {
  attend_back(windows, shape, io, w, head, room);
}

// Sums over the core are computed once per row; each window adds its other rows.
RECMILL_INLINE void attend_chunk(const Windows& windows, const int64_t* order, const Chunk& chunk, const Shape& shape,
                                 const Forward& io, int64_t head, float* room, float* other_room) {
  const int64_t step = 3 * shape.width;
  const float* base = io.packed + chunk.start * step + head * shape.head_width;
  Pairs pairs(chunk.length, shape, room);
  fill_exps(chunk, shape, base, step, pairs);
  copy_rows(base + 2 * shape.width, step, chunk.length, shape, 1.0f, pairs.value);
  const Range core = find_core(windows, order, chunk);
  multiply<false>(chunk.length, shape.padded, core.length(), pairs.exps + core.first, pairs.wide, 1,
                  pairs.value + core.first * shape.padded, shape.padded, pairs.core, shape.padded);
  sum_core(chunk, core, pairs);
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const int64_t w = order[at], length = windows.lengths[w], from = windows.starts[w] - chunk.start;
    const Range window{from, from + length};
    if (!fill_factors(window, core, pairs)) {
      attend_alone(windows, shape, io, w, head, other_room);
      continue;
    }
    std::memcpy(pairs.sums, pairs.core + from * shape.padded, sizeof(float) * length * shape.padded);
    for (const Range& part : Outer(window, core).parts)
      multiply<true>(length, shape.padded, part.length(), pairs.exps + from * pairs.wide + part.first, pairs.wide, 1,
                     pairs.value + part.first * shape.padded, shape.padded, pairs.sums, shape.padded);
    for (int64_t row = 0; row < length; ++row) {
      float* to = io.out + (windows.places[w] + row) * shape.width + head * shape.head_width;
      for (int64_t i = 0; i < shape.head_width; ++i) to[i] = pairs.sums[row * shape.padded + i] * pairs.factors[row];
    }
  }
}

// The gradient of exp(score) of the pairs of a window's rows with `columns`, and that of the columns' values.
RECMILL_INLINE void add_changes(const Range& rows, const Range& columns, const float* own, const float* agreements,
                                const Shape& shape, Pairs& pairs) {
  const int64_t width = round_up(columns.length(), kLanes), first = rows.first * pairs.wide + columns.first;
  multiply<false>(rows.length(), width, shape.head_width, own, shape.padded, 1, pairs.value_across + columns.first,
                  pairs.wide, pairs.part, width);
  for (int64_t row = 0; row < rows.length(); ++row) {
    float* to = pairs.changes + first + row * pairs.wide;
    const float* part = pairs.part + row * width;
    int64_t i = 0;
    for (; i + kLanes <= columns.length(); i += kLanes)
      store(to + i, load(to + i) + (load(part + i) - agreements[row]));
    for (; i < columns.length(); ++i) to[i] += part[i] - agreements[row];
  }
  multiply<true>(columns.length(), shape.padded, rows.length(), pairs.exps + first, 1, pairs.wide, own, shape.padded,
                 pairs.value_sums + columns.first * shape.padded, shape.padded);
}

// The gradient of exp(score) of each pair is summed over the windows that contain it, then propagated to the rows once.
// For pairs with a row of the core, the gradients of all windows are summed beforehand.
RECMILL_INLINE void attend_chunk_back(const Windows& windows, const int64_t* order, const Chunk& chunk,
                                      const Shape& shape, const Backward& io, int64_t head, float* room,
                                      float* other_room) {
  const int64_t step = 3 * shape.width, first = chunk.start * step + head * shape.head_width;
  const float* base = io.packed + first;
  Pairs pairs(chunk.length, shape, room);
  fill_exps(chunk, shape, base, step, pairs);
  copy_rows(base + shape.width, step, chunk.length, shape, 1.0f, pairs.key);
  copy_transposed(base + 2 * shape.width, step, chunk.length, shape, pairs.wide, pairs.value_across);
  std::memset(pairs.changes, 0, sizeof(float) * chunk.length * pairs.wide);
  for (float* sums : {pairs.value_sums, pairs.core}) std::memset(sums, 0, sizeof(float) * chunk.length * shape.padded);
  std::memset(pairs.core_agreements, 0, sizeof(float) * chunk.length);
  const Range core = find_core(windows, order, chunk);
  sum_core(chunk, core, pairs);
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const int64_t w = order[at], length = windows.lengths[w], from = windows.starts[w] - chunk.start;
    const Range window{from, from + length};
    const int64_t place = windows.places[w];
    if (!fill_factors(window, core, pairs)) {
      attend_alone(windows, shape, io, w, head, other_room);
      continue;
    }
    float* agreements = pairs.sums;
    for (int64_t row = 0; row < length; ++row) {
      const int64_t own = (place + row) * shape.width + head * shape.head_width;
      float* sums = pairs.core + (from + row) * shape.padded;
      float agreement = 0.0f;
      for (int64_t i = 0; i < shape.head_width; ++i) {
        const float gradient = io.gradient[own + i] * pairs.factors[row];
        agreement += gradient * io.out[own + i];
        pairs.own[row * shape.padded + i] = gradient;
        sums[i] += gradient;
      }
      agreements[row] = agreement;
      pairs.core_agreements[from + row] += agreement;
    }
    for (const Range& part : Outer(window, core).parts) add_changes(window, part, pairs.own, agreements, shape, pairs);
  }
  add_changes({0, chunk.length}, core, pairs.core, pairs.core_agreements, shape, pairs);
  for (int64_t i = 0; i < chunk.length * pairs.wide; i += kLanes)
    store(pairs.changes + i, load(pairs.changes + i) * load(pairs.exps + i));
  multiply<false>(chunk.length, shape.padded, chunk.length, pairs.changes, pairs.wide, 1, pairs.key, shape.padded,
                  pairs.sums, shape.padded);
  multiply<false>(chunk.length, shape.padded, chunk.length, pairs.changes, 1, pairs.wide, pairs.query, shape.padded,
                  pairs.key_sums, shape.padded);
  float* target = io.packed_gradient + first;
  add_rows(pairs.sums, chunk.length, shape, shape.scale, target, step);
  add_rows(pairs.key_sums, chunk.length, shape, 1.0f, target + shape.width, step);
  add_rows(pairs.value_sums, chunk.length, shape, 1.0f, target + 2 * shape.width, step);
}

// Chunks of one cluster add to the same gradients, so one thread processes them in order; forward, each is a job.
template <typename Io>
void run_all(const Windows& windows, const Shape& shape, const Io& io, int64_t most_room) {
  constexpr bool kForward = std::is_same_v<Io, Forward>;
  const Clusters clusters(windows);
  std::vector<std::vector<Chunk>> jobs;
  int64_t longest = 0;
  for (int64_t cluster = 0; cluster < clusters.count(); ++cluster) {
    std::vector<Chunk> chunks = find_chunks(windows, clusters, cluster);
    for (const Chunk& chunk : chunks)
      if (chunk.is_shared) longest = std::max(longest, chunk.length);
    if (kForward)
      for (const Chunk& chunk : chunks) jobs.push_back({chunk});
    else
      jobs.push_back(std::move(chunks));
  }
  const int64_t* order = clusters.order.data();
  const int threads = choose_threads(windows.work(shape.width), kWorkPerThread);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(most_room + Pairs::room(longest, shape), 0.0f);
    float *alone = room.data(), *shared = alone + most_room;
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < static_cast<int64_t>(jobs.size()) * shape.num_heads; ++job)
      for (const Chunk& chunk : jobs[job / shape.num_heads]) {
        const int64_t head = job % shape.num_heads;
        // Two functions: in one, windows that do not share took 1.3 times as long.
        if (chunk.is_shared)
          run_fma([=, &windows, &chunk, &shape, &io]() RECMILL_BODY {
            if constexpr (kForward) attend_chunk(windows, order, chunk, shape, io, head, shared, alone);
            else attend_chunk_back(windows, order, chunk, shape, io, head, shared, alone);
          });
        else
          run_fma([=, &windows, &chunk, &shape, &io]() RECMILL_BODY {
            for (int64_t at = chunk.first; at < chunk.last; ++at)
              if constexpr (kForward) attend(windows, shape, io, order[at], head, alone);
              else attend_back(windows, shape, io, order[at], head, alone);
          });
      }
  }
}

void window_attention(const Input& packed, const Input& starts, const Input& lengths, const Output& out,
                      const Output& log_sums) {
  const Windows windows(starts, lengths, packed.dim(0));
  const Shape shape = read_shape(packed, log_sums.dim(0));
  const int64_t total = windows.places[windows.count];
  if (out.dim(0) != total)
    refuse("num_values is " + std::to_string(out.dim(0)) + ", the windows hold " + std::to_string(total) + " rows");
  const Forward io{packed.as<const float>("packed"), out.as<float>("out", total * shape.width),
                   log_sums.as<float>("log_sums", total * shape.num_heads)};
  run_all(windows, shape, io, forward_room(windows, shape));
}

void window_attention_backward(const Input& packed, const Input& starts, const Input& lengths, const Input& out,
                               const Input& log_sums, const Input& gradient, const Output& packed_gradient) {
  const Windows windows(starts, lengths, packed.dim(0));
  const Shape shape = read_shape(packed, log_sums.dim(0));
  const int64_t total = windows.places[windows.count];
  const Backward io{packed.as<const float>("packed"), out.as<const float>("out", total * shape.width),
                    log_sums.as<const float>("log_sums", total * shape.num_heads),
                    gradient.as<const float>("gradient", total * shape.width),
                    packed_gradient.as<float>("packed_gradient", packed.num_items())};
  run_all(windows, shape, io, backward_room(windows, shape));
}

}  // namespace

void bind_window_attention(nb::module_& m) {
  add_function(m, "window_attention", &window_attention);
  add_function(m, "window_attention_backward", &window_attention_backward);
}

}  // namespace recmill

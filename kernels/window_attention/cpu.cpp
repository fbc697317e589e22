// Self-attention inside windows of a buffer of rows, and the pooling of windows, forward and backward.
//
// Windows may overlap: their rows are projected once and read where they lie. A window's queries, keys and values of one
// head are copied into scratch that stays in the L1 cache, and everything else is products of small matrices.
#include <nanobind/nanobind.h>

#include <type_traits>

#include "window_attention/window.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;  // multiplications

// Windows that overlap have the same scores where they overlap: exp(score - highest of the row over all of them) is
// computed once a pair of rows, and each window sums its own part. A window whose scores all lie this far below the
// highest would lose its digits and is computed alone.
constexpr float kSmallest = 1e-25f;

struct Pairs {  // scratch of a chunk: everything about its rows and pairs of rows
  int64_t wide;
  float *query, *key, *key_across, *value_across, *value, *sums, *key_sums, *value_sums, *own, *exps, *changes, *part;
  float* highest;

  static int64_t room(int64_t rows, const Shape& shape) {
    const int64_t wide = round_up(rows, kLanes);
    return 9 * wide * shape.padded + 3 * wide * wide + wide;
  }

  Pairs(int64_t rows, const Shape& shape, float* room) : wide(round_up(rows, kLanes)) {
    for (float** matrix : {&query, &key, &key_across, &value_across, &value, &sums, &key_sums, &value_sums, &own}) {
      *matrix = room;
      room += wide * shape.padded;
    }
    for (float** matrix : {&exps, &changes, &part}) {
      *matrix = room;
      room += wide * wide;
    }
    highest = room;
  }
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

RECMILL_INLINE void attend_chunk(const Windows& windows, const int64_t* order, const Chunk& chunk, const Shape& shape,
                                 const Forward& io, int64_t head, float* room, float* other_room) {
  const int64_t step = 3 * shape.width;
  const float* base = io.packed + chunk.start * step + head * shape.head_width;
  Pairs pairs(chunk.length, shape, room);
  fill_exps(chunk, shape, base, step, pairs);
  copy_rows(base + 2 * shape.width, step, chunk.length, shape, 1.0f, pairs.value);
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const int64_t w = order[at], length = windows.lengths[w], from = windows.starts[w] - chunk.start;
    const float* exps = pairs.exps + from * pairs.wide + from;
    multiply<false>(length, shape.padded, length, exps, pairs.wide, 1, pairs.value + from * shape.padded,
                    shape.padded, pairs.sums, shape.padded);
    bool is_good = true;
    for (int64_t row = 0; row < length; ++row) {
      const float total = sum_row(exps + row * pairs.wide, length), factor = 1.0f / total;
      const int64_t place = windows.places[w] + row;
      is_good &= total > kSmallest;
      io.log_sums[head * windows.places[windows.count] + place] = pairs.highest[from + row] + std::log(total);
      float* to = io.out + place * shape.width + head * shape.head_width;
      for (int64_t i = 0; i < shape.head_width; ++i) to[i] = pairs.sums[row * shape.padded + i] * factor;
    }
    if (!is_good) attend(windows, shape, io, w, head, other_room);
  }
}

// The gradient of exp(score) of each pair is summed over the windows that hold it, then taken back to rows once.
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
  std::memset(pairs.value_sums, 0, sizeof(float) * chunk.length * shape.padded);
  for (int64_t at = chunk.first; at < chunk.last; ++at) {
    const int64_t w = order[at], length = windows.lengths[w], from = windows.starts[w] - chunk.start;
    const int64_t place = windows.places[w];
    const float* log_sums = io.log_sums + head * windows.places[windows.count] + place;
    bool is_good = true;
    for (int64_t row = 0; row < length; ++row) is_good &= log_sums[row] - pairs.highest[from + row] > std::log(kSmallest);
    if (!is_good) {
      attend_back(windows, shape, io, w, head, other_room);
      continue;
    }
    float* agreements = pairs.sums;
    for (int64_t row = 0; row < length; ++row) {
      const int64_t own = (place + row) * shape.width + head * shape.head_width;
      const float factor = std::exp(pairs.highest[from + row] - log_sums[row]);
      float agreement = 0.0f;
      for (int64_t i = 0; i < shape.head_width; ++i) {
        agreement += io.gradient[own + i] * io.out[own + i];
        pairs.own[row * shape.padded + i] = io.gradient[own + i] * factor;
      }
      agreements[row] = agreement * factor;
    }
    const int64_t width = round_up(length, kLanes);
    multiply<false>(length, width, shape.head_width, pairs.own, shape.padded, 1, pairs.value_across + from, pairs.wide,
                    pairs.part, width);
    float* changes = pairs.changes + from * pairs.wide + from;
    for (int64_t row = 0; row < length; ++row) {
      float* to = changes + row * pairs.wide;
      const float* part = pairs.part + row * width;
      int64_t i = 0;
      for (; i + kLanes <= length; i += kLanes) store(to + i, load(to + i) + (load(part + i) - agreements[row]));
      for (; i < length; ++i) to[i] += part[i] - agreements[row];
    }
    multiply<true>(length, shape.padded, length, pairs.exps + from * pairs.wide + from, 1, pairs.wide, pairs.own,
                   shape.padded, pairs.value_sums + from * shape.padded, shape.padded);
  }
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

// What one task works on: the windows of a chunk, one head.
template <typename Io>
struct Task {
  const Windows& windows;
  const int64_t* order;
  const Shape& shape;
  const Io& io;
  int64_t most_room;  // scratch of a window alone; the rest is for chunks

  RECMILL_INLINE void run(const Chunk& chunk, int64_t head, float* room) const {
    if constexpr (std::is_same_v<Io, Forward>) {
      if (chunk.is_shared) return attend_chunk(windows, order, chunk, shape, io, head, room + most_room, room);
      for (int64_t at = chunk.first; at < chunk.last; ++at) attend(windows, shape, io, order[at], head, room);
    } else {
      if (chunk.is_shared) return attend_chunk_back(windows, order, chunk, shape, io, head, room + most_room, room);
      for (int64_t at = chunk.first; at < chunk.last; ++at) attend_back(windows, shape, io, order[at], head, room);
    }
  }
};

template <typename Io>
void run_portable(const Task<Io>& task, const Chunk& chunk, int64_t head, float* room) {
  task.run(chunk, head, room);
}

#if defined(__x86_64__)
template <typename Io>
__attribute__((target("avx2,fma"))) void run_avx2(const Task<Io>& task, const Chunk& chunk, int64_t head,
                                                  float* room) {
  task.run(chunk, head, room);
}
#endif

// Chunks of one cluster add to the same gradients and follow one another; forward, each is a task of its own.
template <typename Io>
void run_all(const Windows& windows, const Shape& shape, const Io& io, int64_t most_room, int num_threads) {
  const Clusters clusters(windows);
  std::vector<std::vector<Chunk>> jobs;
  int64_t longest = 0;
  for (int64_t cluster = 0; cluster < clusters.count(); ++cluster) {
    std::vector<Chunk> chunks = find_chunks(windows, clusters, cluster);
    for (const Chunk& chunk : chunks)
      if (chunk.is_shared) longest = std::max(longest, chunk.length);
    if (std::is_same_v<Io, Forward>)
      for (const Chunk& chunk : chunks) jobs.push_back({chunk});
    else
      jobs.push_back(std::move(chunks));
  }
  auto run = run_portable<Io>;
#if defined(__x86_64__)
  if (has_avx2()) run = run_avx2<Io>;
#endif
  const Task<Io> task{windows, clusters.order.data(), shape, io, most_room};
  const int threads = choose_threads(num_threads, windows.work(shape.width), kWorkPerThread);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(most_room + Pairs::room(longest, shape), 0.0f);
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < static_cast<int64_t>(jobs.size()) * shape.num_heads; ++job)
      for (const Chunk& chunk : jobs[job / shape.num_heads]) run(task, chunk, job % shape.num_heads, room.data());
  }
}

void window_attention(Address packed, int64_t num_rows, int64_t num_heads, int64_t width, Address starts,
                      Address lengths, int64_t num_windows, Address out, Address log_sums, int num_threads) {
  const Windows windows(starts, lengths, num_windows, num_rows);
  const Shape shape(num_heads, width);
  const Forward io{pointer<const float>(packed), pointer<float>(out), pointer<float>(log_sums)};
  run_all(windows, shape, io, forward_room(windows, shape), num_threads);
}

void window_attention_backward(Address packed, int64_t num_rows, int64_t num_heads, int64_t width, Address starts,
                               Address lengths, int64_t num_windows, Address out, Address log_sums, Address gradient,
                               Address packed_gradient, int num_threads) {
  const Windows windows(starts, lengths, num_windows, num_rows);
  const Shape shape(num_heads, width);
  const Backward io{pointer<const float>(packed), pointer<const float>(out), pointer<const float>(log_sums),
                    pointer<const float>(gradient), pointer<float>(packed_gradient)};
  run_all(windows, shape, io, backward_room(windows, shape), num_threads);
}

}  // namespace

void bind_window_attention(nb::module_& m) {
  m.def("window_attention", &window_attention, nb::call_guard<nb::gil_scoped_release>());
  m.def("window_attention_backward", &window_attention_backward, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

// The weighted mean of the rows of each window, one a head: weights are the softmax of the rows' scores, or all equal.
#include <nanobind/nanobind.h>

#include <cmath>

#include "vectors.h"
#include "windows.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;

struct Pool {
  const float* rows;    // [rows, width]
  const float* scores;  // [rows, heads]; null: every row of a window weighs the same, and there is one head
  int64_t width, num_heads;
};

struct Forward {
  float* out;       // [windows, heads, width]
  float* log_sums;  // [windows, heads]
};

struct Backward {
  const float* out;
  const float* log_sums;
  const float* gradient;  // of out
  float* row_gradient;
  float* score_gradient;
};

RECMILL_INLINE void add_scaled(float* to, const float* from, float factor, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, load(to + i) + splat(factor) * load(from + i));
  for (; i < width; ++i) to[i] += factor * from[i];
}

RECMILL_INLINE float dot(const float* a, const float* b, int64_t width) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) sums += load(a + i) * load(b + i);
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; i < width; ++i) sum += a[i] * b[i];
  return sum;
}

RECMILL_INLINE void pool(const Windows& windows, const Pool& in, const Forward& io, int64_t w) {
  const int64_t start = windows.starts[w], length = windows.lengths[w];
  for (int64_t head = 0; head < in.num_heads; ++head) {
    float* out = io.out + (w * in.num_heads + head) * in.width;
    for (int64_t i = 0; i < in.width; ++i) out[i] = 0.0f;
    io.log_sums[w * in.num_heads + head] = 0.0f;
    if (length == 0) continue;
    if (in.scores == nullptr) {
      for (int64_t row = start; row < start + length; ++row) add_scaled(out, in.rows + row * in.width, 1.0f, in.width);
      for (int64_t i = 0; i < in.width; ++i) out[i] /= static_cast<float>(length);
      continue;
    }
    const float* scores = in.scores + start * in.num_heads + head;
    float highest = scores[0], sum = 0.0f;
    for (int64_t at = 1; at < length; ++at) highest = std::max(highest, scores[at * in.num_heads]);
    for (int64_t at = 0; at < length; ++at) sum += std::exp(scores[at * in.num_heads] - highest);
    const float log_sum = highest + std::log(sum);
    io.log_sums[w * in.num_heads + head] = log_sum;
    for (int64_t at = 0; at < length; ++at)
      add_scaled(out, in.rows + (start + at) * in.width, std::exp(scores[at * in.num_heads] - log_sum), in.width);
  }
}

RECMILL_INLINE void pool_back(const Windows& windows, const Pool& in, const Backward& io, int64_t w) {
  const int64_t start = windows.starts[w], length = windows.lengths[w];
  for (int64_t head = 0; head < in.num_heads; ++head) {
    const float* gradient = io.gradient + (w * in.num_heads + head) * in.width;
    if (in.scores == nullptr) {
      const float weight = 1.0f / static_cast<float>(length);
      for (int64_t row = start; row < start + length; ++row)
        add_scaled(io.row_gradient + row * in.width, gradient, weight, in.width);
      continue;
    }
    const float agreement = dot(gradient, io.out + (w * in.num_heads + head) * in.width, in.width);
    const float log_sum = io.log_sums[w * in.num_heads + head];
    for (int64_t row = start; row < start + length; ++row) {
      const float weight = std::exp(in.scores[row * in.num_heads + head] - log_sum);
      const float change = dot(gradient, in.rows + row * in.width, in.width);
      io.score_gradient[row * in.num_heads + head] += weight * (change - agreement);
      add_scaled(io.row_gradient + row * in.width, gradient, weight, in.width);
    }
  }
}

void pool_portable(const Windows& windows, const Pool& in, const Forward& io, int64_t w) { pool(windows, in, io, w); }

void pool_back_portable(const Windows& windows, const Pool& in, const Backward& io, int64_t w) {
  pool_back(windows, in, io, w);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void pool_avx2(const Windows& windows, const Pool& in, const Forward& io,
                                                   int64_t w) {
  pool(windows, in, io, w);
}

__attribute__((target("avx2,fma"))) void pool_back_avx2(const Windows& windows, const Pool& in, const Backward& io,
                                                        int64_t w) {
  pool_back(windows, in, io, w);
}
#endif

int64_t count_work(const Windows& windows, const Pool& in) {
  return windows.places[windows.count] * in.width * in.num_heads;
}

void pool_windows(Address rows, Address scores, int64_t num_rows, int64_t width, int64_t num_heads, Address starts,
                  Address lengths, int64_t num_windows, Address out, Address log_sums, int num_threads) {
  const Windows windows(starts, lengths, num_windows, num_rows);
  const Pool in{pointer<const float>(rows), pointer<const float>(scores), width, num_heads};
  const Forward io{pointer<float>(out), pointer<float>(log_sums)};
  auto run = pool_portable;
#if defined(__x86_64__)
  if (has_avx2()) run = pool_avx2;
#endif
  const int threads = choose_threads(num_threads, count_work(windows, in), kWorkPerThread);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)
  for (int64_t w = 0; w < num_windows; ++w) run(windows, in, io, w);
}

void pool_windows_backward(Address rows, Address scores, int64_t num_rows, int64_t width, int64_t num_heads,
                           Address starts, Address lengths, int64_t num_windows, Address out, Address log_sums,
                           Address gradient, Address row_gradient, Address score_gradient, int num_threads) {
  const Windows windows(starts, lengths, num_windows, num_rows);
  const Clusters clusters(windows);
  const Pool in{pointer<const float>(rows), pointer<const float>(scores), width, num_heads};
  const Backward io{pointer<const float>(out), pointer<const float>(log_sums), pointer<const float>(gradient),
                    pointer<float>(row_gradient), pointer<float>(score_gradient)};
  auto run = pool_back_portable;
#if defined(__x86_64__)
  if (has_avx2()) run = pool_back_avx2;
#endif
  const int threads = choose_threads(num_threads, count_work(windows, in), kWorkPerThread);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (int64_t c = 0; c < clusters.count(); ++c)
    for (int64_t at = clusters.begins[c]; at < clusters.begins[c + 1]; ++at) run(windows, in, io, clusters.order[at]);
}

}  // namespace

void bind_pool_windows(nb::module_& m) {
  m.def("pool_windows", &pool_windows, nb::call_guard<nb::gil_scoped_release>());
  m.def("pool_windows_backward", &pool_windows_backward, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

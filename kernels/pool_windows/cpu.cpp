// The weighted mean of the rows of each window, per head: weights are the softmax of the rows' scores, or all equal.
#include <cmath>

#include "vectors.h"
#include "windows.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;

struct Pool {
  const float* rows;    // [rows, width]
  const float* scores;  // [rows, heads]; null: all rows of a window weigh the same, and there is one head
  int64_t width, num_heads;

  Pool(const Input& rows_ND, const OptionalInput& scores_NH, int64_t num_heads)
      : rows(rows_ND.as<const float>("rows_ND")),
        scores(as_or_null<float>(scores_NH, "scores_NH", rows_ND.dim(0) * num_heads)),
        width(rows_ND.dim(1)),
        num_heads(num_heads) {}

  int threads(const Windows& windows) const {
    return choose_threads(windows.places[windows.count] * width * num_heads, kWorkPerThread);
  }
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

void pool_windows(const Input& rows, const OptionalInput& scores, const Input& starts, const Input& lengths,
                  const Output& out, const Output& log_sums) {
  const Windows windows(starts, lengths, rows.dim(0));
  const Pool in(rows, scores, log_sums.dim(1));
  const Forward io{out.as<float>("out", windows.count * in.num_heads * in.width),
                   log_sums.as<float>("log_sums", windows.count * in.num_heads)};
#pragma omp parallel for num_threads(in.threads(windows)) schedule(dynamic, 16)
  for (int64_t w = 0; w < windows.count; ++w) run_fma([&]() RECMILL_BODY { pool(windows, in, io, w); });
}

void pool_windows_backward(const Input& rows, const OptionalInput& scores, const Input& starts, const Input& lengths,
                           const Input& out, const Input& log_sums, const Input& gradient, const Output& row_gradient,
                           const Output& score_gradient) {
  const Windows windows(starts, lengths, rows.dim(0));
  const Clusters clusters(windows);
  const Pool in(rows, scores, log_sums.dim(1));
  const int64_t num_out = windows.count * in.num_heads * in.width;
  const Backward io{out.as<const float>("out", num_out),
                    log_sums.as<const float>("log_sums", windows.count * in.num_heads),
                    gradient.as<const float>("gradient", num_out),
                    row_gradient.as<float>("row_gradient", rows.num_items()),
                    score_gradient.as<float>("score_gradient", scores ? scores->num_items() : 0)};
#pragma omp parallel for num_threads(in.threads(windows)) schedule(dynamic, 4)
  for (int64_t c = 0; c < clusters.count(); ++c)
    for (int64_t at = clusters.begins[c]; at < clusters.begins[c + 1]; ++at)
      run_fma([&]() RECMILL_BODY { pool_back(windows, in, io, clusters.order[at]); });
}

}  // namespace

void bind_pool_windows(nb::module_& m) {
  add_function(m, "pool_windows", &pool_windows);
  add_function(m, "pool_windows_backward", &pool_windows_backward);
}

}  // namespace recmill

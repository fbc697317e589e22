// The rows of each sample's window, each weighted by a small network that sees the row and the sample's target.
//
// The network's first layer has three shares: one per row and one per sample, given, and that of the product of row and
// target. For one sample the last is a product of matrices: the window's rows, and the weights times the target.
#include <vector>

#include "heads.h"
#include "windows.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;  // multiplications
constexpr int64_t kSlabs = 64;               // partial sums of the weights' gradients, whatever the number of threads

// Pointers to what the op takes, or to the gradients of it.
template <typename Float>
struct Parts {
  Float *rows, *row_shares, *targets, *sample_shares, *products, *slopes, *scores;
};

struct Sizes {
  int64_t width, units;  // multiples of 8

  int64_t room(int64_t longest) const { return 2 * width * units + longest * (2 * units + width + 2); }
  int64_t partial() const { return width * units + 2 * units; }  // products by unit, slopes, scores
};

template <typename Float, typename Arrays>
Parts<Float> read_parts(const Arrays& arrays) {
  if (arrays.size() != 7) refuse("expected 7 arrays");
  const int64_t rows = arrays[0].dim(0), width = arrays[0].dim(1), units = arrays[5].num_items();
  const int64_t samples = arrays[2].dim(0);
  return {arrays[0].template as<Float>("rows"),
          arrays[1].template as<Float>("row shares", rows * units),
          arrays[2].template as<Float>("targets", samples * width),
          arrays[3].template as<Float>("sample shares", samples * units),
          arrays[4].template as<Float>("products", units * width),
          arrays[5].template as<Float>("slopes", units),
          arrays[6].template as<Float>("scores", units)};
}

struct Scratch {
  float *across, *along, *hidden, *changes, *row_sums, *weights, *weight_changes;

  Scratch(const Sizes& sizes, int64_t longest, float* room) {
    across = room;  // products times target: [width, units]
    along = across + sizes.width * sizes.units;  // the same: [units, width]
    hidden = along + sizes.width * sizes.units;
    changes = hidden + longest * sizes.units;
    row_sums = changes + longest * sizes.units;
    weights = row_sums + longest * sizes.width;
    weight_changes = weights + longest;
  }
};

RECMILL_INLINE float sum_lanes(Vec vector) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += vector[lane];
  return sum;
}

// Hidden units before PReLU, and the weights, of all rows of a sample's window.
RECMILL_INLINE void weigh(const Parts<const float>& in, const Sizes& sizes, int64_t sample, int64_t start,
                          int64_t length, const Scratch& scratch) {
  const float* target = in.targets + sample * sizes.width;
  for (int64_t unit = 0; unit < sizes.units; ++unit)
    for (int64_t i = 0; i < sizes.width; ++i) {
      const float value = in.products[unit * sizes.width + i] * target[i];
      scratch.along[unit * sizes.width + i] = value;
      scratch.across[i * sizes.units + unit] = value;
    }
  multiply<false>(length, sizes.units, sizes.width, in.rows + start * sizes.width, sizes.width, 1, scratch.across,
                  sizes.units, scratch.hidden, sizes.units);
  const Vec zero = {};
  for (int64_t row = 0; row < length; ++row) {
    float* hidden = scratch.hidden + row * sizes.units;
    const float* row_share = in.row_shares + (start + row) * sizes.units;
    const float* sample_share = in.sample_shares + sample * sizes.units;
    Vec total = {};
    for (int64_t unit = 0; unit < sizes.units; unit += kLanes) {
      const Vec value = load(hidden + unit) + (load(row_share + unit) + load(sample_share + unit));
      store(hidden + unit, value);
      total += load(in.scores + unit) * (value > zero ? value : value * load(in.slopes + unit));
    }
    scratch.weights[row] = sum_lanes(total);
  }
}

RECMILL_INLINE void attend(const Parts<const float>& in, const Sizes& sizes, const Windows& windows, int64_t sample,
                           float* out, const Scratch& scratch) {
  const int64_t start = windows.starts[sample], length = windows.lengths[sample];
  weigh(in, sizes, sample, start, length, scratch);
  multiply<false>(1, sizes.width, length, scratch.weights, 0, 1, in.rows + start * sizes.width, sizes.width,
                  out + sample * sizes.width, sizes.width);
}

// `partial` holds the slab's sums of the gradients of products ([width, units]), slopes and scores.
RECMILL_INLINE void attend_back(const Parts<const float>& in, const Parts<float>& to, const Sizes& sizes,
                                const Windows& windows, int64_t sample, const float* gradients, float* partial,
                                const Scratch& scratch) {
  const int64_t start = windows.starts[sample], length = windows.lengths[sample];
  const float *rows = in.rows + start * sizes.width, *gradient = gradients + sample * sizes.width;
  float *slope_sums = partial + sizes.width * sizes.units, *score_sums = slope_sums + sizes.units;
  float* sample_share = to.sample_shares + sample * sizes.units;
  const Vec zero = {}, one = splat(1.0f);
  weigh(in, sizes, sample, start, length, scratch);
  for (int64_t row = 0; row < length; ++row) {
    Vec agreement = {};
    for (int64_t i = 0; i < sizes.width; i += kLanes) {
      agreement += load(gradient + i) * load(rows + row * sizes.width + i);
      store(scratch.row_sums + row * sizes.width + i, splat(scratch.weights[row]) * load(gradient + i));
    }
    scratch.weight_changes[row] = sum_lanes(agreement);
  }
  for (int64_t unit = 0; unit < sizes.units; unit += kLanes) {
    const Vec slope = load(in.slopes + unit), score = load(in.scores + unit);
    Vec share_sum = {}, slope_sum = load(slope_sums + unit), score_sum = load(score_sums + unit);
    for (int64_t row = 0; row < length; ++row) {
      const Vec value = load(scratch.hidden + row * sizes.units + unit), change = splat(scratch.weight_changes[row]);
      const Vec below = value > zero ? zero : value;
      score_sum += change * (value > zero ? value : value * slope);
      slope_sum += change * score * below;
      const Vec found = change * score * (value > zero ? one : slope);
      store(scratch.changes + row * sizes.units + unit, found);
      share_sum += found;
      float* row_share = to.row_shares + (start + row) * sizes.units + unit;
      store(row_share, load(row_share) + found);
    }
    store(sample_share + unit, share_sum);
    store(slope_sums + unit, slope_sum);
    store(score_sums + unit, score_sum);
  }
  multiply<true>(length, sizes.width, sizes.units, scratch.changes, sizes.units, 1, scratch.along, sizes.width,
                 scratch.row_sums, sizes.width);
  float* to_rows = to.rows + start * sizes.width;
  for (int64_t at = 0; at < length * sizes.width; at += kLanes)
    store(to_rows + at, load(to_rows + at) + load(scratch.row_sums + at));
  // The gradient of products times target, then of each factor.
  multiply<false>(sizes.width, sizes.units, length, rows, 1, sizes.width, scratch.changes, sizes.units, scratch.across,
                  sizes.units);
  const float* target = in.targets + sample * sizes.width;
  for (int64_t i = 0; i < sizes.width; ++i) {
    float total = 0.0f;
    for (int64_t unit = 0; unit < sizes.units; ++unit) {
      const float change = scratch.across[i * sizes.units + unit];
      total += change * in.products[unit * sizes.width + i];
      partial[i * sizes.units + unit] += change * target[i];
    }
    to.targets[sample * sizes.width + i] = total;
  }
}

Sizes read_sizes(const std::vector<Input>& arrays, const Input& starts) {
  const Sizes sizes{arrays[0].dim(1), arrays[5].num_items()};
  if (arrays[2].dim(0) != starts.num_items()) refuse("targets: expected one per window");
  if (sizes.width % kLanes || sizes.units % kLanes) refuse("expected widths that are multiples of 8");
  return sizes;
}

int choose_team(const Windows& windows, const Sizes& sizes) {
  return choose_threads(windows.places[windows.count] * sizes.width * sizes.units, kWorkPerThread);
}

void target_attention(const std::vector<Input>& arrays, const Input& starts, const Input& lengths, const Output& out) {
  const Parts<const float> in = read_parts<const float>(arrays);
  const Sizes sizes = read_sizes(arrays, starts);
  const Windows windows(starts, lengths, arrays[0].dim(0));
  float* to = out.as<float>("out", windows.count * sizes.width);
#pragma omp parallel num_threads(choose_team(windows, sizes))
  {
    std::vector<float> room(sizes.room(windows.longest));
    const Scratch scratch(sizes, windows.longest, room.data());
#pragma omp for schedule(dynamic, 16)
    for (int64_t sample = 0; sample < windows.count; ++sample)
      run_fma([&]() RECMILL_BODY { attend(in, sizes, windows, sample, to, scratch); });
  }
}

void target_attention_backward(const std::vector<Input>& arrays, const Input& starts, const Input& lengths,
                               const Input& gradient, const std::vector<Output>& found) {
  const Parts<const float> in = read_parts<const float>(arrays);
  const Parts<float> to = read_parts<float>(found);
  for (size_t part = 0; part < arrays.size(); ++part)
    if (found[part].num_items() != arrays[part].num_items()) refuse("gradients: expected the sizes of the arrays");
  const Sizes sizes = read_sizes(arrays, starts);
  const Windows windows(starts, lengths, arrays[0].dim(0));
  const Clusters clusters(windows);
  const float* gradients = gradient.as<const float>("gradient", windows.count * sizes.width);
  std::vector<float> partial(kSlabs * sizes.partial(), 0.0f);
#pragma omp parallel num_threads(choose_team(windows, sizes))
  {
    std::vector<float> room(sizes.room(windows.longest));
    const Scratch scratch(sizes, windows.longest, room.data());
#pragma omp for schedule(dynamic)
    for (int64_t slab = 0; slab < kSlabs; ++slab) {
      const int64_t first = clusters.count() * slab / kSlabs, last = clusters.count() * (slab + 1) / kSlabs;
      for (int64_t at = clusters.begins[first]; at < clusters.begins[last]; ++at)
        run_fma([&]() RECMILL_BODY {
          attend_back(in, to, sizes, windows, clusters.order[at], gradients, partial.data() + slab * sizes.partial(),
                      scratch);
        });
    }
  }
  for (int64_t slab = 0; slab < kSlabs; ++slab) {
    const float* own = partial.data() + slab * sizes.partial();
    for (int64_t unit = 0; unit < sizes.units; ++unit) {
      for (int64_t i = 0; i < sizes.width; ++i) to.products[unit * sizes.width + i] += own[i * sizes.units + unit];
      to.slopes[unit] += own[sizes.width * sizes.units + unit];
      to.scores[unit] += own[(sizes.width + 1) * sizes.units + unit];
    }
  }
}

}  // namespace

void bind_target_attention(nb::module_& m) {
  add_function(m, "target_attention", &target_attention);
  add_function(m, "target_attention_backward", &target_attention_backward);
}

}  // namespace recmill

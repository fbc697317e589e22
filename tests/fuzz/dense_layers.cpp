// Layers of any sizes, with any rows that their first sums start from.
#include "dense_layers/cpu.cpp"

#include <cmath>

#include "fuzz.h"

namespace {

void multiply_layers(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(3) == 0;
  recmill::forced_narrow = feed.below(2);
  recmill::forced.threads = static_cast<int>(feed.below(3));
  const int64_t num_rows = feed.below(3) ? feed.below(20) : feed.below(200), num_layers = feed.below(3) + 1;
  const bool ends_with_relu = feed.below(2);
  std::vector<fuzz::Held<float>> weights, biases;
  std::vector<recmill::Input> given;
  std::vector<recmill::OptionalInput> given_biases;
  std::vector<int64_t> widths{feed.below(20) + 1};
  for (int64_t n = 0; n < num_layers; ++n) {
    widths.push_back(feed.below(40) + 1);
    weights.emplace_back(widths[n + 1], feed.below(32) ? widths[n] : feed.below(20) + 1);
    for (int64_t i = 0; i < weights[n].size(); ++i) weights[n][i] = static_cast<float>(feed.number<int8_t>()) / 64.0f;
    biases.emplace_back(widths[n + 1]);
    for (int64_t i = 0; i < biases[n].size(); ++i) biases[n][i] = static_cast<float>(i % 5) - 2.0f;
  }
  for (int64_t n = 0; n < num_layers; ++n) {
    given.push_back(weights[n].in());
    given_biases.emplace_back();
    if (feed.below(4)) given_biases.back() = biases[n].in();
  }
  const recmill::DenseLayers dense(given, given_biases, ends_with_relu);
  fuzz::Held<float> in(num_rows, widths[0]), out(num_rows, widths.back());
  for (int64_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 11) - 5.0f;
  const int64_t num_starts = feed.below(4) + 1;
  fuzz::Held<float> start(num_starts, widths[1]);
  for (int64_t i = 0; i < start.size(); ++i) start[i] = static_cast<float>(i % 3);
  fuzz::Held<int64_t> start_rows(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) start_rows[i] = feed.mostly_up_to(num_starts - 1);
  const bool has_start = feed.below(2), has_rows = feed.below(3) != 0;
  recmill::dense_layers(dense, in.in(), has_start ? recmill::OptionalInput(start.in()) : std::nullopt,
                        has_rows ? recmill::OptionalInput(start_rows.in()) : std::nullopt, out.out());
  for (int64_t row = 0; row < num_rows; ++row) {
    std::vector<double> own(in.get() + row * widths[0], in.get() + (row + 1) * widths[0]);
    double largest = 1.0;
    for (int64_t n = 0; n < num_layers; ++n) {
      std::vector<double> next(widths[n + 1]);
      for (int64_t o = 0; o < widths[n + 1]; ++o) {
        next[o] = n == 0 && has_start ? start[(has_rows ? start_rows[row] : 0) * widths[1] + o]
                                      : given_biases[n] ? biases[n][o] : 0.0;
        for (int64_t k = 0; k < widths[n]; ++k) next[o] += own[k] * weights[n][o * widths[n] + k];
        largest = std::max(largest, std::abs(next[o]));
        if (n + 1 < num_layers || ends_with_relu) next[o] = std::max(next[o], 0.0);
      }
      own = next;
    }
    for (int64_t o = 0; o < widths.back(); ++o)
      fuzz::must(std::abs(out[row * widths.back() + o] - own[o]) < 1e-3 * largest * 20, "an output is not the layers'");
  }
}

}  // namespace

FUZZ(multiply_layers)

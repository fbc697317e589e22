// Attention of a target over its window and the gradient, with any starts, lengths and numbers of samples.
#include "target_attention/cpu.cpp"

#include "fuzz.h"

namespace {

struct Arrays {
  std::vector<fuzz::Held<float>> held;

  Arrays(int64_t rows, int64_t width, int64_t units, int64_t samples) {
    held.emplace_back(rows, width);
    held.emplace_back(rows, units);
    held.emplace_back(samples, width);
    held.emplace_back(samples, units);
    held.emplace_back(units, width);
    held.emplace_back(units);
    held.emplace_back(units);
  }
  std::vector<recmill::Input> in() const {
    std::vector<recmill::Input> all;
    for (const auto& own : held) all.push_back(own.in());
    return all;
  }
  std::vector<recmill::Output> out() const {
    std::vector<recmill::Output> all;
    for (const auto& own : held) all.push_back(own.out());
    return all;
  }
};

void attend_target(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(2));
  const int64_t rows = feed.below(30), count = feed.below(12), samples = feed.below(8) ? count : feed.below(12);
  const int64_t width = feed.below(16) ? 8 * (feed.below(3) + 1) : feed.below(20) + 1;
  const int64_t units = feed.below(16) ? 8 * (feed.below(2) + 1) : feed.below(20) + 1;
  Arrays given(rows, width, units, samples);
  for (auto& own : given.held)
    for (int64_t i = 0; i < own.size(); ++i) own[i] = static_cast<float>(feed.number<int8_t>()) / 16.0f;
  fuzz::Held<int64_t> starts(count), lengths(count);
  for (int64_t w = 0; w < count; ++w) {
    starts[w] = feed.mostly_up_to(rows);
    lengths[w] = feed.mostly_up_to(5);
  }
  fuzz::Held<float> out(count, width), gradient(count, width);
  for (int64_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 7);
  recmill::target_attention(given.in(), starts.in(), lengths.in(), out.out());
  for (int64_t i = 0; i < out.size(); ++i) fuzz::must(out[i] == out[i], "an output is not a number");
  const bool is_other = feed.below(8) == 0;
  Arrays found(is_other ? feed.below(30) : rows, width, is_other ? 8 : units, is_other ? feed.below(12) : samples);
  recmill::target_attention_backward(given.in(), starts.in(), lengths.in(), gradient.in(), found.out());
}

}  // namespace

FUZZ(attend_target)

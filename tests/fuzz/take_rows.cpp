// Copies of chosen lists and windows, with any offsets, rows, starts and lengths.
#include "take_rows/cpu.cpp"

#include "fuzz.h"

namespace {

void take_lists(fuzz::Feed& feed) {
  const int64_t num_features = feed.below(4), num_rows = feed.below(12), num_taken = feed.below(16);
  std::vector<fuzz::Held<int64_t>> values, offsets;
  std::vector<recmill::Input> values_in, offsets_in;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t count = feed.below(40);
    values.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) values.back()[i] = 100 * f + i;
    offsets.push_back(fuzz::offsets_of(feed, num_rows, count));
    values_in.push_back(values.back().in());
    offsets_in.push_back(offsets.back().in());
  }
  fuzz::Held<int64_t> rows(num_taken), lengths(num_features * num_taken);
  for (int64_t i = 0; i < num_taken; ++i) rows[i] = feed.mostly_up_to(num_rows);
  const int64_t total = recmill::take_lengths(values_in, offsets_in, num_rows, rows.in(), lengths.out());
  if (feed.below(8) == 0 && lengths.size()) lengths[feed.below(lengths.size())] = feed.mostly_up_to(6);
  const bool is_wrong = feed.below(8) == 0;
  fuzz::Held<int64_t> out(is_wrong ? feed.below(60) : total);
  recmill::take_values(values_in, offsets_in, num_rows, rows.in(), lengths.in(), out.out(), 1 + feed.below(2));
  for (int64_t f = 0, at = 0; f < num_features; ++f)
    for (int64_t i = 0; i < num_taken; ++i)
      for (int64_t k = offsets[f][rows[i]]; k < offsets[f][rows[i] + 1]; ++k)
        fuzz::must(out[at++] == values[f][k], "a list holds other values");
}

void take_windows(fuzz::Feed& feed) {
  const int64_t count = feed.below(40), width = feed.below(3) + 1, num_windows = feed.below(12);
  fuzz::Held<float> values(count, width);
  for (int64_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  fuzz::Held<int64_t> starts(num_windows), lengths(num_windows);
  int64_t total = 0;
  for (int64_t w = 0; w < num_windows; ++w) {
    starts[w] = feed.mostly_up_to(count);
    lengths[w] = feed.mostly_up_to(5);
    if (lengths[w] >= 0 && lengths[w] <= count) total += lengths[w];
  }
  fuzz::Held<float> out(feed.below(8) ? total : feed.below(60), feed.below(16) ? width : 1);
  recmill::take_windows(values.in(), starts.in(), lengths.in(), out.out(), 1 + feed.below(2));
  for (int64_t w = 0, at = 0; w < num_windows; ++w)
    for (int64_t i = 0; i < lengths[w] * width; ++i)
      fuzz::must(out[at++] == values[starts[w] * width + i], "a window holds other values");
}

void take(fuzz::Feed& feed) { feed.below(2) ? take_lists(feed) : take_windows(feed); }

}  // namespace

FUZZ(take)

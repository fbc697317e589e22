// Lists as windows into one buffer: whatever offsets are accepted, every list must be its window.
#include "window_rows/cpu.cpp"

#include "fuzz.h"

namespace {

void lay(fuzz::Feed& feed) {
  const bool has_weights = feed.below(2), is_wide = feed.below(2), reverse = feed.below(2);
  const int64_t num_rows = feed.below(24), count = feed.below(120);
  fuzz::Held<int64_t> offsets = fuzz::offsets_of(feed, num_rows, count), ids(count);
  fuzz::Held<uint8_t> small(count);
  fuzz::Held<float> weights(count);
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = feed.below(3);
    small[i] = static_cast<uint8_t>(ids[i]);
    weights[i] = static_cast<float>(feed.below(2));
  }
  std::vector<recmill::Input> columns{is_wide ? ids.in() : small.in()};
  if (has_weights) columns.push_back(weights.in());
  fuzz::Held<int64_t> starts(num_rows), added(num_rows);
  const int64_t size = recmill::window_rows(columns, offsets.in(), starts.out(), added.out(), reverse);
  std::vector<std::pair<int64_t, float>> buffer;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = reverse ? num_rows - 1 - i : i, end = offsets[row + 1];
    fuzz::must(added[row] >= 0 && added[row] <= end - offsets[row], "a row adds more values than it has");
    for (int64_t at = end - added[row]; at < end; ++at) buffer.emplace_back(ids[at], has_weights ? weights[at] : 0.0f);
  }
  fuzz::must(static_cast<int64_t>(buffer.size()) == size, "the buffer has another length");
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t at = offsets[row], place = starts[row]; at < offsets[row + 1]; ++at, ++place) {
      fuzz::must(place >= 0 && place < size, "a window lies outside of the buffer");
      fuzz::must(buffer[place] == std::make_pair(ids[at], has_weights ? weights[at] : 0.0f), "a window holds other values");
    }
}

}  // namespace

FUZZ(lay)

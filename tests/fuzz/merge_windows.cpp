// Windows over several arrays: the parts that are copied must hold what the windows hold.
#include "merge_windows/cpu.cpp"

#include "fuzz.h"

namespace {

void merge(fuzz::Feed& feed) {
  const int64_t num_sources = feed.below(4);
  int64_t num_windows = 0;
  std::vector<fuzz::Held<int64_t>> values, starts;
  std::vector<fuzz::Held<int32_t>> lengths;
  std::vector<recmill::Input> values_in, starts_in, lengths_in;
  for (int64_t s = 0; s < num_sources; ++s) {
    const int64_t count = feed.below(50), own = feed.below(12);
    values.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) values.back()[i] = 100 * s + i;
    starts.emplace_back(own);
    lengths.emplace_back(own);
    for (int64_t w = 0; w < own; ++w) {
      starts.back()[w] = feed.mostly_up_to(count);
      lengths.back()[w] = feed.mostly_up_to<int32_t>(5);
    }
    num_windows += own;
    values_in.push_back(values.back().in());
    starts_in.push_back(starts.back().in());
    lengths_in.push_back(lengths.back().in());
  }
  fuzz::Held<int64_t> parts(3 * num_windows), places(num_windows);
  const bool is_changed = feed.below(4) == 0;
  const auto [num_parts, total] =
      recmill::merge_windows(values_in, starts_in, lengths_in, parts.out(), places.out());
  fuzz::must(num_parts >= 0 && num_parts <= num_windows && total >= 0, "more parts than windows");
  fuzz::Held<int64_t> out(total);
  if (is_changed) {  // parts that nobody made
    for (int64_t i = 0; i < parts.size(); ++i)
      if (feed.below(4) == 0) parts[i] = feed.mostly_up_to(20);
    recmill::copy_parts(values_in, parts.in(), feed.mostly_up_to(num_parts), out.out());
    return;
  }
  recmill::copy_parts(values_in, parts.in(), num_parts, out.out());
  for (int64_t s = 0, w = 0; s < num_sources; ++s)
    for (int64_t own = 0; own < starts[s].size(); ++own, ++w)
      for (int64_t i = 0; i < lengths[s][own]; ++i) {
        fuzz::must(places[w] >= 0 && places[w] <= total - lengths[s][own], "a window lies outside of the parts");
        fuzz::must(out[places[w] + i] == values[s][starts[s][own] + i], "a window holds other values");
      }
}

}  // namespace

FUZZ(merge)

// Rows, sums of their gradients and optimiser steps, with any ids, edges, offsets and rows.
#include "update_rows/cpu.cpp"

#include "fuzz.h"

namespace {

void update(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(2));
  const int64_t wanted = feed.mostly_up_to(30), num_features = feed.below(4), num_bags = feed.below(8);
  const int64_t width = feed.below(20) + 1, num_ids = feed.below(40);
  // As many rows as fit into memory, or more than there can be.
  const int64_t num_rows = wanted > 1 << 16 && wanted <= INT32_MAX ? wanted % (1 << 16) : wanted;
  fuzz::Held<int64_t> ids(num_ids), bases(num_features);
  fuzz::Held<int64_t> edges = fuzz::offsets_of(feed, num_features, num_ids);
  if (feed.below(8)) edges[0] = 0, edges[num_features] = num_ids;
  for (int64_t n = 0; n < num_ids; ++n) ids[n] = feed.mostly_up_to(30);
  for (int64_t f = 0; f < num_features; ++f) bases[f] = feed.below(4) ? 0 : feed.mostly_up_to(8);
  const int64_t room = std::max<int64_t>(0, std::min(num_ids, num_rows));
  fuzz::Held<int32_t> rows(room), inverse(num_ids);
  int64_t num_distinct = 0;
  try {
    num_distinct = recmill::find_rows(ids.in(), edges.in(), bases.in(), num_rows, rows.out(), inverse.out());
    for (int64_t f = 0; f < num_features; ++f)
      for (int64_t n = edges[f]; n < edges[f + 1]; ++n)
        fuzz::must(rows[inverse[n]] == ids[n] + bases[f], "an id has another row");
  } catch (const std::invalid_argument&) {
    for (int64_t n = 0; n < num_ids; ++n) inverse[n] = feed.mostly_up_to<int32_t>(30);
    num_distinct = feed.below(12);
  }
  if (num_rows < 0 || num_rows > 30) return;
  std::vector<fuzz::Held<float>> gradients;
  std::vector<recmill::Input> gradients_in;
  for (int64_t f = 0; f < num_features; ++f) {
    gradients.emplace_back(num_bags, width);
    for (int64_t i = 0; i < gradients.back().size(); ++i) gradients.back()[i] = static_cast<float>(i % 5);
    gradients_in.push_back(gradients.back().in());
  }
  fuzz::Held<int64_t> offsets = fuzz::offsets_of(feed, num_features * num_bags, num_ids);
  if (feed.below(8)) offsets[0] = 0, offsets[num_features * num_bags] = num_ids;
  recmill::OptionalInput lists;
  if (feed.below(4)) lists = offsets.in();
  fuzz::Held<float> sums(num_distinct, width);
  try {
    recmill::sum_bags(gradients_in, lists, inverse.in(), feed.below(2), sums.out());
  } catch (const std::invalid_argument&) {
  }
  const int kind = feed.mostly_up_to<int8_t>(2);
  fuzz::Held<float> weights(num_rows, width), state(kind == 1 ? num_rows * width : num_rows);
  for (int64_t i = 0; i < room; ++i)
    if (feed.below(8) == 0) rows[i] = feed.mostly_up_to<int32_t>(30);
  fuzz::Held<int32_t> few(std::min(room, num_distinct));
  for (int64_t i = 0; i < few.size(); ++i) few[i] = rows[i];
  fuzz::Held<float> slopes(few.size(), width);
  for (int64_t i = 0; i < slopes.size(); ++i) slopes[i] = sums[i];
  recmill::OptionalOutput kept;
  if (kind != 0) kept = state.out();
  recmill::update_rows(weights.out(), kept, kind, 0.1, 1e-8, 0.5, {few.in(), few.in()}, {slopes.in(), slopes.in()});
}

}  // namespace

FUZZ(update)

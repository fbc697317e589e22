// Lookups with any offsets, ids and orders, in tables of every form.
#include "pool_tables/cpu.cpp"

#include "fuzz.h"

namespace {

void pool(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = static_cast<int>(feed.below(3));
  const int64_t num_lists = feed.below(12), num_features = feed.below(3) + 1;
  std::vector<fuzz::Held<uint8_t>> rows;
  std::vector<fuzz::Held<int32_t>> orders;
  std::vector<fuzz::Held<int64_t>> values, offsets;
  std::vector<fuzz::Held<float>> kept;
  std::vector<recmill::Input> given_rows, given_values, given_offsets;
  std::vector<recmill::OptionalInput> given_orders;
  std::vector<recmill::Output> given_kept;
  fuzz::Held<int64_t> numbers(num_features, 5);
  int64_t width = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t form = feed.mostly_up_to(3), dim = feed.below(11) + 1, num_rows = feed.below(20), count = feed.below(40);
    const bool is_pooled = feed.below(3) != 0, is_known = form >= 0 && form < recmill::kNumForms;
    rows.emplace_back(num_rows, is_known ? recmill::bytes_of_row(form, dim) : 8);
    for (int64_t i = 0; i < rows.back().size(); ++i) rows.back()[i] = static_cast<uint8_t>(i * 37);
    given_rows.push_back(rows.back().in());
    given_orders.emplace_back();
    if (feed.below(2)) {
      orders.emplace_back(num_rows);
      for (int64_t i = 0; i < num_rows; ++i)
        orders.back()[i] = num_rows > 0 ? feed.mostly_up_to<int32_t>(num_rows - 1) : 0;
      given_orders.back() = orders.back().in();
    }
    values.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) values.back()[i] = num_rows > 0 ? feed.mostly_up_to(num_rows - 1) : 0;
    given_values.push_back(values.back().in());
    offsets.push_back(fuzz::offsets_of(feed, num_lists, count));
    if (feed.below(4)) {
      offsets.back()[0] = 0;
      offsets.back()[num_lists] = count;
    }
    given_offsets.push_back(offsets.back().in());
    if (!is_pooled) {
      kept.emplace_back(count, dim);
      given_kept.push_back(kept.back().out());
    }
    const int64_t own[] = {form, dim, is_pooled ? width : -1, feed.below(2), feed.mostly_up_to(3)};
    std::copy(own, own + 5, numbers.get() + 5 * f);
    width += is_pooled ? dim : 0;
  }
  width += feed.mostly_up_to(2) == 1;
  const recmill::PooledTables tables(given_rows, given_orders, numbers.in(), width);
  fuzz::Held<float> out(num_lists, width);
  recmill::pool_tables(tables, given_values, given_offsets, num_lists, out.out(), given_kept);
  for (int64_t f = 0; f < num_features; ++f) {  // what was accepted are lists of rows
    fuzz::must(offsets[f][0] == 0 && offsets[f][num_lists] == values[f].size(), "offsets do not cover the values");
    for (int64_t i = 0; i < values[f].size(); ++i)
      fuzz::must(values[f][i] >= 0 && values[f][i] < given_rows[f].dim(0), "an id is not a row");
  }
}

}  // namespace

FUZZ(pool)

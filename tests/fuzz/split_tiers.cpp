// Tiers and slots of ids, and distinct keys, with any ids and keys; the map of a table is as the planner makes it.
#include "split_tiers/cpu.cpp"

#include "fuzz.h"

namespace {

template <typename Id>
void split(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(3));
  const int64_t num_rows = feed.below(200), num_words = (num_rows + 63) / 64, num_ids = feed.below(60);
  fuzz::Held<int64_t> bits(feed.below(16) ? num_words : feed.below(6));
  fuzz::Held<int32_t> ranks(feed.below(16) ? num_words : feed.below(6));
  std::vector<int64_t> entries;
  for (int64_t row = 0; row < num_rows && row / 64 < bits.size(); ++row) {
    if (row % 64 == 0 && row / 64 < ranks.size()) ranks[row / 64] = static_cast<int32_t>(entries.size());
    if (feed.below(4)) continue;
    bits[row / 64] = static_cast<int64_t>(static_cast<uint64_t>(bits[row / 64]) | uint64_t{1} << (row % 64));
    entries.push_back(feed.number<int64_t>());
  }
  if (entries.empty() && feed.below(8)) entries.push_back(0);
  fuzz::Held<int64_t> moved(entries.data(), entries.data() + entries.size());
  const int64_t claimed = feed.below(16) ? num_rows : feed.mostly_up_to(200);
  fuzz::Held<Id> ids(num_ids);
  for (int64_t n = 0; n < num_ids; ++n) ids[n] = feed.mostly_up_to<Id>(num_rows ? num_rows - 1 : 0);
  fuzz::Held<uint8_t> tiers(feed.below(16) ? num_ids : feed.below(60));
  fuzz::Held<int64_t> slots(feed.below(16) ? num_ids : feed.below(60));
  recmill::split_tiers(ids.in(), bits.in(), ranks.in(), moved.in(), claimed, 3, tiers.out(), slots.out());
  for (int64_t n = 0; n < num_ids; ++n) {
    const int64_t word = ids[n] / 64, bit = ids[n] % 64;
    if (static_cast<uint64_t>(bits[word]) >> bit & 1) continue;
    fuzz::must(tiers[n] == 3 && slots[n] >= 0 && slots[n] <= ids[n], "a row of the common tier is elsewhere");
  }
}

void distinct(fuzz::Feed& feed) {
  const int64_t num_keys = feed.below(80), bound = feed.below(4) ? 30 : feed.number<int64_t>();
  fuzz::Held<int64_t> keys(num_keys), found(num_keys), inverse(num_keys);
  for (int64_t n = 0; n < num_keys; ++n) keys[n] = feed.mostly_up_to(29);
  const int64_t count = recmill::distinct_keys(keys.in(), bound, found.out(), inverse.out());
  for (int64_t n = 0; n < num_keys; ++n) fuzz::must(found[inverse[n]] == keys[n], "a key has another place");
  for (int64_t k = 1; k < count; ++k) fuzz::must(found[k - 1] < found[k], "keys do not ascend");
}

void split_any(fuzz::Feed& feed) {
  const int64_t kind = feed.below(3);
  kind == 0 ? split<int64_t>(feed) : kind == 1 ? split<int32_t>(feed) : distinct(feed);
}

}  // namespace

FUZZ(split_any)

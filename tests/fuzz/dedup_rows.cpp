// Jagged features with any offsets: what dedup_rows accepts, it must group by content, exactly.
#include "dedup_rows/cpu.cpp"

#include "fuzz.h"

namespace {

void dedup(fuzz::Feed& feed) {
  recmill::forced.hash_mask = feed.below(2) ? ~uint64_t{0} : 3;  // hashes that collide
  recmill::forced.is_portable = feed.below(2);
  const int64_t num_rows = feed.below(40), num_features = feed.below(3) + 1, threads = feed.below(3);
  std::vector<fuzz::Held<int64_t>> wide, offsets;
  std::vector<fuzz::Held<uint8_t>> narrow;
  std::vector<recmill::Input> values, given;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t count = feed.below(120);
    offsets.push_back(fuzz::offsets_of(feed, num_rows, count));
    given.push_back(offsets.back().in());
    if (feed.below(2)) {
      wide.emplace_back(count);
      for (int64_t i = 0; i < count; ++i) wide.back()[i] = feed.below(3);
      values.push_back(wide.back().in());
    } else {
      narrow.emplace_back(count);
      for (int64_t i = 0; i < count; ++i) narrow.back()[i] = static_cast<uint8_t>(feed.below(2));
      values.push_back(narrow.back().in());
    }
  }
  fuzz::Held<int64_t> unique(num_rows), inverse(num_rows);
  const int64_t found = recmill::dedup_rows(values, given, unique.out(), inverse.out(), static_cast<int>(threads));
  const auto features = recmill::read_lists(values, given, num_rows);
  const auto equal = [&](int64_t a, int64_t b) {
    for (const recmill::Lists& lists : features)
      if (lists.length(a) != lists.length(b) || std::memcmp(lists.begin(a), lists.begin(b), lists.num_bytes(a)) != 0)
        return false;
    return true;
  };
  for (int64_t row = 0; row < num_rows; ++row) {
    fuzz::must(inverse[row] >= 0 && inverse[row] < found, "a row names no distinct row");
    fuzz::must(equal(row, unique[inverse[row]]), "a row differs from its distinct row");
  }
  for (int64_t u = 0; u < found; ++u)
    for (int64_t v = 0; v < u; ++v) fuzz::must(!equal(unique[u], unique[v]), "two distinct rows are equal");
}

}  // namespace

FUZZ(dedup)

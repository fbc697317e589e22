// Counts of ids, with any ids and few or many rows.
#include "count_rows/cpu.cpp"

#include "fuzz.h"

namespace {

template <typename Id>
void count(fuzz::Feed& feed) {
  recmill::forced.threads = 1 + static_cast<int>(feed.below(3));
  const int64_t num_rows = feed.below(4) ? feed.below(30) : recmill::kPrivateRows + feed.below(3);
  const int64_t num_ids = feed.below(80), highest = std::min<int64_t>(std::max<int64_t>(num_rows, 1) - 1, 29);
  fuzz::Held<int64_t> counts(num_rows);
  fuzz::Held<Id> ids(num_ids);
  for (int64_t n = 0; n < num_ids; ++n) ids[n] = feed.mostly_up_to<Id>(highest);
  try {
    recmill::count_rows(counts.out(), ids.in());
  } catch (const std::invalid_argument&) {
    for (int64_t row = 0; row < num_rows; ++row) fuzz::must(counts[row] == 0, "refused ids were counted");
    throw;
  }
  for (int64_t n = 0; n < num_ids; ++n) --counts[ids[n]];
  for (int64_t row = 0; row < num_rows; ++row) fuzz::must(counts[row] == 0, "a row has another count");
}

void count_any(fuzz::Feed& feed) { feed.below(2) ? count<int64_t>(feed) : count<int32_t>(feed); }

}  // namespace

FUZZ(count_any)

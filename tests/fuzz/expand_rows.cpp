// Distinct rows for every sample and the sums of their gradients, with any inverse.
#include "expand_rows/cpu.cpp"

#include "fuzz.h"

namespace {

template <typename Value>
void expand(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(3));
  const int64_t num_distinct = feed.below(12), num_rows = feed.below(30), width = 1 + feed.below(70);
  fuzz::Held<Value> distinct(num_distinct, width);
  for (int64_t i = 0; i < distinct.size(); ++i) distinct[i] = static_cast<Value>(i);
  fuzz::Held<int64_t> inverse(num_rows);
  for (int64_t n = 0; n < num_rows; ++n) inverse[n] = feed.mostly_up_to(num_distinct ? num_distinct - 1 : 0);
  fuzz::Held<Value> out(feed.below(8) ? num_rows : feed.below(40), feed.below(8) ? width : 1 + feed.below(70));
  try {
    recmill::expand_rows(distinct.in(), inverse.in(), out.out());
    for (int64_t n = 0; n < num_rows; ++n)
      for (int64_t i = 0; i < width; ++i)
        fuzz::must(out[n * width + i] == distinct[inverse[n] * width + i], "a sample has another row");
  } catch (const std::invalid_argument&) {
  }
  fuzz::Held<Value> sums(num_distinct, width);
  recmill::sum_rows(out.in(), inverse.in(), sums.out());
  for (int64_t n = 0; n < num_rows; ++n)
    for (int64_t i = 0; i < width; ++i) sums[inverse[n] * width + i] -= out[n * width + i];
  for (int64_t i = 0; i < sums.size(); ++i) fuzz::must(sums[i] == 0, "a row has another sum");  // small whole numbers
}

void expand_any(fuzz::Feed& feed) { feed.below(2) ? expand<float>(feed) : expand<double>(feed); }

}  // namespace

FUZZ(expand_any)

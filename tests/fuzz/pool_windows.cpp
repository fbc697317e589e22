// Means over windows and their gradients, with any starts and lengths.
#include "pool_windows/cpu.cpp"

#include "fuzz.h"

namespace {

void pool(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  const bool has_scores = feed.below(2);
  const int64_t num_rows = feed.below(30), width = feed.below(20) + 1, num_heads = has_scores ? feed.below(3) + 1 : 1;
  const int64_t count = feed.below(12);
  fuzz::Held<float> rows(num_rows, width), scores(num_rows, num_heads), gradient(count * num_heads * width);
  fuzz::Held<float> out(count * num_heads * width), log_sums(count, num_heads);
  fuzz::Held<float> row_gradient(num_rows, width), score_gradient(has_scores ? scores.size() : 0);
  for (int64_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(feed.number<int8_t>());
  for (int64_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(feed.number<int8_t>());
  for (int64_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 7);
  fuzz::Held<int64_t> starts(count), lengths(count);
  for (int64_t w = 0; w < count; ++w) {
    starts[w] = feed.mostly_up_to(num_rows);
    lengths[w] = feed.mostly_up_to(4);
  }
  recmill::OptionalInput given;
  if (has_scores) given = scores.in();
  recmill::pool_windows(rows.in(), given, starts.in(), lengths.in(), out.out(), log_sums.out());
  for (int64_t w = 0; w < count; ++w)
    for (int64_t i = 0; i < num_heads * width; ++i) {
      const float mean = out[w * num_heads * width + i];
      fuzz::must(mean >= -128.5f && mean <= 127.5f, "a mean lies outside of its values");
    }
  recmill::pool_windows_backward(rows.in(), given, starts.in(), lengths.in(), out.in(), log_sums.in(), gradient.in(),
                                 row_gradient.out(), score_gradient.out());
}

}  // namespace

FUZZ(pool)

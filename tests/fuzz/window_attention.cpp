// Attention inside windows and its gradient, with any starts and lengths.
#include "window_attention/cpu.cpp"

#include "fuzz.h"

namespace {

void attend_windows(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(2));
  const int64_t num_rows = feed.below(30), num_heads = feed.below(3) + 1, head_width = feed.below(12) + 1;
  const int64_t width = num_heads * head_width, count = feed.below(12);
  fuzz::Held<float> packed(num_rows, feed.below(16) ? 3 * width : feed.below(40) + 1);
  for (int64_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<float>(feed.number<int8_t>()) / 16.0f;
  fuzz::Held<int64_t> starts(count), lengths(count);
  int64_t total = 0;
  const bool is_overlapping = feed.below(2);
  for (int64_t w = 0; w < count; ++w) {
    starts[w] = is_overlapping ? feed.below(3) : feed.mostly_up_to(num_rows);
    lengths[w] = is_overlapping ? feed.mostly_up_to(12) : feed.mostly_up_to(5);
    if (lengths[w] > 0 && lengths[w] <= num_rows) total += lengths[w];
  }
  fuzz::Held<float> out(total, width), log_sums(num_heads, total), gradient(total, width), found(packed.size());
  for (int64_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 7);
  recmill::window_attention(packed.in(), starts.in(), lengths.in(), out.out(), log_sums.out());
  for (int64_t i = 0; i < out.size(); ++i)
    fuzz::must(out[i] >= -8.01f && out[i] <= 8.01f, "an output lies outside of the values");
  recmill::window_attention_backward(packed.in(), starts.in(), lengths.in(), out.in(), log_sums.in(), gradient.in(),
                                     found.out());
}

}  // namespace

FUZZ(attend_windows)

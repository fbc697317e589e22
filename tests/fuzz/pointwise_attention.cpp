// Pointwise attention inside windows and its gradient, with any starts, lengths and numbers of biases.
#include "pointwise_attention/cpu.cpp"

#include "fuzz.h"

namespace {

void attend_pointwise(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(2));
  const int64_t num_rows = feed.below(30), num_heads = feed.below(3) + 1, head_width = feed.below(12) + 1;
  const int64_t width = num_heads * head_width, count = feed.below(12), num_biases = feed.below(16);
  const bool is_last_only = feed.below(2), is_overlapping = feed.below(2);
  fuzz::Held<float> packed(num_rows, feed.below(16) ? 3 * width : feed.below(40) + 1), bias(num_biases);
  for (int64_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<float>(feed.number<int8_t>()) / 16.0f;
  fuzz::Held<int64_t> starts(count), lengths(count);
  int64_t total = 0;
  for (int64_t w = 0; w < count; ++w) {
    starts[w] = is_overlapping ? feed.below(3) : feed.mostly_up_to(num_rows);
    lengths[w] = is_overlapping ? feed.mostly_up_to(12) : feed.mostly_up_to(5);
    if (lengths[w] > 0 && lengths[w] <= num_rows) total += lengths[w];
  }
  const int64_t num_out = is_last_only ? count : total;
  fuzz::Held<float> out(num_out, width), gradient(num_out, width), found(packed.size()), bias_found(num_biases);
  for (int64_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 7);
  recmill::pointwise_attention(packed.in(), bias.in(), starts.in(), lengths.in(), out.out(), num_heads, 0.5f,
                               is_last_only);
  for (int64_t i = 0; i < out.size(); ++i) fuzz::must(out[i] == out[i], "an output is not a number");
  recmill::pointwise_attention_backward(packed.in(), bias.in(), starts.in(), lengths.in(), gradient.in(), found.out(),
                                        bias_found.out(), num_heads, 0.5f, is_last_only);
}

}  // namespace

FUZZ(attend_pointwise)

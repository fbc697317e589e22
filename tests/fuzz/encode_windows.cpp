// Encoders of any sizes over windows with any starts and lengths.
#include "encode_windows/cpu.cpp"

#include "fuzz.h"

namespace {

void encode(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(3) == 0;
  recmill::forced_narrow = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(2));
  const int64_t num_blocks = feed.below(3), num_heads = feed.below(3) + 1, width = feed.below(40) + 1;
  const int64_t num_queries = feed.below(3) + 1, num_rows = feed.below(3) ? feed.below(40) : feed.below(200);
  const int64_t heads = num_heads * (feed.below(16) ? 16 : feed.below(40) + 1);
  std::vector<fuzz::Held<float>> arrays;
  const auto add = [&](int64_t rows, int64_t columns) {
    arrays.emplace_back(feed.below(64) ? rows : feed.below(50) + 1, columns);
    for (int64_t i = 0; i < arrays.back().size(); ++i) arrays.back()[i] = static_cast<float>(i * 7 % 13 - 6) / 32.0f;
  };
  for (int64_t n = 0; n < num_blocks; ++n) {
    const int64_t inner = feed.below(50) + 1;
    add(3 * heads, width);
    add(3 * heads, 0);
    add(width, heads);
    add(width, 0);
    add(inner, width);
    add(inner, 0);
    add(width, inner);
  }
  std::vector<recmill::Input> given;
  for (const fuzz::Held<float>& own : arrays) given.push_back(own.in());
  fuzz::Held<float> positions(feed.below(60), width), query(num_queries, width), mix(width, num_queries * width), bias(width);
  for (int64_t i = 0; i < query.size(); ++i) query[i] = static_cast<float>(feed.number<int8_t>());
  for (int64_t row = 0; row < width; ++row)  // the mean of what the heads of the pooling found
    for (int64_t q = 0; q < num_queries; ++q) mix[row * num_queries * width + q * width + row] = 1.0f / num_queries;
  const recmill::OptionalInput place = feed.below(2) ? recmill::OptionalInput(positions.in()) : std::nullopt;
  const recmill::WindowEncoder encoder(given, place, query.in(), mix.in(), bias.in(), num_heads, 1e-5);
  fuzz::Held<float> rows(num_rows, width);
  for (int64_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(feed.number<int8_t>()) / 16.0f;
  const int64_t count = feed.below(100);
  fuzz::Held<int64_t> starts(count), lengths(count);
  for (int64_t w = 0; w < count; ++w) {
    starts[w] = feed.mostly_up_to(num_rows);
    lengths[w] = feed.below(4) ? feed.mostly_up_to(6) : feed.mostly_up_to(150);
  }
  fuzz::Held<float> out(count, width);
  recmill::encode_windows(encoder, rows.in(), starts.in(), lengths.in(), out.out());
  for (int64_t i = 0; i < out.size(); ++i) {
    fuzz::must(out[i] == out[i], "an output is not a number");
    if (num_blocks == 0) fuzz::must(out[i] >= -8.01f && out[i] <= 8.01f, "a mean lies outside of the rows");
  }
}

}  // namespace

FUZZ(encode)

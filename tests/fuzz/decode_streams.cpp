// Streams of a deduplicated row group: inverses, symbols and windows that a file may claim.
#include "decode_streams/cpu.cpp"

#include "fuzz.h"

namespace {

using fuzz::Feed;
using fuzz::Held;
using fuzz::must;

void decode_inverse(Feed& feed) {
  const int64_t num_sessions = feed.below(8);
  int64_t num_rows = 0;
  Held<int32_t> rows(num_sessions), again(feed.below(12));
  for (int64_t s = 0; s < num_sessions; ++s) {
    rows[s] = feed.mostly_up_to<int32_t>(9);
    if (rows[s] > 0 && rows[s] < 20) num_rows += rows[s];
  }
  if (feed.below(8) == 0) num_rows = feed.below(64);
  for (int64_t i = 0; i < again.size(); ++i) again[i] = feed.mostly_up_to<int32_t>(5);
  const int64_t first_bit = feed.mostly_up_to(9);
  Held<uint8_t> bits(feed.below(20));
  for (int64_t i = 0; i < bits.size(); ++i) bits[i] = feed.number<uint8_t>();
  Held<int32_t> inverse(num_rows);
  Held<int64_t> distinct(num_sessions);
  const int64_t found =
      recmill::decode_inverse(rows.in(), bits.in(), first_bit, again.in(), inverse.out(), distinct.out());
  int64_t total = 0;
  for (int64_t s = 0; s < num_sessions; ++s) total += distinct[s];
  must(total == found, "sessions have other numbers of distinct rows than all together");
  for (int64_t i = 0; i < num_rows; ++i) must(inverse[i] >= 0 && inverse[i] < found, "a row names no distinct row");
}

void decode_symbols(Feed& feed) {
  Held<int64_t> begins(256), popular(feed.below(40));
  Held<int32_t> counts(256);
  const int64_t first_escape = feed.mostly_up_to(200), num_bytes = feed.below(4);
  for (int64_t i = 0; i < popular.size(); ++i) popular[i] = 1000 + i;
  for (int64_t symbol = 0; symbol < 256; ++symbol) {
    begins[symbol] = symbol < 16 ? feed.mostly_up_to(60) : symbol % 40;
    counts[symbol] = symbol < 16 ? feed.mostly_up_to<int32_t>(8) : symbol % 16 < 8 ? 0 : num_bytes;
  }
  Held<uint8_t> rest(feed.number<uint8_t>());
  for (int64_t i = 0; i < rest.size(); ++i) rest[i] = feed.number<uint8_t>();
  Held<uint8_t> symbols(feed.rest(), feed.rest() + std::min<int64_t>(feed.left(), 512));
  Held<int64_t> ids(symbols.size());
  recmill::decode_symbols(symbols.in(), rest.in(), begins.in(), counts.in(), first_escape, popular.in(), ids.out());
}

void decode_windows(Feed& feed) {
  const int64_t num_sessions = feed.below(6), num_values = feed.mostly_up_to(60), num_windows = feed.below(24);
  const bool has_one_length = feed.below(2), has_begins = feed.below(2);
  Held<int32_t> steps(num_windows), lengths(has_one_length ? 1 : num_windows), out(num_windows);
  Held<int64_t> distinct(num_sessions), begins(num_sessions), starts(num_windows), parts(2 * num_sessions);
  for (int64_t u = 0; u < num_windows; ++u) steps[u] = feed.mostly_up_to<int32_t>(8);
  for (int64_t u = 0; u < lengths.size(); ++u) lengths[u] = feed.mostly_up_to<int32_t>(3);
  int64_t left = num_windows;
  for (int64_t s = 0; s < num_sessions; ++s) {
    distinct[s] = s + 1 < num_sessions ? feed.mostly_up_to(std::max<int64_t>(0, left)) : left;
    if (distinct[s] >= 0 && distinct[s] <= left) left -= distinct[s];
    begins[s] = feed.mostly_up_to(num_values < 0 || num_values > 60 ? 9 : num_values);
  }
  recmill::OptionalInput given;
  if (has_begins) given = begins.in();
  const auto [num_parts, used] = recmill::decode_windows(num_values, steps.in(), lengths.in(), distinct.in(), given,
                                                         starts.out(), out.out(), parts.out());
  must(num_parts >= 0 && num_parts <= num_sessions, "more parts than sessions");
  for (int64_t u = 0; u < num_windows; ++u)
    must(out[u] >= 0 && starts[u] >= 0 && starts[u] <= used - out[u], "a window lies outside of the values");
  for (int64_t p = 0; p < num_parts; ++p)
    must(parts[p] >= 0 && parts[num_sessions + p] >= 0 && parts[p] <= num_values - parts[num_sessions + p],
         "a part lies outside of the values");
}

void decode(Feed& feed) {
  const int64_t which = feed.below(3);
  if (which == 0) decode_inverse(feed);
  else if (which == 1) decode_symbols(feed);
  else decode_windows(feed);
}

}  // namespace

FUZZ(decode)

// The streams of a deduplicated row group as arrays: inverses, ids from symbols, windows of histories. One pass each.
// Streams come from files: whatever they contain, nothing outside of the arrays is read or written.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"

namespace recmill {
namespace {

// Returns the number of distinct rows of all sessions.
int64_t decode_inverse(const Input& rows_of_sessions, const Input& changed_bits, int64_t first_bit, const Input& changes,
                       const Output& inverse_rows, const Output& distinct_of_sessions) {
  const int64_t num_sessions = rows_of_sessions.num_items(), num_rows = inverse_rows.num_items();
  const int64_t num_bits = num_rows - num_sessions, num_again = changes.num_items();
  const int32_t* num_rows_S = rows_of_sessions.as<const int32_t>("num_rows_S");
  const uint8_t* bits = changed_bits.as<const uint8_t>("changed_bits");
  const int32_t* again = changes.as<const int32_t>("again_C");
  int32_t* inverse = inverse_rows.as<int32_t>("inverse_R");
  int64_t* num_distinct_S = distinct_of_sessions.as<int64_t>("num_distinct_S", num_sessions);
  if (first_bit < 0 || num_bits < 0 || first_bit > 8 * changed_bits.num_items() - num_bits)
    refuse("received " + std::to_string(8 * changed_bits.num_items()) + " bits, expected " + std::to_string(num_bits) +
           " from bit " + std::to_string(first_bit) + " on");
  int64_t total = 0;
  for (int64_t s = 0; s < num_sessions; ++s) {
    if (num_rows_S[s] < 1) refuse("session " + std::to_string(s) + " has " + std::to_string(num_rows_S[s]) + " rows");
    total += num_rows_S[s];
  }
  if (total != num_rows)
    refuse("the sessions have " + std::to_string(total) + " rows, expected " + std::to_string(num_rows));
  int64_t bit = first_bit, event = 0;
  int32_t next = 0;
  for (int64_t s = 0; s < num_sessions; ++s) {
    const int32_t base = next;
    const int64_t last_bit = bit + num_rows_S[s] - 1;
    int32_t current = next++;
    *inverse++ = current;
    if (num_again == 0) {  // every change leads to a new list: no branches needed
      for (; bit < last_bit; ++bit) *inverse++ = current += (bits[bit >> 3] >> (bit & 7)) & 1;
      next = current + 1;
    }
    for (; bit < last_bit; ++bit) {
      if ((bits[bit >> 3] >> (bit & 7)) & 1) {
        if (event == num_again) refuse("more rows changed than the " + std::to_string(num_again) + " listed changes");
        const int32_t older = again[event++];
        if (older < 0 || older > next - base)
          refuse("change " + std::to_string(event - 1) + " names list " + std::to_string(older) + " of " +
                 std::to_string(next - base));
        current = older ? base + older - 1 : next++;
      }
      *inverse++ = current;
    }
    num_distinct_S[s] = next - base;
  }
  if (event != num_again)
    refuse(std::to_string(event) + " rows changed, expected " + std::to_string(num_again) + " as listed");
  return next;
}

void decode_symbols(const Input& symbol_bytes, const Input& following_bytes, const Input& symbol_begins,
                    const Input& symbol_counts, int64_t first_escape, const Input& popular_ids, const Output& out) {
  const int64_t num_symbols = symbol_bytes.num_items(), num_rest = following_bytes.num_items();
  const int64_t num_popular = popular_ids.num_items();
  const uint8_t* symbols = symbol_bytes.as<const uint8_t>("symbols_N");
  const uint8_t* rest = following_bytes.as<const uint8_t>("rest");
  const int64_t* begins = symbol_begins.as<const int64_t>("begins", 256);
  const int32_t* counts = symbol_counts.as<const int32_t>("num_rest", 256);
  const int64_t* popular = popular_ids.as<const int64_t>("popular");
  int64_t* ids = out.as<int64_t>("ids_N", num_symbols);
  struct Symbol {
    int64_t begin;
    uint64_t mask;        // selects the bytes that follow it
    uint64_t is_popular;  // all bits or none
    int64_t count;
  } table[256];
  int64_t most = 1;
  for (int32_t symbol = 0; symbol < 256; ++symbol) {
    const int32_t count = counts[symbol];
    if (count < 0 || count > 8)
      refuse("symbol " + std::to_string(symbol) + " is followed by " + std::to_string(count) + " bytes, expected 0 to 8");
    const bool is_popular = count && symbol < first_escape;
    const uint64_t mask = is_popular ? 255 : (uint64_t{1} << (8 * (count & 7))) - 1;
    table[symbol] = {begins[symbol], mask, is_popular ? ~uint64_t{0} : 0, count};
    most = std::max<int64_t>(most, count);
  }
  int64_t at = 0, i = 0;
  // No branches on the kind of a symbol, which is unpredictable: 8 bytes are always read, and masks select between both
  // readings. 2.1 ns per id; with conditional expressions, which the compiler turns into branches, 6.2.
  const uint64_t limit = num_popular;
  while (limit && most < 8) {
    const int64_t stop = std::min(num_symbols, i + std::max<int64_t>(0, (num_rest - 8 - at) / most));
    if (i >= stop) break;
    uint64_t highest = 0;
    for (; i < stop; ++i) {
      const Symbol& own = table[symbols[i]];
      uint64_t following;
      std::memcpy(&following, rest + at, 8);
      const uint64_t begin = own.begin, low = following & own.mask, position = (begin + low) & own.is_popular;
      highest = std::max(highest, position);
      const uint64_t known = popular[position < limit ? position : 0];
      ids[i] = static_cast<int64_t>((known & own.is_popular) | ((begin | low) & ~own.is_popular));
      at += own.count;
    }
    if (highest >= limit) {  // the loop below finds the symbol and reports it
      i = at = 0;
      break;
    }
  }
  for (; i < num_symbols; ++i) {
    const uint8_t symbol = symbols[i];
    const int32_t count = counts[symbol];
    int64_t id = begins[symbol];
    if (count) {
      if (count > num_rest - at) refuse("symbol " + std::to_string(i) + ": the bytes that follow it are missing");
      if (symbol < first_escape) {
        const auto position = static_cast<int64_t>(static_cast<uint64_t>(id) + rest[at]);
        if (position < 0 || position >= num_popular)
          refuse("symbol " + std::to_string(i) + ": names popular id " + std::to_string(position) + " of " +
                 std::to_string(num_popular));
        id = popular[position];
      } else {
        for (int32_t byte = 0; byte < count; ++byte) id |= static_cast<int64_t>(rest[at + byte]) << (8 * byte);
      }
      at += count;
    }
    ids[i] = id;
  }
  if (at != num_rest)
    refuse("the symbols need " + std::to_string(at) + " following bytes, received " + std::to_string(num_rest));
}

struct Windows {
  const int32_t* steps;    // from one end to the next; a session's first step is its first end
  const int32_t* lengths;  // steps likewise, or one number: the length, cut off at the sequence's begin
  int64_t num_lengths;
  int64_t num_values;

  // Fills starts and lengths of the windows [first, last) of one session, whose sequence begins at `begin`. Returns the
  // range of values that they cover.
  std::pair<int64_t, int64_t> place(int64_t first, int64_t last, int64_t begin, int64_t* starts, int32_t* out) const {
    int64_t end = 0, length = 0, low = std::numeric_limits<int64_t>::max(), high = begin;
    for (int64_t u = first; u < last; ++u) {
      end += steps[u];
      length = num_lengths == 1 ? std::min<int64_t>(end, lengths[0]) : length + lengths[u];
      if (length < 0 || length > end || end > num_values - begin)
        refuse("window " + std::to_string(u) + " ends at " + std::to_string(end) + " and has " +
               std::to_string(length) + " values, expected it inside [0, " + std::to_string(num_values - begin) + ")");
      starts[u] = begin + end - length;
      out[u] = static_cast<int32_t>(length);
      low = std::min(low, starts[u]);
      high = std::max(high, begin + end);
    }
    return {std::min(low, high), high};
  }
};

// Fills starts among the values of all sessions or, with `begins`, among the used parts of the values: sessions with the
// same begin share a part. Returns the number of parts and the number of values in them.
std::tuple<int64_t, int64_t> decode_windows(int64_t num_values, const Input& steps, const Input& lengths,
                                            const Input& distinct_of_sessions, const OptionalInput& begins,
                                            const Output& starts_out, const Output& lengths_out, const Output& parts) {
  const int64_t num_windows = steps.num_items(), num_lengths = lengths.num_items();
  const int64_t num_sessions = distinct_of_sessions.num_items();
  const Windows windows{steps.as<const int32_t>("steps_U"), lengths.as<const int32_t>("lengths"), num_lengths, num_values};
  const int64_t* num_distinct_S = distinct_of_sessions.as<const int64_t>("num_distinct_S");
  const int64_t* begins_S = as_or_null<int64_t>(begins, "begins_S", num_sessions);
  int64_t* starts = starts_out.as<int64_t>("starts_U", num_windows);
  int32_t* out = lengths_out.as<int32_t>("lengths_U", num_windows);
  int64_t total = 0;
  for (int64_t s = 0; s < num_sessions; ++s) {
    if (num_distinct_S[s] < 0 || num_distinct_S[s] > num_windows - total)
      refuse("session " + std::to_string(s) + " has " + std::to_string(num_distinct_S[s]) + " windows, of " +
             std::to_string(num_windows) + " in all sessions");
    total += num_distinct_S[s];
  }
  if (total != num_windows || (num_lengths != 1 && num_lengths != num_windows))
    refuse("received " + std::to_string(num_windows) + " windows and " + std::to_string(num_lengths) +
           " lengths, expected " + std::to_string(total));
  if (!begins) {
    for (int64_t s = 0, first = 0, begin = 0; s < num_sessions; first += num_distinct_S[s++])
      begin = windows.place(first, first + num_distinct_S[s], begin, starts, out).second;
    return {0, num_values};
  }
  struct Session {
    int64_t first, last, low, high;
  };
  std::vector<Session> sessions(num_sessions);
  std::vector<std::pair<int64_t, int64_t>> order(num_sessions);  // by begin
  for (int64_t s = 0, first = 0; s < num_sessions; ++s) {
    const int64_t last = first + num_distinct_S[s], begin = begins_S[s];
    if (begin < 0 || begin > num_values) refuse("session " + std::to_string(s) + ": its sequence begins outside of the values");
    const auto [low, high] = windows.place(first, last, begin, starts, out);
    sessions[s] = {first, last, low, high};
    order[s] = {begin, s};
    first = last;
  }
  std::sort(order.begin(), order.end());
  int64_t* part_starts = parts.as<int64_t>("parts", 2 * num_sessions);
  int64_t* part_sizes = part_starts + num_sessions;
  int64_t num_parts = 0, used = 0;
  for (size_t i = 0, j = 0; i < order.size(); i = j) {
    int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
    for (; j < order.size() && order[j].first == order[i].first; ++j) {
      low = std::min(low, sessions[order[j].second].low);
      high = std::max(high, sessions[order[j].second].high);
    }
    for (size_t k = i; k < j; ++k) {
      const Session& own = sessions[order[k].second];
      for (int64_t u = own.first; u < own.last; ++u) starts[u] += used - low;
    }
    part_starts[num_parts] = low;
    part_sizes[num_parts++] = high - low;
    used += high - low;
  }
  return {num_parts, used};
}

}  // namespace

void bind_decode_streams(nb::module_& m) {
  add_function(m, "decode_inverse", &decode_inverse);
  add_function(m, "decode_symbols", &decode_symbols);
  add_function(m, "decode_windows", &decode_windows);
}

}  // namespace recmill

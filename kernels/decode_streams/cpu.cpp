// The streams of a deduplicated row group as arrays: inverses, ids from symbols, windows of histories. One pass each.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel.h"

namespace nb = nanobind;

namespace recmill {
namespace {

// Streams come from files: whatever they say, nothing outside of the arrays is read or written.
[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Returns the number of distinct rows of all sessions.
int64_t decode_inverse(Address num_rows_address, int64_t num_sessions, Address bits_address, int64_t first_bit,
                       int64_t num_bits, Address again_address, int64_t num_again, Address inverse_address,
                       int64_t num_rows, Address num_distinct_address) {
  const int32_t* num_rows_S = pointer<const int32_t>(num_rows_address);
  const uint8_t* bits = pointer<const uint8_t>(bits_address);
  const int32_t* again = pointer<const int32_t>(again_address);
  int32_t* inverse = pointer<int32_t>(inverse_address);
  int64_t* num_distinct_S = pointer<int64_t>(num_distinct_address);
  int64_t total = 0;
  for (int64_t s = 0; s < num_sessions; ++s) {
    if (num_rows_S[s] < 1) refuse("session " + std::to_string(s) + " has " + std::to_string(num_rows_S[s]) + " rows");
    total += num_rows_S[s];
  }
  if (total != num_rows || num_bits != num_rows - num_sessions)
    refuse("the sessions have " + std::to_string(total) + " rows and " + std::to_string(num_bits) +
           " bits, expected " + std::to_string(num_rows) + " and " + std::to_string(num_rows - num_sessions));
  int64_t bit = first_bit, event = 0;
  int32_t next = 0;
  for (int64_t s = 0; s < num_sessions; ++s) {
    const int32_t base = next;
    const int64_t last_bit = bit + num_rows_S[s] - 1;
    int32_t current = next++;
    *inverse++ = current;
    if (num_again == 0) {  // every change is to a new list: no branches
      for (; bit < last_bit; ++bit) *inverse++ = current += (bits[bit >> 3] >> (bit & 7)) & 1;
      next = current + 1;
    }
    for (; bit < last_bit; ++bit) {
      if ((bits[bit >> 3] >> (bit & 7)) & 1) {
        if (event == num_again) refuse("more rows changed than the " + std::to_string(num_again) + " that are told");
        const int32_t older = again[event++];
        if (older < 0 || older > next - base)
          refuse("change " + std::to_string(event - 1) + " is to list " + std::to_string(older) + " of " +
                 std::to_string(next - base));
        current = older ? base + older - 1 : next++;
      }
      *inverse++ = current;
    }
    num_distinct_S[s] = next - base;
  }
  if (event != num_again) refuse(std::to_string(event) + " rows changed, " + std::to_string(num_again) + " are told");
  return next;
}

void decode_symbols(Address symbols_address, int64_t num_symbols, Address rest_address, int64_t num_rest,
                    Address begins_address, Address counts_address, int64_t first_escape, Address popular_address,
                    int64_t num_popular, Address ids_address) {
  const uint8_t* symbols = pointer<const uint8_t>(symbols_address);
  const uint8_t* rest = pointer<const uint8_t>(rest_address);
  const int64_t* begins = pointer<const int64_t>(begins_address);
  const int32_t* counts = pointer<const int32_t>(counts_address);
  const int64_t* popular = pointer<const int64_t>(popular_address);
  int64_t* ids = pointer<int64_t>(ids_address);
  struct Symbol {
    int64_t begin;
    uint64_t mask;        // of the bytes that follow it
    uint64_t is_popular;  // all bits or none
    int64_t count;
  } table[256];
  int64_t most = 1;
  for (int32_t symbol = 0; symbol < 256; ++symbol) {
    const int32_t count = counts[symbol];
    const bool is_popular = count && symbol < first_escape;
    const uint64_t mask = is_popular ? 255 : (uint64_t{1} << (8 * (count & 7))) - 1;
    table[symbol] = {begins[symbol], mask, is_popular ? ~uint64_t{0} : 0, count};
    most = std::max<int64_t>(most, count);
  }
  int64_t at = 0, i = 0;
  // Without branches on the kind of a symbol, which nothing predicts: 8 bytes are read whatever follows it, and masks
  // choose between both readings. 2.1 ns an id; with selections, of which the compiler makes branches, 6.2.
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
    if (highest >= limit) {  // said below
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
        const int64_t position = id + rest[at];
        if (position < 0 || position >= num_popular)
          refuse("symbol " + std::to_string(i) + ": is popular id " + std::to_string(position) + " of " +
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
    refuse(std::to_string(at) + " bytes follow the symbols, received " + std::to_string(num_rest));
}

struct Windows {
  const int32_t* steps;  // from one end to the next; a session's first is the end itself
  int64_t num_windows;
  const int32_t* lengths;  // likewise, or one number: as long as that, or as the end allows
  int64_t num_lengths;
  int64_t num_values;

  // Starts and lengths of the windows [first, last), those of one session, whose sequence begins at `begin`: the part
  // of the values that they lie in.
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

// Gives starts among the values of all sessions or, with `begins`, among the parts of the values that are used: sessions
// with the same begin share one. Returns the number of parts and of the values in them.
std::tuple<int64_t, int64_t> decode_windows(Address steps, int64_t num_windows, Address lengths, int64_t num_lengths,
                                            Address num_distinct_address, int64_t num_sessions, Address begins_address,
                                            int64_t num_values, Address starts_address, Address out_address,
                                            Address parts_address) {
  const Windows windows{pointer<const int32_t>(steps), num_windows, pointer<const int32_t>(lengths), num_lengths,
                        num_values};
  const int64_t* num_distinct_S = pointer<const int64_t>(num_distinct_address);
  const int64_t* begins_S = pointer<const int64_t>(begins_address);
  int64_t* starts = pointer<int64_t>(starts_address);
  int32_t* out = pointer<int32_t>(out_address);
  int64_t total = 0;
  for (int64_t s = 0; s < num_sessions; ++s) total += num_distinct_S[s];
  if (total != num_windows || (num_lengths != 1 && num_lengths != num_windows))
    refuse("received " + std::to_string(num_windows) + " windows and " + std::to_string(num_lengths) +
           " lengths, expected " + std::to_string(total));
  if (begins_S == nullptr) {
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
    if (begin < 0 || begin > num_values) refuse("session " + std::to_string(s) + " has no sequence");
    const auto [low, high] = windows.place(first, last, begin, starts, out);
    sessions[s] = {first, last, low, high};
    order[s] = {begin, s};
    first = last;
  }
  std::sort(order.begin(), order.end());
  int64_t* part_starts = pointer<int64_t>(parts_address);
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
  m.def("decode_inverse", &decode_inverse, nb::call_guard<nb::gil_scoped_release>());
  m.def("decode_symbols", &decode_symbols, nb::call_guard<nb::gil_scoped_release>());
  m.def("decode_windows", &decode_windows, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

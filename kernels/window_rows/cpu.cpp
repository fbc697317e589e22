// Lists that shift, as windows into one shared buffer: [a,b,c,d], [b,c,d,e] -> [a..e], (0,4), (1,4).
#include "jagged.h"

namespace recmill {
namespace {

// Ids and, if there are any, their weights: an element repeats only if both do.
struct Elements {
  std::vector<Lists> columns;

  bool equal(int64_t a, int64_t b) const { return equal(a, b, 1); }
  bool equal(int64_t a, int64_t b, int64_t count) const {
    for (const Lists& column : columns)
      if (!equal_bytes(column.values + a * column.item_bytes, column.values + b * column.item_bytes,
                       count * column.item_bytes))
        return false;
    return true;
  }
};

// Ids of 8 bytes without weights: one comparison is one instruction, 10x faster than through the columns.
struct PlainIds : Elements {
  const int64_t* ids;

  explicit PlainIds(const Elements& elements)
      : Elements(elements), ids(reinterpret_cast<const int64_t*>(elements.columns[0].values)) {}
  using Elements::equal;
  bool equal(int64_t a, int64_t b) const { return ids[a] == ids[b]; }
};

// The smallest shift of the list at `next` along the list at `last` with which they agree wherever they overlap;
// `last_length` if they share nothing. Knuth-Morris-Pratt, so that a list of one repeated id costs no more.
template <typename Compare>
int64_t find_shift(const Compare& elements, int64_t last, int64_t last_length, int64_t next, int64_t next_length,
                   std::vector<int64_t>& border) {
  const int64_t most = std::min(last_length, next_length);
  if (most == 0) return last_length;
  for (int64_t shift = 0; shift <= 1; ++shift)  // unchanged or shifted by one: nearly always, and memcmp is 10x faster
    if (last_length - shift > 0 && elements.equal(last + shift, next, std::min(last_length - shift, next_length)))
      return shift;
  border.assign(next_length, 0);
  for (int64_t i = 1, k = 0; i < next_length; ++i) {
    while (k > 0 && !elements.equal(next + i, next + k)) k = border[k - 1];
    if (elements.equal(next + i, next + k)) ++k;
    border[i] = k;
  }
  int64_t matched = 0;
  for (int64_t i = 0; i < last_length; ++i) {
    while (matched > 0 && !elements.equal(last + i, next + matched)) matched = border[matched - 1];
    if (elements.equal(last + i, next + matched)) ++matched;
    if (matched == next_length) return i + 1 - matched;  // the whole list lies inside the last one
  }
  return last_length - matched;
}

template <typename Compare>
int64_t lay_windows(const Compare& elements, int64_t num_rows, int64_t* starts, int64_t* added, bool reverse) {
  const Lists& lists = elements.columns[0];
  std::vector<int64_t> border;
  int64_t size = 0, last = -1;  // `last`: the row whose window ends at the buffer's end
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = reverse ? num_rows - 1 - i : i;
    const int64_t length = lists.length(row);
    const int64_t last_length = last < 0 ? 0 : lists.length(last);
    int64_t shift = 0;
    if (last >= 0) shift = find_shift(elements, lists.offsets[last], last_length, lists.offsets[row], length, border);
    starts[row] = size - last_length + shift;
    added[row] = std::max<int64_t>(0, starts[row] + length - size);
    size += added[row];
    if (starts[row] + length == size && length > 0) last = row;
  }
  return size;
}

// starts[b]: where row b's window begins in the buffer. added[b]: how many of the row's last values it adds to the buffer.
// Rows are visited first to last, or last to first for histories that grow at the front; the buffer consists of the added
// values in that order. Returns the buffer's length.
int64_t window_rows(const std::vector<Input>& columns, const Input& offsets, const Output& starts_out,
                    const Output& added_out, bool reverse) {
  const int64_t num_rows = starts_out.num_items();
  const Elements elements{read_lists(columns, std::vector<Input>(columns.size(), offsets), num_rows)};
  int64_t* starts = starts_out.as<int64_t>("starts");
  int64_t* added = added_out.as<int64_t>("added", num_rows);
  if (elements.columns.size() == 1 && elements.columns[0].item_bytes == 8)
    return lay_windows(PlainIds(elements), num_rows, starts, added, reverse);
  return lay_windows(elements, num_rows, starts, added, reverse);
}

}  // namespace

void bind_window_rows(nb::module_& m) { add_function(m, "window_rows", &window_rows); }

}  // namespace recmill

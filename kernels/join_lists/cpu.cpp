// Rows of several blocks of lists in sequence, feature by feature. One call per batch, which holds no GIL and uses one
// thread.
#include <algorithm>
#include <cstring>

#include "arrays.h"

namespace recmill {
namespace {

// The lists of some rows, for several features. Keeps the arrays alive; built once per block of rows.
class ListBlock {
 public:
  ListBlock(std::vector<Input> values, std::vector<Input> offsets, int64_t num_rows)
      : num_rows(num_rows), values_(std::move(values)), offsets_(std::move(offsets)) {
    if (values_.size() != offsets_.size()) refuse("expected as many offsets as values");
    if (num_rows < 0) refuse("num_rows: is " + std::to_string(num_rows));
    for (size_t k = 0; k < values_.size(); ++k) {
      const auto feature = static_cast<int64_t>(k);
      values_[k].as<const int64_t>("values", Input::kAnySize, feature);
      offsets_[k].with_dtype<int64_t, int32_t>("offsets", [&](auto offset) {
        offsets_[k].as<const decltype(offset)>("offsets", num_rows + 1, feature);
      });
    }
  }

  const int64_t num_rows;

  int64_t num_features() const { return static_cast<int64_t>(values_.size()); }
  const int64_t* values(int64_t k) const { return static_cast<const int64_t*>(values_[k].data()); }

  template <typename Visit>
  void with_offsets(int64_t k, Visit visit) const {
    if (offsets_[k].itemsize() == 4) visit(static_cast<const int32_t*>(offsets_[k].data()));
    else visit(static_cast<const int64_t*>(offsets_[k].data()));
  }

  void check(int64_t k, int64_t first, int64_t last) const {
    if (first < 0 || first > last || last > values_[k].num_items())
      refuse("feature " + std::to_string(k) + ": its lists are the ids " + std::to_string(first) + " to " +
             std::to_string(last) + " of " + std::to_string(values_[k].num_items()));
  }

 private:
  std::vector<Input> values_, offsets_;
};

// Not part of the lambda below: there, the compiler reloads the number of rows after every sum, 1.5 times as slow.
template <typename Offset>
void add_lengths(const Offset* offsets, int64_t num_rows, int64_t* ends) {
  const auto first = static_cast<uint64_t>(offsets[0]);
  for (int64_t row = 0; row <= num_rows; ++row)  // unsigned: hostile offsets wrap around
    ends[row] = static_cast<int64_t>(static_cast<uint64_t>(ends[row]) + static_cast<uint64_t>(offsets[row]) - first);
}

// Fills `ends` with the number of ids of all features in the rows before each row. Returns the first feature with an id
// outside of [0, bound), or -1; ids are not read without bounds.
int64_t scan_lists(const ListBlock& block, const OptionalInput& bounds_of_features, const Output& ends_of_rows) {
  const int64_t* bounds = as_or_null<int64_t>(bounds_of_features, "bounds", block.num_features());
  const int64_t num_rows = block.num_rows;
  int64_t* ends = ends_of_rows.as<int64_t>("ends", num_rows + 1);
  std::fill(ends, ends + num_rows + 1, 0);
  int64_t found = -1;
  for (int64_t k = block.num_features() - 1; k >= 0; --k) {
    block.with_offsets(k, [&](const auto* offsets) {
      const int64_t first = offsets[0], last = offsets[num_rows];
      block.check(k, first, last);
      add_lengths(offsets, num_rows, ends);
      if (!bounds) return;
      const int64_t* values = block.values(k);
      const int64_t most = bounds[k] - 1;
      int64_t signs = 0;  // negative as soon as an id or (most - id) is; the difference wraps only for negative ids
      for (int64_t i = first; i < last; ++i)
        signs |= values[i] | static_cast<int64_t>(static_cast<uint64_t>(most) - static_cast<uint64_t>(values[i]));
      if (signs < 0) found = k;
    });
  }
  return found;
}

// Copies rows [start, stop) of each block; `ranges` holds start and stop per block.
void join_lists(const std::vector<const ListBlock*>& blocks, const Input& ranges, const Output& out,
                const Output& lengths_out, const Output& counts) {
  const int64_t num_features = counts.num_items(), num_values = out.num_items();
  const int64_t* range = ranges.as<const int64_t>("ranges", 2 * static_cast<int64_t>(blocks.size()));
  int64_t num_rows = 0, used = 0;
  for (size_t p = 0; p < blocks.size(); ++p) {
    const int64_t start = range[2 * p], stop = range[2 * p + 1];
    if (start < 0 || start > stop || stop > blocks[p]->num_rows || blocks[p]->num_features() != num_features)
      refuse("received rows " + std::to_string(start) + " to " + std::to_string(stop) + " of " +
             std::to_string(blocks[p]->num_rows) + " with " + std::to_string(blocks[p]->num_features()) +
             " features, expected " + std::to_string(num_features));
    num_rows += stop - start;
  }
  int64_t* values = out.as<int64_t>("values");
  int32_t* lengths = lengths_out.as<int32_t>("lengths", num_features * num_rows);
  for (int64_t k = 0; k < num_features; ++k) {
    const int64_t begin = used;
    for (size_t p = 0; p < blocks.size(); ++p)
      blocks[p]->with_offsets(k, [&](const auto* offsets) {
        const int64_t start = range[2 * p], count = range[2 * p + 1] - start;
        const int64_t first = offsets[start], last = offsets[start + count];
        blocks[p]->check(k, first, last);
        const int64_t size = last - first;
        if (size > num_values - used) refuse("the rows have more ids than " + std::to_string(num_values));
        if (size) std::memcpy(values + used, blocks[p]->values(k) + first, size * sizeof(int64_t));
        int32_t signs = 0;  // negative as soon as a length is
        for (int64_t i = 0; i < count; ++i)
          signs |= lengths[i] = static_cast<int32_t>(static_cast<uint64_t>(offsets[start + i + 1]) -
                                                     static_cast<uint64_t>(offsets[start + i]));
        if (signs < 0) refuse("feature " + std::to_string(k) + ": its offsets do not ascend");
        lengths += count;
        used += size;
      });
    counts.as<int64_t>("counts")[k] = used - begin;
  }
  if (used != num_values)
    refuse("the rows have " + std::to_string(used) + " ids, expected " + std::to_string(num_values));
}

}  // namespace

void bind_join_lists(nb::module_& m) {
  nb::class_<ListBlock>(m, "ListBlock").def(nb::init<std::vector<Input>, std::vector<Input>, int64_t>());
  add_function(m, "scan_lists", &scan_lists);
  add_function(m, "join_lists", &join_lists);
}

}  // namespace recmill

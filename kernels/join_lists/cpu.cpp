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
  // One array of int64 ids and one of offsets, int32 or int64, per feature.
  ListBlock(std::vector<Input> values, std::vector<Input> offsets, int64_t num_rows) : num_rows(num_rows) {
    if (values.size() != offsets.size()) refuse("expected as many offsets as values");
    check_num_rows();
    for (size_t k = 0; k < values.size(); ++k) {
      const auto feature = static_cast<int64_t>(k);
      const auto* ids = values[k].as<const int64_t>("values", Input::kAnySize, feature);
      offsets[k].with_dtype<int64_t, int32_t>("offsets", [&](auto offset) {
        const auto* own = offsets[k].as<const decltype(offset)>("offsets", num_rows + 1, feature);
        features_.push_back({ids, own, values[k].num_items(), false, sizeof(offset) == 4});
      });
    }
    for (auto* arrays : {&values, &offsets}) kept_.insert(kept_.end(), arrays->begin(), arrays->end());
  }

  // Ids of 4 bytes and int32 offsets of all features in one piece of memory, at these places.
  ListBlock(Input piece, const Input& values_at, const Input& offsets_at, const Input& counts, int64_t num_rows)
      : num_rows(num_rows) {
    check_num_rows();
    const int64_t num_features = counts.num_items(), room = static_cast<int64_t>(piece.nbytes());
    const auto *values = values_at.as<const int64_t>("values_at", num_features),
               *offsets = offsets_at.as<const int64_t>("offsets_at", num_features),
               *sizes = counts.as<const int64_t>("counts", num_features);
    const char* memory = piece.bytes("piece");
    const auto fits = [&](int64_t at, int64_t count) {
      return at >= 0 && at % 4 == 0 && at <= room && count >= 0 && count <= (room - at) / 4;
    };
    for (int64_t k = 0; k < num_features; ++k) {
      if (!fits(values[k], sizes[k]) || !fits(offsets[k], num_rows + 1))
        refuse("feature " + std::to_string(k) + ": its lists lie outside the piece");
      features_.push_back({memory + values[k], memory + offsets[k], sizes[k], true, true});
    }
    kept_.push_back(std::move(piece));
  }

  const int64_t num_rows;

  int64_t num_features() const { return static_cast<int64_t>(features_.size()); }

  // Calls visit(ids, offsets) with pointers of the right types.
  template <typename Visit>
  void with_lists(int64_t k, Visit visit) const {
    const Feature& own = features_[k];
    if (own.has_short_ids) visit(static_cast<const uint32_t*>(own.values), static_cast<const int32_t*>(own.offsets));
    else if (own.has_short_offsets)
      visit(static_cast<const int64_t*>(own.values), static_cast<const int32_t*>(own.offsets));
    else visit(static_cast<const int64_t*>(own.values), static_cast<const int64_t*>(own.offsets));
  }

  void check(int64_t k, int64_t first, int64_t last) const {
    if (first < 0 || first > last || last > features_[k].num_values)
      refuse("feature " + std::to_string(k) + ": its lists are the ids " + std::to_string(first) + " to " +
             std::to_string(last) + " of " + std::to_string(features_[k].num_values));
  }

 private:
  void check_num_rows() const {  // there is one more offset than rows
    if (num_rows < 0 || num_rows == INT64_MAX) refuse("num_rows: is " + std::to_string(num_rows));
  }

  struct Feature {
    const void *values, *offsets;
    int64_t num_values;
    bool has_short_ids, has_short_offsets;
  };
  std::vector<Feature> features_;
  std::vector<Input> kept_;
};

inline void copy_ids(const int64_t* ids, int64_t count, int64_t* out) {
  if (count) std::memcpy(out, ids, count * sizeof(int64_t));
}
inline void copy_ids(const uint32_t* ids, int64_t count, int64_t* out) { std::copy(ids, ids + count, out); }

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
    block.with_lists(k, [&](const auto* values, const auto* offsets) {
      const int64_t first = offsets[0], last = offsets[num_rows];
      block.check(k, first, last);
      add_lengths(offsets, num_rows, ends);
      if (!bounds) return;
      const int64_t most = bounds[k] - 1;
      int64_t signs = 0;  // negative as soon as an id or (most - id) is; the difference wraps only for negative ids
      for (int64_t i = first; i < last; ++i) {
        const auto id = static_cast<int64_t>(values[i]);
        signs |= id | static_cast<int64_t>(static_cast<uint64_t>(most) - static_cast<uint64_t>(id));
      }
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
      blocks[p]->with_lists(k, [&](const auto* ids, const auto* offsets) {
        const int64_t start = range[2 * p], count = range[2 * p + 1] - start;
        const int64_t first = offsets[start], last = offsets[start + count];
        blocks[p]->check(k, first, last);
        const int64_t size = last - first;
        if (size > num_values - used) refuse("the rows have more ids than " + std::to_string(num_values));
        copy_ids(ids + first, size, values + used);
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
  nb::class_<ListBlock>(m, "ListBlock")
      .def(nb::init<std::vector<Input>, std::vector<Input>, int64_t>())
      .def(nb::init<Input, const Input&, const Input&, const Input&, int64_t>());
  add_function(m, "scan_lists", &scan_lists);
  add_function(m, "join_lists", &join_lists);
}

}  // namespace recmill

// Rows of several blocks of lists in sequence, feature by feature. One call per batch, which holds no GIL and uses one
// thread.
#include <algorithm>
#include <cstring>

#include "arrays.h"
#include "parallel.h"

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

// Memory that is read soon. Blocks of rows wait for their batches outside of the caches, and the lists of a few hundred
// rows are too short for the CPU to fetch them by itself: so while one piece is copied, the next one is fetched. Many
// requests at once would only queue up.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* begin, int64_t num_bytes) : at_(static_cast<const char*>(begin)), end_(at_ + num_bytes) {}

  RECMILL_INLINE void fetch_line() {
    if (at_ == end_) return;  // both null if nothing follows
    __builtin_prefetch(at_, 0, 3);
    at_ += std::min<int64_t>(kLine, end_ - at_);
  }
  RECMILL_INLINE void fetch_rest() {
    while (at_ != end_) fetch_line();
  }
  static constexpr int64_t kLine = 64;

 private:
  const char *at_ = nullptr, *end_ = nullptr;
};

template <typename Id>
RECMILL_INLINE void copy_ids(const Id* ids, int64_t count, int64_t* out, Ahead ahead) {
  constexpr int64_t kStep = Ahead::kLine / sizeof(Id);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    ahead.fetch_line();
    for (int64_t j = i; j < i + kStep; ++j) out[j] = static_cast<int64_t>(ids[j]);
  }
  for (; i < count; ++i) out[i] = static_cast<int64_t>(ids[i]);
  ahead.fetch_rest();
}

// Returns a negative number if a length is.
template <typename Offset>
RECMILL_INLINE int32_t copy_lengths(const Offset* offsets, int64_t num_rows, int32_t* lengths, Ahead ahead) {
  constexpr int64_t kStep = Ahead::kLine / sizeof(Offset);
  int32_t signs = 0;
  const auto copy = [&](int64_t i) __attribute__((always_inline)) {
    signs |= lengths[i] =
        static_cast<int32_t>(static_cast<uint64_t>(offsets[i + 1]) - static_cast<uint64_t>(offsets[i]));
  };
  int64_t i = 0;
  for (; i + kStep <= num_rows; i += kStep) {
    ahead.fetch_line();
    for (int64_t j = i; j < i + kStep; ++j) copy(j);
  }
  for (; i < num_rows; ++i) copy(i);
  ahead.fetch_rest();
  return signs;
}

// Returns a negative number if an id is negative or not below the bound.
template <typename Id>
RECMILL_INLINE int64_t narrow_ids(const Id* ids, int64_t count, int64_t bound, uint32_t* out) {
  int64_t signs = 0;  // the difference wraps only for negative ids
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<int64_t>(ids[i]);
    signs |= id | static_cast<int64_t>(static_cast<uint64_t>(bound - 1) - static_cast<uint64_t>(id));
    out[i] = static_cast<uint32_t>(id);
  }
  return signs;
}

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

// Copies the lists to where PackedLists has them: ids of 4 bytes and int32 offsets, at these places of the piece. Fills
// `ends` as scan_lists does. Returns the first feature with an id outside of [0, bound), or -1; bounds are at most 2^31.
int64_t pack_lists(const ListBlock& block, const Input& bounds_of_features, const Output& piece, const Input& values_at,
                   const Input& offsets_at, const Output& ends_of_rows) {
  const int64_t num_features = block.num_features(), num_rows = block.num_rows;
  const auto *bounds = bounds_of_features.as<const int64_t>("bounds", num_features),
             *values_places = values_at.as<const int64_t>("values_at", num_features),
             *offsets_places = offsets_at.as<const int64_t>("offsets_at", num_features);
  int64_t* ends = ends_of_rows.as<int64_t>("ends", num_rows + 1);
  std::fill(ends, ends + num_rows + 1, 0);
  const int64_t room = static_cast<int64_t>(piece.nbytes());
  char* memory = piece.bytes("piece");
  const auto place = [&](int64_t at, int64_t count) {
    if (at < 0 || at % 4 != 0 || at > room || count > (room - at) / 4) refuse("the lists lie outside the piece");
    return memory + at;
  };
  int64_t found = -1;
  for (int64_t k = num_features - 1; k >= 0; --k) {
    block.with_lists(k, [&](const auto* values, const auto* offsets) {
      const int64_t first = offsets[0], last = offsets[num_rows];
      block.check(k, first, last);
      if (last - first > INT32_MAX) refuse("feature " + std::to_string(k) + " has too many ids");
      if (bounds[k] < 0 || bounds[k] > int64_t{1} << 31) refuse("bounds: is " + std::to_string(bounds[k]));
      auto* ids = reinterpret_cast<uint32_t*>(place(values_places[k], last - first));
      auto* starts = reinterpret_cast<int32_t*>(place(offsets_places[k], num_rows + 1));
      int64_t signs = 0;
      run_avx2([&]() RECMILL_BODY {
        signs = narrow_ids(values + first, last - first, bounds[k], ids);
        for (int64_t row = 0; row <= num_rows; ++row) {
          const uint64_t begin = static_cast<uint64_t>(offsets[row]) - static_cast<uint64_t>(first);
          starts[row] = static_cast<int32_t>(begin);
          ends[row] = static_cast<int64_t>(static_cast<uint64_t>(ends[row]) + begin);
        }
      });
      if (signs < 0) found = k;
    });
  }
  return found;
}

void check_ranges(const std::vector<const ListBlock*>& blocks, const int64_t* range, int64_t num_features) {
  for (size_t p = 0; p < blocks.size(); ++p) {
    const int64_t start = range[2 * p], stop = range[2 * p + 1];
    if (start < 0 || start > stop || stop > blocks[p]->num_rows || blocks[p]->num_features() != num_features)
      refuse("received rows " + std::to_string(start) + " to " + std::to_string(stop) + " of " +
             std::to_string(blocks[p]->num_rows) + " with " + std::to_string(blocks[p]->num_features()) +
             " features, expected " + std::to_string(num_features));
  }
}

// Rows [start, stop) of matrices, one per block, below one another.
void join_numbers(const std::vector<Input>& matrices, const int64_t* range, const Output& joined) {
  char* out = joined.bytes("joined");
  const int64_t row_bytes = joined.row_bytes();
  int64_t num_left = joined.dim(0);
  for (size_t p = 0; p < matrices.size(); ++p) {
    const int64_t start = range[2 * p], count = range[2 * p + 1] - start;
    if (matrices[p].row_bytes() != row_bytes || matrices[p].dim(0) < start + count || count > num_left)
      refuse("numbers: block " + std::to_string(p) + " has " + std::to_string(matrices[p].dim(0)) + " rows of " +
             std::to_string(matrices[p].row_bytes()) + " bytes, expected " + std::to_string(row_bytes));
    if (count) std::memcpy(out, matrices[p].bytes("numbers") + start * row_bytes, count * row_bytes);
    out += count * row_bytes;
    num_left -= count;
  }
  if (num_left) refuse("numbers: there are " + std::to_string(num_left) + " rows too few");
}

// Copies rows [start, stop) of each block; `ranges` holds start and stop per block, `numbers` matrices with one row per
// row of a block.
void join_lists(const std::vector<const ListBlock*>& blocks, const Input& ranges, const Output& out,
                const Output& lengths_out, const Output& counts, const std::vector<std::vector<Input>>& numbers,
                const std::vector<Output>& joined) {
  const int64_t num_features = counts.num_items(), num_values = out.num_items();
  const auto num_blocks = static_cast<int64_t>(blocks.size()), num_pieces = num_features * num_blocks;
  const int64_t* range = ranges.as<const int64_t>("ranges", 2 * num_blocks);
  check_ranges(blocks, range, num_features);
  int64_t num_rows = 0, used = 0;
  for (int64_t p = 0; p < num_blocks; ++p) num_rows += range[2 * p + 1] - range[2 * p];
  int64_t* values = out.as<int64_t>("values");
  int32_t* lengths = lengths_out.as<int32_t>("lengths", num_features * num_rows);
  int64_t* counted = counts.as<int64_t>("counts");
  std::fill(counted, counted + num_features, 0);
  // Calls visit(feature, block, ids, offsets of the rows from `start` on, number of rows).
  const auto with_piece = [&](int64_t piece, auto visit) {
    if (piece >= num_pieces) return;
    const int64_t k = piece / num_blocks, p = piece % num_blocks, start = range[2 * p], count = range[2 * p + 1] - start;
    blocks[p]->with_lists(k, [&](const auto* ids, const auto* offsets) { visit(k, p, ids, offsets + start, count); });
  };
  const auto offsets_of = [&](int64_t piece) {
    Ahead found;
    with_piece(piece, [&](int64_t, int64_t, const auto*, const auto* offsets, int64_t count) {
      found = Ahead(offsets, (count + 1) * static_cast<int64_t>(sizeof *offsets));
    });
    return found;
  };
  const auto ids_of = [&](int64_t piece) {
    Ahead found;
    with_piece(piece, [&](int64_t k, int64_t p, const auto* ids, const auto* offsets, int64_t count) {
      const int64_t first = offsets[0], last = offsets[count];
      blocks[p]->check(k, first, last);
      found = Ahead(ids + first, (last - first) * static_cast<int64_t>(sizeof *ids));
    });
    return found;
  };
  for (int64_t piece : {0, 1}) offsets_of(piece).fetch_rest();
  ids_of(0).fetch_rest();
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    with_piece(piece, [&](int64_t k, int64_t, const auto* ids, const auto* offsets, int64_t count) {
      const int64_t first = offsets[0], size = offsets[count] - first;  // checked when they were fetched
      if (size > num_values - used) refuse("the rows have more ids than " + std::to_string(num_values));
      const Ahead next_ids = ids_of(piece + 1), next_offsets = offsets_of(piece + 2);
      int32_t signs = 0;
      run_avx2([&]() RECMILL_BODY {
        copy_ids(ids + first, size, values + used, next_ids);
        signs = copy_lengths(offsets, count, lengths, next_offsets);
      });
      if (signs < 0) refuse("feature " + std::to_string(k) + ": its offsets do not ascend");
      lengths += count;
      used += size;
      counted[k] += size;
    });
  }
  if (used != num_values)
    refuse("the rows have " + std::to_string(used) + " ids, expected " + std::to_string(num_values));
  if (numbers.size() != joined.size()) refuse("expected as many results as numbers");
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i].size() != blocks.size()) refuse("numbers: expected a matrix per block");
    join_numbers(numbers[i], range, joined[i]);
  }
}

}  // namespace

void bind_join_lists(nb::module_& m) {
  nb::class_<ListBlock>(m, "ListBlock")
      .def(nb::init<std::vector<Input>, std::vector<Input>, int64_t>())
      .def(nb::init<Input, const Input&, const Input&, const Input&, int64_t>());
  add_function(m, "scan_lists", &scan_lists);
  add_function(m, "pack_lists", &pack_lists);
  add_function(m, "join_lists", &join_lists);
}

}  // namespace recmill

// Rows of several blocks of lists, one after another, feature by feature. One call a batch, no GIL, one thread.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace nb = nanobind;

namespace recmill {
namespace {

// As kernels/join_lists/__init__.py lays it out, int64 each: one feature of a block.
struct Lists {
  Address values;
  int64_t num_values;
  Address offsets;
  int64_t offset_bytes;  // 4 or 8

  template <typename Visit>
  void with_offsets(Visit visit) const {
    if (offset_bytes == 4) visit(pointer<const int32_t>(offsets));
    else visit(pointer<const int64_t>(offsets));
  }
};

struct Piece {
  Address features;  // of its block
  int64_t start, stop;
};

void check(const Lists& lists, int64_t feature, int64_t first, int64_t last) {
  if (first < 0 || first > last || last > lists.num_values)
    throw std::invalid_argument("feature " + std::to_string(feature) + ": ids " + std::to_string(first) + " to " +
                                std::to_string(last) + " of " + std::to_string(lists.num_values));
}

// `ends`: ids of all features in the rows before each. Returns the first feature with an id outside of [0, bound), or
// -1; without bounds nothing is looked at.
int64_t scan_lists(Address features_address, int64_t num_features, int64_t num_rows, Address bounds_address,
                   Address ends_address) {
  const Lists* features = pointer<const Lists>(features_address);
  const int64_t* bounds = pointer<const int64_t>(bounds_address);
  int64_t* ends = pointer<int64_t>(ends_address);
  std::fill(ends, ends + num_rows + 1, 0);
  int64_t found = -1;
  for (int64_t k = num_features - 1; k >= 0; --k) {
    features[k].with_offsets([&](const auto* offsets) {
      const int64_t first = offsets[0], last = offsets[num_rows];
      check(features[k], k, first, last);
      for (int64_t row = 0; row <= num_rows; ++row) ends[row] += offsets[row] - first;
      if (!bounds) return;
      const int64_t* values = pointer<const int64_t>(features[k].values);
      const int64_t most = bounds[k] - 1;
      int64_t signs = 0;  // negative once a number or what it lacks to the most is; wraps only for negative ones
      for (int64_t i = first; i < last; ++i)
        signs |= values[i] | static_cast<int64_t>(static_cast<uint64_t>(most) - static_cast<uint64_t>(values[i]));
      if (signs < 0) found = k;
    });
  }
  return found;
}

// `values` has room for num_values ids, `lengths` for all rows of each feature, `counts` for an entry a feature.
void join_lists(Address pieces_address, int64_t num_pieces, int64_t num_features, Address values_address,
                int64_t num_values, Address lengths_address, Address counts_address) {
  const Piece* pieces = pointer<const Piece>(pieces_address);
  int64_t* values = pointer<int64_t>(values_address);
  int32_t* lengths = pointer<int32_t>(lengths_address);
  int64_t used = 0;
  for (int64_t k = 0; k < num_features; ++k) {
    const int64_t begin = used;
    for (int64_t p = 0; p < num_pieces; ++p) {
      const Lists& lists = pointer<const Lists>(pieces[p].features)[k];
      lists.with_offsets([&](const auto* offsets) {
        const int64_t start = pieces[p].start, count = pieces[p].stop - start;
        const int64_t first = offsets[start], size = offsets[start + count] - first;
        check(lists, k, first, first + size);
        if (size > num_values - used) throw std::invalid_argument("more ids than " + std::to_string(num_values));
        if (size) std::memcpy(values + used, pointer<const int64_t>(lists.values) + first, size * sizeof(int64_t));
        for (int64_t i = 0; i < count; ++i)
          lengths[i] = static_cast<int32_t>(offsets[start + i + 1] - offsets[start + i]);
        lengths += count;
        used += size;
      });
    }
    pointer<int64_t>(counts_address)[k] = used - begin;
  }
  if (used != num_values)
    throw std::invalid_argument(std::to_string(used) + " ids, expected " + std::to_string(num_values));
}

}  // namespace

void bind_join_lists(nb::module_& m) {
  m.def("scan_lists", &scan_lists, nb::call_guard<nb::gil_scoped_release>());
  m.def("join_lists", &join_lists, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

// The parts of a buffer that windows cover, each once, and where the windows begin once those lie side by side.
#include <nanobind/nanobind.h>

#include "windows.h"

namespace nb = nanobind;

namespace recmill {
namespace {

// Writes the parts' starts and lengths and the windows' new starts; gives (number of parts, their rows).
nb::tuple merge_windows(Address starts_address, Address lengths_address, int64_t num_windows, int64_t num_values,
                        Address part_starts_address, Address part_lengths_address, Address new_starts_address) {
  int64_t* part_starts = pointer<int64_t>(part_starts_address);
  int64_t* part_lengths = pointer<int64_t>(part_lengths_address);
  int64_t* new_starts = pointer<int64_t>(new_starts_address);
  int64_t num_parts = 0, total = 0;
  {
    nb::gil_scoped_release release;
    const Windows windows(starts_address, lengths_address, num_windows, num_values);
    std::vector<int64_t> order(num_windows);
    std::iota(order.begin(), order.end(), 0);
    const auto is_before = [&](int64_t a, int64_t b) { return windows.starts[a] < windows.starts[b]; };
    if (!std::is_sorted(order.begin(), order.end(), is_before)) std::stable_sort(order.begin(), order.end(), is_before);
    int64_t begin = 0, end = -1;  // of the part at hand, in the buffer
    for (const int64_t w : order) {
      const int64_t start = windows.starts[w], length = windows.lengths[w];
      if (length == 0) {
        new_starts[w] = 0;
        continue;
      }
      if (num_parts == 0 || start > end) {
        if (num_parts > 0) total += part_lengths[num_parts - 1] = end - begin;
        part_starts[num_parts++] = begin = start;
        end = start;
      }
      new_starts[w] = total + start - begin;
      end = std::max(end, start + length);
    }
    if (num_parts > 0) total += part_lengths[num_parts - 1] = end - begin;
  }
  return nb::make_tuple(num_parts, total);
}

}  // namespace

void bind_merge_windows(nb::module_& m) { m.def("merge_windows", &merge_windows); }

}  // namespace recmill

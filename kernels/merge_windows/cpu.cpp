// The parts of buffers that windows cover, each once, and where the windows begin once those lie side by side.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "jagged.h"
#include "windows.h"

namespace nb = nanobind;

namespace recmill {
namespace {

// Values, their item bytes and number; starts and lengths (of 8 or 4 bytes) of windows into them, and their number.
using Source = std::tuple<Address, int64_t, int64_t, Address, Address, int64_t, int64_t>;

// Parts of all sources, one source after another: (source, start, length) of each in `parts`.
class Merger {
 public:
  Merger(int64_t* parts, int64_t* new_starts) : parts_(parts), new_starts_(new_starts) {}

  void add(const Source& source, int64_t number) {
    const auto& [values, item_bytes, num_values, starts, lengths, length_bytes, count] = source;
    if (length_bytes == 4) {
      const int32_t* narrow = pointer<const int32_t>(lengths);
      wide_.assign(narrow, narrow + count);
    }
    const Windows windows(starts, length_bytes == 4 ? reinterpret_cast<Address>(wide_.data()) : lengths, count,
                          num_values);
    order_.resize(count);
    std::iota(order_.begin(), order_.end(), 0);
    const auto is_before = [&](int64_t a, int64_t b) { return windows.starts[a] < windows.starts[b]; };
    if (!std::is_sorted(order_.begin(), order_.end(), is_before))
      std::stable_sort(order_.begin(), order_.end(), is_before);
    int64_t end = 0;  // of the part at hand
    bool is_open = false;
    for (const int64_t w : order_) {
      const int64_t start = windows.starts[w], length = windows.lengths[w];
      new_starts_[w] = 0;
      if (length == 0) continue;
      if (!is_open || start > end) {
        parts_[3 * num_parts] = number;
        parts_[3 * num_parts + 1] = end = start;
        parts_[3 * num_parts + 2] = 0;
        ++num_parts;
        is_open = true;
      }
      int64_t* part = parts_ + 3 * (num_parts - 1);
      new_starts_[w] = total - part[2] + start - part[1];
      const int64_t grown = std::max(end, start + length) - end;
      part[2] += grown;
      total += grown;
      end += grown;
    }
    new_starts_ += count;
  }

  int64_t num_parts = 0, total = 0;

 private:
  int64_t* parts_;
  int64_t* new_starts_;
  std::vector<int64_t> order_, wide_;
};

// Gives (number of parts, rows of all parts); `parts` has room for three numbers a window.
std::tuple<int64_t, int64_t> merge_windows(const std::vector<Source>& sources, Address parts, Address new_starts) {
  Merger merger(pointer<int64_t>(parts), pointer<int64_t>(new_starts));
  for (size_t number = 0; number < sources.size(); ++number)
    merger.add(sources[number], static_cast<int64_t>(number));
  return {merger.num_parts, merger.total};
}

void copy_parts(const std::vector<Source>& sources, Address parts_address, int64_t num_parts, Address out_address) {
  const int64_t* parts = pointer<const int64_t>(parts_address);
  char* out = pointer<char>(out_address);
  for (int64_t part = 0; part < num_parts; ++part) {
    const auto& source = sources[parts[3 * part]];
    const int64_t item_bytes = std::get<1>(source), num_bytes = parts[3 * part + 2] * item_bytes;
    copy_bytes(out, pointer<const char>(std::get<0>(source)) + parts[3 * part + 1] * item_bytes, num_bytes);
    out += num_bytes;
  }
}

}  // namespace

void bind_merge_windows(nb::module_& m) {
  m.def("merge_windows", &merge_windows, nb::call_guard<nb::gil_scoped_release>());
  m.def("copy_parts", &copy_parts, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

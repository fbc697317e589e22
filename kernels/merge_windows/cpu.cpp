// The parts of arrays that windows cover, each once, and where the windows begin when those parts follow one another.
#include <nanobind/stl/tuple.h>

#include <cstring>

#include "windows.h"

namespace recmill {
namespace {

struct Part {
  int64_t source, start, length;
};

// Collects the parts of all sources, one source after another.
class Merger {
 public:
  Merger(Part* parts, int64_t* new_starts) : parts_(parts), new_starts_(new_starts) {}

  void add(const Windows& windows, int64_t source) {
    const Clusters sorted(windows);
    Part* part = nullptr;  // the current one
    for (const int64_t w : sorted.order) {
      const int64_t start = windows.starts[w], length = windows.lengths[w];
      new_starts_[w] = 0;
      if (length == 0) continue;
      if (part == nullptr || start > part->start + part->length) {
        part = parts_ + num_parts++;
        *part = {source, start, 0};
      }
      new_starts_[w] = total - part->length + start - part->start;
      const int64_t end = part->start + part->length, grown = std::max(end, start + length) - end;
      part->length += grown;
      total += grown;
    }
    new_starts_ += windows.count;
  }

  int64_t num_parts = 0, total = 0;

 private:
  Part* parts_;
  int64_t* new_starts_;
};

// Returns (number of parts, values in all parts). `parts` has room for three numbers per window.
std::tuple<int64_t, int64_t> merge_windows(const std::vector<Input>& values, const std::vector<Input>& starts,
                                           const std::vector<Input>& lengths, const Output& parts,
                                           const Output& new_starts) {
  int64_t num_windows = 0;
  for (const Input& own : starts) num_windows += own.num_items();
  if (starts.size() != values.size() || lengths.size() != values.size())
    refuse("expected as many starts and lengths as values");
  Merger merger(reinterpret_cast<Part*>(parts.as<int64_t>("parts", 3 * num_windows)),
                new_starts.as<int64_t>("new_starts", num_windows));
  std::vector<int64_t> wide;
  for (size_t source = 0; source < values.size(); ++source) {
    const int64_t count = starts[source].num_items();
    const int32_t* narrow = lengths[source].as<const int32_t>("lengths", count);
    wide.assign(narrow, narrow + count);
    const int64_t* own = starts[source].as<const int64_t>("starts");
    merger.add(Windows(own, wide.data(), count, values[source].num_items()), static_cast<int64_t>(source));
  }
  return {merger.num_parts, merger.total};
}

// `parts` as merge_windows filled them, `out` of the size it returned.
void copy_parts(const std::vector<Input>& values, const Input& parts, int64_t num_parts, const Output& out) {
  if (num_parts < 0 || num_parts > parts.num_items() / 3) refuse("received more parts than there is room for");
  const Part* part = reinterpret_cast<const Part*>(parts.as<const int64_t>("parts"));
  int64_t* to = out.as<int64_t>("out");
  int64_t room = out.num_items();
  for (const Part* last = part + num_parts; part < last; ++part) {
    const Input& own = values.at(part->source);
    if (part->start < 0 || part->length < 0 || part->length > own.num_items() - part->start || part->length > room)
      refuse("received a part outside of the values or larger than the output");
    if (part->length == 0) continue;  // empty arrays may be null
    std::memcpy(to, own.as<const int64_t>("values") + part->start, part->length * sizeof(int64_t));
    to += part->length;
    room -= part->length;
  }
}

}  // namespace

void bind_merge_windows(nb::module_& m) {
  add_function(m, "merge_windows", &merge_windows);
  add_function(m, "copy_parts", &copy_parts);
}

}  // namespace recmill

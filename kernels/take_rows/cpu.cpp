// Copies of chosen lists, one after another.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "jagged.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;

// Lengths of the lists `rows` of every feature, feature by feature; returns how many values they hold.
int64_t take_lengths(const std::vector<ListsArgument>& arguments, int64_t num_rows, Address rows_address,
                     int64_t num_taken, Address lengths_address) {
  const std::vector<Lists> features = read_lists(arguments);
  const int64_t* rows = pointer<const int64_t>(rows_address);
  int64_t* lengths = pointer<int64_t>(lengths_address);
  check_offsets(features, num_rows);
  check_rows("rows", rows, num_taken, num_rows);
  int64_t total = 0;
  for (const Lists& lists : features)
    for (int64_t i = 0; i < num_taken; ++i) total += *lengths++ = lists.length(rows[i]);
  return total;
}

// Copies values[starts[i] : starts[i] + lengths[i]] for every i, in order. `from` may differ a window (by feature).
template <typename Source>
void copy_windows(Source source, const int64_t* lengths, int64_t num_windows, char* out, int64_t item_bytes,
                  int num_threads) {
  std::vector<int64_t> ends(num_windows + 1, 0);
  for (int64_t i = 0; i < num_windows; ++i) ends[i + 1] = ends[i] + lengths[i];
  const int threads = choose_threads(num_threads, ends[num_windows] * item_bytes, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < num_windows; ++i)
    copy_bytes(out + ends[i] * item_bytes, source(i), lengths[i] * item_bytes);
}

// `lengths` as take_lengths gave them, `out` of the size it returned.
void take_values(const std::vector<ListsArgument>& arguments, Address rows_address, int64_t num_taken,
                 Address lengths, Address out, int num_threads) {
  const std::vector<Lists> features = read_lists(arguments);
  const int64_t* rows = pointer<const int64_t>(rows_address);
  if (features.empty() || num_taken == 0) return;
  const auto source = [&](int64_t i) { return features[i / num_taken].begin(rows[i % num_taken]); };
  copy_windows(source, pointer<const int64_t>(lengths), static_cast<int64_t>(features.size()) * num_taken,
               pointer<char>(out), features[0].item_bytes, num_threads);
}

void take_windows(Address values_address, int64_t item_bytes, int64_t num_values, Address starts_address,
                  Address lengths_address, int64_t num_windows, Address out, int64_t num_out, int num_threads) {
  const char* values = pointer<const char>(values_address);
  const int64_t* starts = pointer<const int64_t>(starts_address);
  const int64_t* lengths = pointer<const int64_t>(lengths_address);
  int64_t total = 0;
  for (int64_t i = 0; i < num_windows; ++i) {
    if (starts[i] < 0 || lengths[i] < 0 || starts[i] > num_values || lengths[i] > num_values - starts[i])
      throw std::invalid_argument("window " + std::to_string(i) + " starts at " + std::to_string(starts[i]) +
                                  " and has " + std::to_string(lengths[i]) + " values, expected it inside [0, " +
                                  std::to_string(num_values) + ")");
    total += lengths[i];
  }
  if (total != num_out)
    throw std::invalid_argument("the windows hold " + std::to_string(total) + " values, received " +
                                std::to_string(num_out) + " as their number");
  const auto source = [&](int64_t i) { return values + starts[i] * item_bytes; };
  copy_windows(source, lengths, num_windows, pointer<char>(out), item_bytes, num_threads);
}

}  // namespace

void bind_take_rows(nb::module_& m) {
  m.def("take_lengths", &take_lengths, nb::call_guard<nb::gil_scoped_release>());
  m.def("take_values", &take_values, nb::call_guard<nb::gil_scoped_release>());
  m.def("take_windows", &take_windows, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

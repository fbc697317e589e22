// Copies of chosen lists, one after another.
#include "jagged.h"

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;

// Fills the lengths of the lists `rows` of every feature, feature by feature; returns how many values they hold.
int64_t take_lengths(const std::vector<Input>& values, const std::vector<Input>& offsets, int64_t num_rows,
                     const Input& taken_rows, const Output& lengths_out) {
  const std::vector<Lists> features = read_lists(values, offsets, num_rows);
  const int64_t num_taken = taken_rows.num_items();
  const int64_t* rows = taken_rows.as<const int64_t>("rows_U");
  int64_t* lengths = lengths_out.as<int64_t>("lengths", static_cast<int64_t>(features.size()) * num_taken);
  check_rows("rows", rows, num_taken, num_rows);
  int64_t total = 0;
  for (const Lists& lists : features)
    for (int64_t i = 0; i < num_taken; ++i) total += *lengths++ = lists.length(rows[i]);
  return total;
}

// Copies lengths[i] items from source(i), for every i in order.
template <typename Source>
void copy_windows(Source source, const int64_t* lengths, int64_t num_windows, char* out, int64_t item_bytes,
                  int num_threads) {
  std::vector<int64_t> ends(num_windows + 1, 0);
  for (int64_t i = 0; i < num_windows; ++i) ends[i + 1] = ends[i] + lengths[i];
  const int threads = choose_threads(ends[num_windows] * item_bytes, kBytesPerThread, num_threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < num_windows; ++i)
    copy_bytes(out + ends[i] * item_bytes, source(i), lengths[i] * item_bytes);
}

// Copies the lists `rows` of every feature. `lengths` are those that take_lengths filled after it checked all offsets,
// and `out` has the size that it returned.
void take_values(const std::vector<Input>& values, const std::vector<Input>& offsets, int64_t num_rows,
                 const Input& taken_rows, const Input& lengths_of_lists, const Output& out, int num_threads) {
  const std::vector<Lists> features = read_lists(values, offsets, num_rows, false);
  const int64_t num_taken = taken_rows.num_items();
  const int64_t* rows = taken_rows.as<const int64_t>("rows_U");
  check_rows("rows", rows, num_taken, num_rows);
  if (features.empty() || num_taken == 0) return;
  const int64_t num_lists = static_cast<int64_t>(features.size()) * num_taken;
  const int64_t* lengths = lengths_of_lists.as<const int64_t>("lengths", num_lists);
  int64_t total = 0;
  for (int64_t i = 0; i < num_lists; ++i) {
    if (lengths[i] != features[i / num_taken].length(rows[i % num_taken])) refuse("lengths: are not those of the lists");
    total += lengths[i];
  }
  if (out.dim(0) != total || out.row_bytes() != features[0].item_bytes) refuse("out: has another size than the lists");
  const auto source = [&](int64_t i) { return features[i / num_taken].begin(rows[i % num_taken]); };
  copy_windows(source, lengths, num_lists, out.bytes("out"), features[0].item_bytes, num_threads);
}

void take_windows(const Input& values, const Input& starts_of_windows, const Input& lengths_of_windows,
                  const Output& out, int num_threads) {
  const int64_t num_windows = starts_of_windows.num_items(), num_values = values.dim(0), num_out = out.dim(0);
  const int64_t* starts = starts_of_windows.as<const int64_t>("starts");
  const int64_t* lengths = lengths_of_windows.as<const int64_t>("lengths", num_windows);
  int64_t total = 0;
  for (int64_t i = 0; i < num_windows; ++i) {
    if (starts[i] < 0 || lengths[i] < 0 || starts[i] > num_values || lengths[i] > num_values - starts[i])
      refuse("window " + std::to_string(i) + " starts at " + std::to_string(starts[i]) + " and has " +
             std::to_string(lengths[i]) + " values, expected it inside [0, " + std::to_string(num_values) + ")");
    total += lengths[i];
  }
  if (total != num_out)
    refuse("the windows hold " + std::to_string(total) + " values, received " + std::to_string(num_out) +
           " as their number");
  const int64_t item_bytes = values.row_bytes();
  const char* from = values.bytes("values");
  if (total > 0 && out.row_bytes() != item_bytes) refuse("out: has another dtype or width than the values");
  const auto source = [&](int64_t i) { return from + starts[i] * item_bytes; };
  copy_windows(source, lengths, num_windows, out.bytes("out"), item_bytes, num_threads);
}

}  // namespace

void bind_take_rows(nb::module_& m) {
  add_function(m, "take_lengths", &take_lengths);
  add_function(m, "take_values", &take_values);
  add_function(m, "take_windows", &take_windows);
}

}  // namespace recmill

// Columns of float32 side by side, and whether they are finite: one pass without the GIL on one thread.
#include <algorithm>

#include "arrays.h"

namespace recmill {
namespace {

constexpr int64_t kRows = 256;             // processed together: their output stays in the L1 cache
constexpr int32_t kExponent = 0x7f800000;  // all bits set: infinite or not a number

// Returns the first column with a number that is not finite, or -1.
int64_t stack_columns(const std::vector<Input>& arrays, int64_t num_rows, const Output& stacked) {
  const int64_t num_columns = static_cast<int64_t>(arrays.size());
  auto* out = reinterpret_cast<int32_t*>(stacked.as<float>("stacked", num_rows * num_columns));
  std::vector<const int32_t*> columns;
  for (const Input& own : arrays)
    columns.push_back(reinterpret_cast<const int32_t*>(own.as<const float>("columns", num_rows)));
  int64_t found = num_columns;
  for (int64_t begin = 0; begin < num_rows; begin += kRows) {
    const int64_t end = std::min(num_rows, begin + kRows);
    for (int64_t column = 0; column < num_columns; ++column) {
      const int32_t* numbers = columns[column];
      int32_t most = 0;
      for (int64_t row = begin; row < end; ++row) most = std::max(most, numbers[row] & kExponent);
      if (most == kExponent) found = std::min(found, column);
      for (int64_t row = begin; row < end; ++row) out[row * num_columns + column] = numbers[row];
    }
  }
  return found == num_columns ? -1 : found;
}

}  // namespace

void bind_stack_columns(nb::module_& m) { add_function(m, "stack_columns", &stack_columns); }

}  // namespace recmill

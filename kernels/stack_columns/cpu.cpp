// Columns of float32 side by side, and whether they are finite: one pass, no GIL, one thread.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kRows = 256;              // of a turn: what they fill stays in the first cache
constexpr int32_t kExponent = 0x7f800000;  // all of it set: infinite or not a number

// Returns the first column with a number that is not finite, or -1.
int64_t stack_columns(Address columns_address, int64_t num_columns, int64_t num_rows, Address out_address) {
  const Address* columns = pointer<const Address>(columns_address);
  int32_t* out = pointer<int32_t>(out_address);
  int64_t found = num_columns;
  for (int64_t begin = 0; begin < num_rows; begin += kRows) {
    const int64_t end = std::min(num_rows, begin + kRows);
    for (int64_t column = 0; column < num_columns; ++column) {
      const int32_t* numbers = pointer<const int32_t>(columns[column]);
      int32_t most = 0;
      for (int64_t row = begin; row < end; ++row) most = std::max(most, numbers[row] & kExponent);
      if (most == kExponent) found = std::min(found, column);
      for (int64_t row = begin; row < end; ++row) out[row * num_columns + column] = numbers[row];
    }
  }
  return found == num_columns ? -1 : found;
}

}  // namespace

void bind_stack_columns(nb::module_& m) {
  m.def("stack_columns", &stack_columns, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

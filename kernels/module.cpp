// The compiled half of the package `kernels`: every op's cpu.cpp adds its functions here.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace recmill {
void bind_count_rows(nb::module_& m);
}  // namespace recmill

NB_MODULE(_cpu, m) {
  m.doc() = "Compiled CPU kernels over raw buffers; see the Python functions in kernels/.";
  recmill::bind_count_rows(m);
}

// The compiled half of the package `kernels`: every op's cpu.cpp adds its functions here.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace recmill {
void bind_count_rows(nb::module_& m);
void bind_decode_pages(nb::module_& m);
void bind_decode_streams(nb::module_& m);
void bind_dedup_rows(nb::module_& m);
void bind_dot_interaction(nb::module_& m);
void bind_expand_rows(nb::module_& m);
void bind_join_lists(nb::module_& m);
void bind_merge_windows(nb::module_& m);
void bind_move_rows(nb::module_& m);
void bind_pool_windows(nb::module_& m);
void bind_shared_lookup(nb::module_& m);
void bind_split_tiers(nb::module_& m);
void bind_stack_columns(nb::module_& m);
void bind_take_rows(nb::module_& m);
void bind_update_rows(nb::module_& m);
void bind_window_attention(nb::module_& m);
void bind_window_rows(nb::module_& m);
}  // namespace recmill

NB_MODULE(_cpu, m) {
  m.doc() = "Compiled CPU kernels over raw buffers; see the Python functions in kernels/.";
  recmill::bind_count_rows(m);
  recmill::bind_decode_pages(m);
  recmill::bind_decode_streams(m);
  recmill::bind_dedup_rows(m);
  recmill::bind_dot_interaction(m);
  recmill::bind_expand_rows(m);
  recmill::bind_join_lists(m);
  recmill::bind_merge_windows(m);
  recmill::bind_move_rows(m);
  recmill::bind_pool_windows(m);
  recmill::bind_shared_lookup(m);
  recmill::bind_split_tiers(m);
  recmill::bind_stack_columns(m);
  recmill::bind_take_rows(m);
  recmill::bind_update_rows(m);
  recmill::bind_window_attention(m);
  recmill::bind_window_rows(m);
}

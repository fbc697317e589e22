// The compiled half of the package `kernels`: every op's cpu.cpp adds its functions here.
#include <nanobind/nanobind.h>

#include "dense_layers/products.h"
#include "parallel.h"

#define RECMILL_OPS(VISIT)                                                                                       \
  VISIT(check_pages) VISIT(count_rows) VISIT(decode_pages) VISIT(decode_streams) VISIT(dedup_rows)               \
  VISIT(dense_layers) VISIT(dot_interaction) VISIT(encode_windows) VISIT(expand_rows) VISIT(join_lists)          \
  VISIT(merge_windows) VISIT(move_rows) VISIT(pointwise_attention) VISIT(pool_tables) VISIT(pool_windows)        \
  VISIT(recycled) VISIT(shared_lookup) VISIT(split_tiers) VISIT(take_rows) VISIT(target_attention)               \
  VISIT(update_rows) VISIT(window_attention) VISIT(window_rows)

namespace recmill {
#define DECLARE(op) void bind_##op(nanobind::module_& m);
RECMILL_OPS(DECLARE)
}  // namespace recmill

NB_MODULE(_cpu, m) {
  m.doc() = "Compiled CPU kernels over numpy arrays and torch tensors; see the Python functions in kernels/.";
#define BIND(op) recmill::bind_##op(m);
  RECMILL_OPS(BIND)
  m.def("has_fma", &recmill::has_fma);
  m.def("force", [](int threads, bool is_portable, uint64_t hash_mask, bool is_narrow) {
    recmill::forced = {threads, is_portable, hash_mask};
    recmill::forced_narrow = is_narrow;
  });
}

// counts[id] += 1 for every id, on several threads and without atomics.
#include "jagged.h"

namespace recmill {
namespace {

// A private histogram of 32k rows takes 256 KiB: it stays in a core's L2 cache, and adding it to the others costs little.
constexpr int64_t kPrivateRows = 32 * 1024;
constexpr int64_t kIdsPerThread = 64 * 1024;

template <typename Id>
void count_privately(int64_t* counts, int64_t num_rows, const Id* ids, int64_t num_ids, int threads) {
  std::vector<std::vector<int64_t>> privates(threads);
#pragma omp parallel num_threads(threads)
  {
    std::vector<int64_t>& mine = privates[omp_get_thread_num()];
    mine.assign(num_rows, 0);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_ids; ++i) ++mine[ids[i]];
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row)
      for (const auto& other : privates)
        if (!other.empty()) counts[row] += other[row];
  }
}

// Each thread owns a range of rows and reads all ids: the increments miss the cache, the reads do not.
template <typename Id>
void count_partitioned(int64_t* counts, int64_t num_rows, const Id* ids, int64_t num_ids, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) {
    const int64_t begin = num_rows / threads * part + std::min<int64_t>(part, num_rows % threads);
    const uint64_t size = num_rows / threads + (part < num_rows % threads);
    for (int64_t i = 0; i < num_ids; ++i) {
      const int64_t row = static_cast<int64_t>(ids[i]) - begin;
      if (static_cast<uint64_t>(row) < size) ++counts[begin + row];
    }
  }
}

template <typename Id>
void count(int64_t* counts, int64_t num_rows, const Id* ids, int64_t num_ids) {
  const int threads = choose_threads(num_ids, kIdsPerThread);
  check_rows("ids", ids, num_ids, num_rows, threads);  // before anything is written: a bad id leaves the counts unchanged
  if (threads == 1) {
    for (int64_t i = 0; i < num_ids; ++i) ++counts[ids[i]];
  } else if (num_rows <= kPrivateRows) {
    count_privately(counts, num_rows, ids, num_ids, threads);
  } else {
    count_partitioned(counts, num_rows, ids, num_ids, threads);
  }
}

void count_rows(const Output& counts, const Input& ids) {
  ids.with_dtype<int64_t, int32_t>("ids", [&](auto id) {
    count(counts.as<int64_t>("counts_R"), counts.num_items(), ids.as<const decltype(id)>("ids"), ids.num_items());
  });
}

}  // namespace

void bind_count_rows(nb::module_& m) { add_function(m, "count_rows", &count_rows); }

}  // namespace recmill

// Rows copied between matrices, or compared bit by bit. Rows are scattered in memory, so the next ones are prefetched.
#include <cstring>
#include <utility>
#include <vector>

#include "jagged.h"

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;
constexpr int64_t kAhead = 12;  // rows between prefetching and use
constexpr int64_t kLine = 16;   // floats per cache line

struct Matrix {
  uint32_t* start;
  int64_t num_rows, width, step;
  const int64_t* rows;  // which of its rows; null: the first ones

  uint32_t* row(int64_t n) const { return start + (rows ? rows[n] : n) * step; }
};

// The first `count` of the given rows, checked.
Matrix read_matrix(const char* name, const Output& matrix, const OptionalInput& rows, int64_t count) {
  const int64_t num_rows = matrix.dim(0);
  if (count < 0) refuse(std::string(name) + ": received " + std::to_string(count) + " rows");
  const int64_t* chosen = as_or_null<int64_t>(rows, name, count);
  if (chosen) check_rows(name, chosen, count, num_rows);
  else if (count > num_rows)
    refuse(std::string(name) + ": the matrix has " + std::to_string(num_rows) + " rows, expected " +
           std::to_string(count) + " or more");
  return {matrix.rows_as<uint32_t>(name), num_rows, matrix.dim(1), matrix.stride(0), chosen};
}

template <bool kWrites>
void fetch_ahead(const Matrix& matrix, int64_t n, int64_t end) {
  if (!matrix.rows || n + kAhead >= end) return;
  const uint32_t* later = matrix.row(n + kAhead);
  for (int64_t i = 0; i < matrix.width; i += kLine) __builtin_prefetch(later + i, kWrites ? 1 : 0);
}

void move_part(const Matrix& source, const Matrix& target, int64_t begin, int64_t end) {
  if (source.width == 1) {
    for (int64_t n = begin; n < end; ++n) {
      fetch_ahead<false>(source, n, end);
      fetch_ahead<true>(target, n, end);
      *target.row(n) = *source.row(n);
    }
    return;
  }
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(source.width);
  for (int64_t n = begin; n < end; ++n) {
    fetch_ahead<false>(source, n, end);
    fetch_ahead<true>(target, n, end);
    std::memcpy(target.row(n), source.row(n), bytes);
  }
}

void move_rows(const Output& from, const Output& to, const OptionalInput& source_rows, const OptionalInput& target_rows,
               int64_t count) {
  const Matrix source = read_matrix("source_rows", from, source_rows, count);
  const Matrix target = read_matrix("target_rows", to, target_rows, count);
  if (source.width != target.width) refuse("expected matrices of one width");
  const int threads = choose_threads(count * source.width * 4, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread)
    move_part(source, target, count * thread / threads, count * (thread + 1) / threads);
}

using Pairs = std::vector<std::pair<Matrix, Matrix>>;

int64_t compare_part(const Pairs& pairs, int64_t begin, int64_t end, int64_t* found) {
  int64_t count = 0;
  for (int64_t n = begin; n < end; ++n) {
    bool differs = false;
    for (const auto& [held, live] : pairs) {
      fetch_ahead<false>(held, n, end);
      fetch_ahead<false>(live, n, end);
      differs = differs || std::memcmp(held.row(n), live.row(n), sizeof(uint32_t) * static_cast<size_t>(held.width)) != 0;
    }
    found[count] = n;
    count += differs;
  }
  return count;
}

// Writes the n at which rows differ to `found`, ascending; returns their number.
int64_t find_changed(const std::vector<Output>& held, const std::vector<Output>& live, const OptionalInput& held_rows,
                     const OptionalInput& live_rows, const Output& out) {
  const int64_t num_compared = out.num_items();
  int64_t* found = out.as<int64_t>("found");
  if (held.size() != live.size()) refuse("expected as many held as live matrices");
  Pairs pairs;
  int64_t width = 0;
  for (size_t i = 0; i < held.size(); ++i) {
    pairs.emplace_back(read_matrix("held_rows", held[i], held_rows, num_compared),
                       read_matrix("live_rows", live[i], live_rows, num_compared));
    if (pairs.back().first.width != pairs.back().second.width) refuse("expected matrices of one width");
    width += pairs.back().first.width;
  }
  const int threads = choose_threads(num_compared * width * 4, kBytesPerThread);
  std::vector<int64_t> counts(threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t begin = num_compared * thread / threads;
    counts[thread] = compare_part(pairs, begin, num_compared * (thread + 1) / threads, found + begin);
  }
  int64_t count = 0;
  for (int thread = 0; thread < threads; ++thread) {
    if (counts[thread] > 0)  // `found` of an empty tensor is null
      std::memmove(found + count, found + num_compared * thread / threads, sizeof(int64_t) * counts[thread]);
    count += counts[thread];
  }
  return count;
}

}  // namespace

void bind_move_rows(nb::module_& m) {
  add_function(m, "move_rows", &move_rows);
  add_function(m, "find_changed", &find_changed);
}

}  // namespace recmill

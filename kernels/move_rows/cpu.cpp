// Rows between matrices: copied, or compared bit by bit. Rows are scattered, so those to come are fetched ahead.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;
constexpr int64_t kAhead = 12;  // rows that are fetched before their turn
constexpr int64_t kLine = 16;   // floats of a cache line

using MatrixArgument = std::tuple<Address, int64_t, int64_t, int64_t>;  // start, rows, width, floats from row to row

struct Matrix {
  uint32_t* start;
  int64_t num_rows, width, step;
  const int64_t* rows;  // which of them; null: the first ones

  uint32_t* row(int64_t n) const { return start + (rows ? rows[n] : n) * step; }
};

Matrix read_matrix(const MatrixArgument& argument, Address rows) {
  const auto& [start, num_rows, width, step] = argument;
  return {pointer<uint32_t>(start), num_rows, width, step, pointer<const int64_t>(rows)};
}

void check_matrix(const char* name, const Matrix& matrix, int64_t count) {
  if (!matrix.rows && count > matrix.num_rows)
    throw std::invalid_argument(std::string(name) + ": has " + std::to_string(matrix.num_rows) + " rows, expected " +
                                std::to_string(count) + " or more");
  for (int64_t n = 0; matrix.rows && n < count; ++n)
    if (matrix.rows[n] < 0 || matrix.rows[n] >= matrix.num_rows)
      throw std::invalid_argument(std::string(name) + "[" + std::to_string(n) + "] is " + std::to_string(matrix.rows[n]) +
                                  ", expected a row in [0, " + std::to_string(matrix.num_rows) + ")");
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

void move_rows(const MatrixArgument& from, const MatrixArgument& to, Address source_rows, Address target_rows,
               int64_t count, int num_threads) {
  const Matrix source = read_matrix(from, source_rows), target = read_matrix(to, target_rows);
  check_matrix("source_rows", source, count);
  check_matrix("target_rows", target, count);
  const int threads = choose_threads(num_threads, count * source.width * 4, kBytesPerThread);
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

// Writes the n whose rows differ to `found`, ascending, and returns how many there are.
int64_t find_changed(const std::vector<std::tuple<MatrixArgument, MatrixArgument>>& arguments, Address held_rows,
                     Address live_rows, int64_t num_compared, Address found_address, int num_threads) {
  Pairs pairs;
  int64_t width = 0;
  for (const auto& [held, live] : arguments) {
    pairs.emplace_back(read_matrix(held, held_rows), read_matrix(live, live_rows));
    check_matrix("held_rows", pairs.back().first, num_compared);
    check_matrix("live_rows", pairs.back().second, num_compared);
    width += pairs.back().first.width;
  }
  int64_t* found = pointer<int64_t>(found_address);
  const int threads = choose_threads(num_threads, num_compared * width * 4, kBytesPerThread);
  std::vector<int64_t> counts(threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t begin = num_compared * thread / threads;
    counts[thread] = compare_part(pairs, begin, num_compared * (thread + 1) / threads, found + begin);
  }
  int64_t count = 0;
  for (int thread = 0; thread < threads; ++thread) {
    std::memmove(found + count, found + num_compared * thread / threads, sizeof(int64_t) * static_cast<size_t>(counts[thread]));
    count += counts[thread];
  }
  return count;
}

}  // namespace

void bind_move_rows(nb::module_& m) {
  m.def("move_rows", &move_rows, nb::call_guard<nb::gil_scoped_release>());
  m.def("find_changed", &find_changed, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

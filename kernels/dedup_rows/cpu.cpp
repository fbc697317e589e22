// Which rows of a group of jagged features are the same, exactly.
//
//   1. Every row is compared with the one before it; in clustered data most rows end here. The others are hashed.
//   2. Hash tables, one a thread, each for its share of the hash values, find the first row with the same content.
//      Equal rows have equal hashes, so they meet in one table, and the result does not depend on the threads.
//   3. One pass numbers the distinct rows in order of first occurrence.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "dedup_rows/hash.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;

bool equal_rows(const std::vector<Lists>& features, int64_t a, int64_t b) {
  for (const Lists& lists : features)
    if (lists.length(a) != lists.length(b)) return false;
  for (const Lists& lists : features)
    if (!equal_bytes(lists.begin(a), lists.begin(b), lists.num_bytes(a))) return false;
  return true;
}

struct Slot {
  uint64_t hash;
  int64_t row;  // -1: empty
};

struct Rows {
  std::unique_ptr<uint64_t[]> hash;  // not set where the row repeats the one before it
  std::unique_ptr<bool[]> repeats;   // the row equals the one before it
  std::unique_ptr<int64_t[]> first;  // the first row with the same content; not set where `repeats`
  int64_t num_rows;
};

void hash_rows(const std::vector<Lists>& features, Rows& rows, Hash hash, uint64_t hash_mask, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    rows.repeats[row] = row > 0 && equal_rows(features, row - 1, row);
    if (rows.repeats[row]) continue;
    uint64_t value = features.size();
    for (const Lists& lists : features) value = hash(lists.begin(row), lists.num_bytes(row), value);
    rows.hash[row] = value & hash_mask;
  }
}

bool in_part(uint64_t hash, int part, int num_parts) {
  return num_parts == 1 || static_cast<int>(((hash >> 32) * num_parts) >> 32) == part;
}

void find_first_rows(const std::vector<Lists>& features, Rows& rows, int part, int num_parts) {
  int64_t num_mine = 0;
  for (int64_t row = 0; row < rows.num_rows; ++row)
    num_mine += !rows.repeats[row] && in_part(rows.hash[row], part, num_parts);
  uint64_t capacity = 16;
  while (capacity < 2 * static_cast<uint64_t>(num_mine)) capacity *= 2;
  std::vector<Slot> slots(capacity, Slot{0, -1});
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    if (rows.repeats[row] || !in_part(rows.hash[row], part, num_parts)) continue;
    const uint64_t hash = rows.hash[row];
    uint64_t at = hash & (capacity - 1);
    while (slots[at].row >= 0 && !(slots[at].hash == hash && equal_rows(features, slots[at].row, row)))
      at = (at + 1) & (capacity - 1);
    if (slots[at].row < 0) slots[at] = {hash, row};
    rows.first[row] = slots[at].row;
  }
}

int64_t number_rows(const Rows& rows, int64_t* unique_rows, int64_t* inverse) {
  int64_t num_unique = 0;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    if (rows.repeats[row]) {
      inverse[row] = inverse[row - 1];
    } else if (rows.first[row] < row) {
      inverse[row] = inverse[rows.first[row]];
    } else {
      unique_rows[num_unique] = row;
      inverse[row] = num_unique++;
    }
  }
  return num_unique;
}

int64_t dedup_rows(const std::vector<ListsArgument>& arguments, int64_t num_rows, Address unique_rows, Address inverse,
                   int num_threads, bool allow_avx2, uint64_t hash_mask) {
  const std::vector<Lists> features = read_lists(arguments);
  check_offsets(features, num_rows);
  int64_t num_bytes = 0;
  for (const Lists& lists : features) num_bytes += (lists.offsets[num_rows] - lists.offsets[0]) * lists.item_bytes;
  const int threads = choose_threads(num_threads, num_bytes, kBytesPerThread);
  Rows rows{std::unique_ptr<uint64_t[]>(new uint64_t[num_rows]), std::unique_ptr<bool[]>(new bool[num_rows]),
            std::unique_ptr<int64_t[]>(new int64_t[num_rows]), num_rows};
  hash_rows(features, rows, choose_hash(allow_avx2), hash_mask, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) find_first_rows(features, rows, part, threads);
  return number_rows(rows, pointer<int64_t>(unique_rows), pointer<int64_t>(inverse));
}

}  // namespace

void bind_dedup_rows(nb::module_& m) {
  m.def("dedup_rows", &dedup_rows, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

// Jagged lists: row b of a feature is values[offsets[b] : offsets[b + 1]].
#pragma once

#include <cstring>
#include <vector>

#include "arrays.h"
#include "parallel.h"

namespace recmill {

struct Lists {
  const char* values;
  int64_t item_bytes;
  int64_t num_values;
  const int64_t* offsets;

  const char* begin(int64_t row) const { return values + offsets[row] * item_bytes; }
  int64_t length(int64_t row) const { return offsets[row + 1] - offsets[row]; }
  int64_t num_bytes(int64_t row) const { return length(row) * item_bytes; }
};

// Offsets come from files and other processes: whatever they contain, nothing outside of `values` is read.
inline void check_offsets(const Lists& lists, int64_t num_rows, int64_t feature = 0) {
  const int64_t* offsets = lists.offsets;
  bool good = offsets[0] >= 0 && offsets[num_rows] <= lists.num_values;
  for (int64_t row = 0; row < num_rows; ++row) good &= offsets[row] <= offsets[row + 1];
  if (good) return;
  int64_t row = 0;
  while (row < num_rows && offsets[row] >= 0 && offsets[row] <= offsets[row + 1] && offsets[row + 1] <= lists.num_values)
    ++row;
  refuse("offsets of feature " + std::to_string(feature) + ", row " + std::to_string(row) +
         ": expected ascending offsets in [0, " + std::to_string(lists.num_values) + "], received " +
         std::to_string(offsets[row]) + (row < num_rows ? " and " + std::to_string(offsets[row + 1]) : ""));
}

// The features, which all have `num_rows` rows.
inline std::vector<Lists> read_lists(const std::vector<Input>& values, const std::vector<Input>& offsets,
                                     int64_t num_rows, bool checks_offsets = true) {
  if (values.size() != offsets.size()) refuse("expected as many offsets as values");
  std::vector<Lists> features;
  for (size_t f = 0; f < values.size(); ++f) {
    const int64_t feature = static_cast<int64_t>(f);
    features.push_back({values[f].bytes("values", feature), values[f].row_bytes(), values[f].dim(0),
                        offsets[f].as<const int64_t>("offsets", num_rows + 1, feature)});
    if (checks_offsets) check_offsets(features.back(), num_rows, feature);
  }
  return features;
}

template <typename Id>
bool are_rows(const Id* rows, int64_t begin, int64_t end, int64_t limit) {
  const uint64_t bound = limit > 0 ? static_cast<uint64_t>(limit) : 0;  // a negative limit allows no row
  bool good = true;
  for (int64_t i = begin; i < end; ++i) good &= static_cast<uint64_t>(rows[i]) < bound;
  return good;
}

template <typename Id>
void check_rows(const char* name, const Id* rows, int64_t num_rows, int64_t limit, int threads = 1) {
  bool good = threads > 1 || are_rows(rows, 0, num_rows, limit);
  if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(static) reduction(& : good)
    for (int part = 0; part < threads; ++part)
      good &= are_rows(rows, num_rows * part / threads, num_rows * (part + 1) / threads, limit);
  }
  if (good) return;
  int64_t i = 0;
  while (are_rows(rows, i, i + 1, limit)) ++i;
  refuse(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(rows[i]) + ", expected a row in [0, " +
         std::to_string(limit) + ")");
}

// Lists of a few ids are the common case, for which a call of memcpy or memcmp costs more than the bytes.
inline void copy_bytes(char* to, const char* from, int64_t num_bytes) {
  if (num_bytes > 64) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  int64_t i = 0;
  for (; i + 8 <= num_bytes; i += 8) std::memcpy(to + i, from + i, 8);
  for (; i < num_bytes; ++i) to[i] = from[i];
}

inline uint64_t load_word(const char* from) {
  uint64_t word;
  std::memcpy(&word, from, 8);
  return word;
}

inline bool equal_bytes(const char* a, const char* b, int64_t num_bytes) {
  if (num_bytes > 64) return load_word(a) == load_word(b) && std::memcmp(a, b, num_bytes) == 0;
  int64_t i = 0;
  uint64_t difference = 0;
  for (; i + 8 <= num_bytes; i += 8) difference |= load_word(a + i) ^ load_word(b + i);
  for (; i < num_bytes; ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace recmill

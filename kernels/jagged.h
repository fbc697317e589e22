// Jagged lists as Python hands them over: row b of a feature is values[offsets[b] : offsets[b + 1]].
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

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

using ListsArgument = std::tuple<Address, int64_t, int64_t, Address>;  // values, item bytes, number of values, offsets

inline std::vector<Lists> read_lists(const std::vector<ListsArgument>& arguments) {
  std::vector<Lists> features;
  for (const auto& [values, item_bytes, num_values, offsets] : arguments)
    features.push_back({pointer<const char>(values), item_bytes, num_values, pointer<const int64_t>(offsets)});
  return features;
}

// Offsets come from files and other processes: nothing outside `values` is read whatever they say.
inline void check_offsets(const std::vector<Lists>& features, int64_t num_rows) {
  for (size_t f = 0; f < features.size(); ++f) {
    const int64_t* offsets = features[f].offsets;
    bool good = offsets[0] >= 0 && offsets[num_rows] <= features[f].num_values;
    for (int64_t row = 0; row < num_rows; ++row) good &= offsets[row] <= offsets[row + 1];
    if (good) continue;
    int64_t row = 0;
    while (row < num_rows && offsets[row] >= 0 && offsets[row] <= offsets[row + 1] &&
           offsets[row + 1] <= features[f].num_values)
      ++row;
    throw std::invalid_argument("offsets of feature " + std::to_string(f) + ", row " + std::to_string(row) +
                                ": expected ascending offsets in [0, " + std::to_string(features[f].num_values) +
                                "], received " + std::to_string(offsets[row]) +
                                (row < num_rows ? " and " + std::to_string(offsets[row + 1]) : ""));
  }
}

inline void check_rows(const char* name, const int64_t* rows, int64_t num_rows, int64_t limit) {
  bool good = true;
  for (int64_t i = 0; i < num_rows; ++i) good &= static_cast<uint64_t>(rows[i]) < static_cast<uint64_t>(limit);
  if (good) return;
  int64_t i = 0;
  while (static_cast<uint64_t>(rows[i]) < static_cast<uint64_t>(limit)) ++i;
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(rows[i]) +
                              ", expected a row in [0, " + std::to_string(limit) + ")");
}

// Lists of a few ids are the common case: a call to memcpy or memcmp costs more than the bytes.
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

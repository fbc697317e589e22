// Where a logical row is in the shared array: the same on every machine, never stored, always recomputed.
// A row is cut into blocks; each starts at its hash.
//
// Exact rows are stored after the shared part, in the order of their ids. They may own fewer weights than the width of a
// row, which then repeat.
#pragma once

#include "parallel.h"

namespace recmill {

constexpr uint64_t kIdFactor = 0x9E3779B97F4A7C15ULL;
constexpr uint64_t kBlockFactor = 0xD1B54A32D192ED03ULL;
constexpr uint64_t kMixFactors[2] = {0xBF58476D1CE4E5B9ULL, 0x94D049BB133111EBULL};

struct Layout {
  int64_t size;  // shared slots
  int64_t block;
};

struct Feature {
  uint64_t key;  // of its table, added to hashes
  int64_t dim, column;
  bool is_mean;
  const int64_t* exact;  // ascending ids
  int64_t num_exact, exact_base, exact_width;
};

struct Segment {
  int64_t start, length;
};

RECMILL_INLINE uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * kMixFactors[0];
  x = (x ^ (x >> 27)) * kMixFactors[1];
  return x ^ (x >> 31);
}

RECMILL_INLINE uint64_t scale_hash(uint64_t hash, uint64_t range) {
  return static_cast<uint64_t>((static_cast<__uint128_t>(hash) * range) >> 64);
}

// The rank of `id` among the exact rows, or -1. No branches on the ids, which are random.
RECMILL_INLINE int64_t find_exact(const Feature& feature, int64_t id) {
  const int64_t* base = feature.exact;
  for (int64_t left = feature.num_exact; left > 1;) {
    const int64_t half = left / 2;
    base = base[half] <= id ? base + half : base;
    left -= half;
  }
  return feature.num_exact && *base == id ? base - feature.exact : -1;
}

inline int64_t count_segments(const Layout& layout, const Feature& feature) {
  const int64_t dim = feature.dim;
  const int64_t exact = feature.num_exact ? (dim + feature.exact_width - 1) / feature.exact_width : 1;
  return std::max(exact, (dim + layout.block - 1) / layout.block);
}

// The parts of the array that make up a row; returns their number.
RECMILL_INLINE int64_t find_segments(const Layout& layout, const Feature& feature, int64_t id, Segment* out) {
  const int64_t exact = find_exact(feature, id), width = feature.exact_width;
  int64_t count = 0;
  if (exact >= 0) {
    for (int64_t at = 0; at < feature.dim; at += width)
      out[count++] = {feature.exact_base + exact * width, std::min(width, feature.dim - at)};
    return count;
  }
  const uint64_t range = static_cast<uint64_t>(layout.size - layout.block + 1);
  const uint64_t row = feature.key + static_cast<uint64_t>(id) * kIdFactor;
  for (int64_t at = 0; at < feature.dim; at += layout.block, ++count) {
    const uint64_t hash = mix_bits(row + static_cast<uint64_t>(count) * kBlockFactor);
    out[count] = {static_cast<int64_t>(scale_hash(hash, range)), std::min(layout.block, feature.dim - at)};
  }
  return count;
}

}  // namespace recmill

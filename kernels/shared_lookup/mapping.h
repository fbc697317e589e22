// Where a logical row is in the shared array: the same on every machine, never stored, always recomputed.
//
//   robe        a row is cut into blocks; each starts at its hash
//   randomfold  all tables form one line, cut into pieces as long as the array; each piece is rotated by its hash
//
// Exact rows are stored after the shared part, in the order of their ids. They may own fewer weights than the width of a
// row, which then repeat.
#pragma once

#include "parallel.h"

namespace recmill {

constexpr uint64_t kIdFactor = 0x9E3779B97F4A7C15ULL;
constexpr uint64_t kBlockFactor = 0xD1B54A32D192ED03ULL;
constexpr uint64_t kMixFactors[2] = {0xBF58476D1CE4E5B9ULL, 0x94D049BB133111EBULL};
constexpr int64_t kFlatIds = int64_t{1} << 40;  // randomfold lines up this many rows; other ids are hashed one by one

struct Layout {
  uint64_t size;  // shared slots
  uint64_t key;   // hash of the seed
  int64_t block;
  bool is_fold;
  bool is_signed;
};

struct Feature {
  uint64_t key, base;  // of its table: added to hashes, and the position of its first weight in the line of all tables
  int64_t dim, mode, column;
  const int64_t* exact;  // ascending ids
  int64_t num_exact, exact_base, exact_width;
};

struct Segment {
  int64_t start;
  int32_t length;
  int32_t is_negative;
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
  if (!layout.is_fold) return std::max(exact, (dim + layout.block - 1) / layout.block);
  return std::max(exact, 2 * (dim / static_cast<int64_t>(layout.size) + 2));
}

RECMILL_INLINE int64_t exact_segments(const Feature& feature, int64_t rank, Segment* out) {
  const int64_t width = feature.exact_width;
  int64_t count = 0;
  for (int64_t at = 0; at < feature.dim; at += width)
    out[count++] = {feature.exact_base + rank * width, static_cast<int32_t>(std::min(width, feature.dim - at)), 0};
  return count;
}

RECMILL_INLINE int64_t fold_segments(const Layout& layout, const Feature& feature, int64_t id,
                                                            Segment* out) {
  const bool is_flat = id >= 0 && id < kFlatIds;
  uint64_t piece = 0, place = 0;
  if (is_flat) {
    const uint64_t flat = feature.base + static_cast<uint64_t>(id) * static_cast<uint64_t>(feature.dim);
    piece = flat / layout.size;
    place = flat % layout.size;
  }
  const uint64_t turns = std::max<uint64_t>(1, layout.size / static_cast<uint64_t>(layout.block));
  int64_t count = 0;
  for (int64_t left = feature.dim; left > 0; ++piece, place = 0) {
    const uint64_t own = is_flat ? 0 : feature.key + static_cast<uint64_t>(id) * kIdFactor;
    const uint64_t hash = mix_bits(layout.key + own + piece * kBlockFactor);
    uint64_t start = place + scale_hash(hash, turns) * static_cast<uint64_t>(layout.block);
    if (start >= layout.size) start -= layout.size;
    const int32_t is_negative = layout.is_signed ? static_cast<int32_t>(hash & 1) : 0;
    for (uint64_t run = std::min<uint64_t>(left, layout.size - place); run > 0;) {
      const uint64_t length = std::min(run, layout.size - start);
      out[count++] = {static_cast<int64_t>(start), static_cast<int32_t>(length), is_negative};
      run -= length;
      left -= static_cast<int64_t>(length);
      start = 0;
    }
  }
  return count;
}

// The parts of the array that make up a row; returns their number.
RECMILL_INLINE int64_t find_segments(const Layout& layout, const Feature& feature, int64_t id,
                                                            Segment* out) {
  const int64_t exact = find_exact(feature, id);
  if (exact >= 0) return exact_segments(feature, exact, out);
  if (layout.is_fold) return fold_segments(layout, feature, id, out);
  const uint64_t range = layout.size - static_cast<uint64_t>(layout.block) + 1;
  const uint64_t row = feature.key + static_cast<uint64_t>(id) * kIdFactor;
  int64_t count = 0;
  for (int64_t at = 0; at < feature.dim; at += layout.block, ++count) {
    const uint64_t hash = mix_bits(row + static_cast<uint64_t>(count) * kBlockFactor);
    out[count] = {static_cast<int64_t>(scale_hash(hash, range)),
                  static_cast<int32_t>(std::min(layout.block, feature.dim - at)),
                  layout.is_signed ? static_cast<int32_t>(hash & 1) : 0};
  }
  return count;
}

}  // namespace recmill

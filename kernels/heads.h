// The queries, keys and values of one attention head: copied between packed rows and scratch with whole vectors per row.
#pragma once

#include <cmath>

#include "arrays.h"
#include "vectors.h"

namespace recmill {

inline int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// A row of `packed` holds the queries of all heads, then the keys, then the values.
struct Shape {
  int64_t num_heads, head_width, width;  // width = num_heads * head_width
  int64_t padded;                        // head_width rounded up to whole vectors
  float scale;

  Shape(int64_t num_heads, int64_t width)
      : num_heads(num_heads),
        head_width(width / num_heads),
        width(width),
        padded(round_up(head_width, kLanes)),
        scale(1.0f / std::sqrt(static_cast<float>(head_width))) {}
};

RECMILL_INLINE void copy_rows(const float* from, int64_t step, int64_t rows, const Shape& shape, float factor,
                              float* to) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < shape.head_width; ++i) to[row * shape.padded + i] = from[row * step + i] * factor;
}

RECMILL_INLINE void copy_transposed(const float* from, int64_t step, int64_t rows, const Shape& shape, int64_t room,
                                    float* to) {
  for (int64_t i = 0; i < shape.head_width; ++i) {
    for (int64_t row = 0; row < rows; ++row) to[i * room + row] = from[row * step + i];
    for (int64_t row = rows; row < round_up(rows, kLanes); ++row) to[i * room + row] = 0.0f;
  }
}

RECMILL_INLINE void add_rows(const float* from, int64_t rows, const Shape& shape, float factor, float* to,
                             int64_t step) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < shape.head_width; ++i) to[row * step + i] += from[row * shape.padded + i] * factor;
}

inline Shape read_shape(const Input& packed, int64_t num_heads) {
  if (packed.ndim() != 2 || num_heads < 1 || packed.dim(1) % (3 * num_heads))
    refuse("packed: expected [rows, 3 * width] for " + std::to_string(num_heads) + " heads");
  return Shape(num_heads, packed.dim(1) / 3);
}

}  // namespace recmill

// Products of matrices that fit into the L1 cache, and exp of vectors: the parts of attention over short sequences.
#pragma once

#include <cstdint>
#include <cstring>

#include "parallel.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace recmill {

constexpr int64_t kLanes = 8;

// AVX2 registers where the caller is compiled for AVX2, pairs of SSE or NEON registers elsewhere.
typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));

RECMILL_INLINE Vec load(const float* from) {
  Vec vector;
  std::memcpy(&vector, from, sizeof(Vec));
  return vector;
}

RECMILL_INLINE void store(float* to, Vec vector) { std::memcpy(to, &vector, sizeof(Vec)); }

// Written with an array, GCC 12 compiles this to one broadcast. With eight elements in braces it compiles to seven
// insertions where the caller has another target, and products of matrices spend two thirds of their time there.
RECMILL_INLINE Vec splat(float value) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = value;
  return load(lanes);
}

// exp with a relative error of 1e-7 (the polynomial of Cephes' expf); 0 or nearly 0 below -87.
RECMILL_INLINE Vec exp_vec(Vec x) {
  const Vec lowest = splat(-87.0f), highest = splat(88.0f);
  x = x > lowest ? x : lowest;
  x = x < highest ? x : highest;
  const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it drops the fraction
  const Vec whole = (x * 1.44269504f + rounder) - rounder;
  const Vec part = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec sum = part * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * part + 8.3334519073e-3f;
  sum = sum * part + 4.1665795894e-2f;
  sum = sum * part + 1.6666665459e-1f;
  sum = sum * part + 5.0000001201e-1f;
  sum = sum * (part * part) + part + 1.0f;
  const IntVec power = (__builtin_convertvector(whole, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof(Vec));
  return sum * scale;
}

// One tile of C: kRows x (kVecs * 8). Element (i, k) of A is a[i * row_step + k * step].
template <int kRows, int kVecs, bool kAdds>
RECMILL_INLINE void multiply_tile(int64_t depth, const float* a, int64_t row_step, int64_t step, const float* b,
                                  int64_t b_width, float* c, int64_t c_width) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sums[r][v] = kAdds ? load(c + r * c_width + v * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) row[v] = load(b + k * b_width + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = splat(a[r * row_step + k * step]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sums[r][v] += factor * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(c + r * c_width + v * kLanes, sums[r][v]);
}

template <int kVecs, bool kAdds>
RECMILL_INLINE void multiply_columns(int64_t rows, int64_t depth, const float* a, int64_t row_step, int64_t step,
                                     const float* b, int64_t b_width, float* c, int64_t c_width) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4)
    multiply_tile<4, kVecs, kAdds>(depth, a + row * row_step, row_step, step, b, b_width, c + row * c_width, c_width);
  for (; row < rows; ++row)
    multiply_tile<1, kVecs, kAdds>(depth, a + row * row_step, row_step, step, b, b_width, c + row * c_width, c_width);
}

// C = A B, or C += A B: rows x columns, `columns` a multiple of 8, B and C row by row.
template <bool kAdds>
RECMILL_INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_step,
                             int64_t step, const float* b, int64_t b_width, float* c, int64_t c_width) {
  int64_t column = 0;
  for (; column + 16 <= columns; column += 16)
    multiply_columns<2, kAdds>(rows, depth, a, row_step, step, b + column, b_width, c + column, c_width);
  for (; column < columns; column += 8)
    multiply_columns<1, kAdds>(rows, depth, a, row_step, step, b + column, b_width, c + column, c_width);
}

}  // namespace recmill

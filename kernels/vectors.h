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
typedef float WideVec __attribute__((vector_size(64)));  // a register of AVX-512
typedef int32_t WideIntVec __attribute__((vector_size(64)));

template <typename V>
struct Lanes;
template <>
struct Lanes<Vec> {
  using Int = IntVec;
};
template <>
struct Lanes<WideVec> {
  using Int = WideIntVec;
};

template <typename V>
constexpr int64_t lanes_of() {
  return sizeof(V) / sizeof(float);
}

template <typename V>
RECMILL_INLINE V read(const float* from) {
  V vector;
  std::memcpy(&vector, from, sizeof(V));
  return vector;
}

template <typename V>
RECMILL_INLINE void write(float* to, const V& vector) {
  std::memcpy(to, &vector, sizeof(V));
}

// Written with an array, GCC 12 compiles this to one broadcast. With elements in braces it compiles to an insertion for
// each where the caller has another target, and products of matrices spend two thirds of their time there.
template <typename V>
RECMILL_INLINE V spread(float value) {
  float lanes[lanes_of<V>()];
  for (float& lane : lanes) lane = value;
  return read<V>(lanes);
}

template <typename V>
RECMILL_INLINE V larger(const V& a, const V& b) {
  return a > b ? a : b;
}

template <typename V>
RECMILL_INLINE V smaller(const V& a, const V& b) {
  return a < b ? a : b;
}

// exp with a relative error of 1e-7 (the polynomial of Cephes' expf); 0 or nearly 0 below -87.
template <typename V>
RECMILL_INLINE V exp_of(const V& given) {
  const V x = smaller(larger(spread<V>(-87.0f), given), spread<V>(88.0f));
  const V rounder = spread<V>(12582912.0f);  // 1.5 * 2^23: adding it drops the fraction
  const V whole = (x * 1.44269504f + rounder) - rounder;
  const V part = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  V sum = part * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * part + 8.3334519073e-3f;
  sum = sum * part + 4.1665795894e-2f;
  sum = sum * part + 1.6666665459e-1f;
  sum = sum * part + 5.0000001201e-1f;
  sum = sum * (part * part) + part + 1.0f;
  const typename Lanes<V>::Int power = (__builtin_convertvector(whole, typename Lanes<V>::Int) + 127) << 23;
  V scale;
  std::memcpy(&scale, &power, sizeof(V));
  return sum * scale;
}

// The same for the eight lanes that most ops use.
RECMILL_INLINE Vec load(const float* from) { return read<Vec>(from); }
RECMILL_INLINE void store(float* to, Vec vector) { write(to, vector); }
RECMILL_INLINE Vec splat(float value) { return spread<Vec>(value); }
RECMILL_INLINE Vec exp_vec(Vec x) { return exp_of(x); }

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

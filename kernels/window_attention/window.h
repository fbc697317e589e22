// Attention inside one window for one head: rows are copied into scratch, the rest is products of small matrices.
#pragma once

#include "heads.h"
#include "windows.h"

namespace recmill {
namespace {

constexpr int64_t kBlock = 64;  // queries processed together: with 64 keys, their scores take 16 KiB

struct Forward {
  const float* packed;
  float* out;
  float* log_sums;  // logarithms of the sums of exp(score): [heads, rows]; only of windows that are computed alone
};

// exp(scores - highest) of one row in place; returns their sum and the highest score.
RECMILL_INLINE void soften(float* scores, int64_t count, float& highest, float& sum) {
  Vec most = splat(scores[0]);
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const Vec next = load(scores + at);
    most = most > next ? most : next;
  }
  highest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = std::max(highest, most[lane]);
  for (; at < count; ++at) highest = std::max(highest, scores[at]);
  Vec sums = {};
  for (at = 0; at + kLanes <= count; at += kLanes) {
    const Vec value = exp_vec(load(scores + at) - highest);
    store(scores + at, value);
    sums += value;
  }
  sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  if (at < count) {  // there is room for whole vectors
    store(scores + at, exp_vec(load(scores + at) - highest));
    for (; at < count; ++at) sum += scores[at];
  }
}

RECMILL_INLINE void attend(const Windows& windows, const Shape& shape, const Forward& io, int64_t w, int64_t head,
                           float* room) {
  const int64_t length = windows.lengths[w], wide = round_up(windows.longest, kLanes), step = 3 * shape.width;
  const float* base = io.packed + windows.starts[w] * step + head * shape.head_width;
  float* query = room;
  float* key = query + wide * shape.padded;
  float* value = key + wide * shape.padded;
  float* scores = value + wide * shape.padded;
  float* sums = scores + kBlock * wide;
  copy_rows(base, step, length, shape, shape.scale, query);
  copy_transposed(base + shape.width, step, length, shape, wide, key);
  copy_rows(base + 2 * shape.width, step, length, shape, 1.0f, value);
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    const int64_t rows = std::min(kBlock, length - begin);
    multiply<false>(rows, round_up(length, kLanes), shape.head_width, query + begin * shape.padded, shape.padded, 1,
                    key, wide, scores, wide);
    float total[kBlock];
    const int64_t place = windows.places[w] + begin;
    for (int64_t row = 0; row < rows; ++row) {
      float highest;
      soften(scores + row * wide, length, highest, total[row]);
      io.log_sums[head * windows.places[windows.count] + place + row] = highest + std::log(total[row]);
    }
    multiply<false>(rows, shape.padded, length, scores, wide, 1, value, shape.padded, sums, shape.padded);
    for (int64_t row = 0; row < rows; ++row) {
      float* to = io.out + (place + row) * shape.width + head * shape.head_width;
      const float factor = 1.0f / total[row];
      for (int64_t i = 0; i < shape.head_width; ++i) to[i] = sums[row * shape.padded + i] * factor;
    }
  }
}

int64_t forward_room(const Windows& windows, const Shape& shape) {
  const int64_t wide = round_up(windows.longest, kLanes);
  return 3 * wide * shape.padded + kBlock * wide + kBlock * shape.padded;
}

struct Backward {
  const float* packed;
  const float* out;
  const float* log_sums;
  const float* gradient;  // of out
  float* packed_gradient;
};

// For one query: scores to probabilities, and gradients of probabilities to gradients of scores.
RECMILL_INLINE void soften_back(float* scores, float* gradients, int64_t count, float log_sum, float agreement) {
  for (int64_t at = 0; at < count; at += kLanes) {
    const Vec probability = exp_vec(load(scores + at) - log_sum);
    store(scores + at, probability);
    store(gradients + at, probability * (load(gradients + at) - agreement));
  }
}

RECMILL_INLINE void attend_back(const Windows& windows, const Shape& shape, const Backward& io, int64_t w,
                                int64_t head, float* room) {
  const int64_t length = windows.lengths[w], wide = round_up(windows.longest, kLanes), step = 3 * shape.width;
  const int64_t first = windows.starts[w] * step + head * shape.head_width, copy = wide * shape.padded;
  const float* base = io.packed + first;
  float *query = room, *key = query + copy, *key_across = key + copy, *value_across = key_across + copy;
  float *gradient = value_across + copy, *query_sums = gradient + copy, *key_sums = query_sums + copy;
  float *value_sums = key_sums + copy, *scores = value_sums + copy, *changes = scores + kBlock * wide;
  const int64_t place = windows.places[w], own = place * shape.width + head * shape.head_width;
  copy_rows(base, step, length, shape, shape.scale, query);
  copy_rows(base + shape.width, step, length, shape, 1.0f, key);
  copy_transposed(base + shape.width, step, length, shape, wide, key_across);
  copy_transposed(base + 2 * shape.width, step, length, shape, wide, value_across);
  copy_rows(io.gradient + own, shape.width, length, shape, 1.0f, gradient);
  std::memset(key_sums, 0, sizeof(float) * length * shape.padded);
  std::memset(value_sums, 0, sizeof(float) * length * shape.padded);
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    const int64_t rows = std::min(kBlock, length - begin), at = begin * shape.padded;
    multiply<false>(rows, round_up(length, kLanes), shape.head_width, query + at, shape.padded, 1, key_across, wide,
                    scores, wide);
    multiply<false>(rows, round_up(length, kLanes), shape.head_width, gradient + at, shape.padded, 1, value_across,
                    wide, changes, wide);
    for (int64_t row = 0; row < rows; ++row) {
      const float* result = io.out + own + (begin + row) * shape.width;
      float agreement = 0.0f;
      for (int64_t i = 0; i < shape.head_width; ++i) agreement += gradient[at + row * shape.padded + i] * result[i];
      soften_back(scores + row * wide, changes + row * wide, length,
                  io.log_sums[head * windows.places[windows.count] + place + begin + row], agreement);
    }
    multiply<true>(length, shape.padded, rows, scores, 1, wide, gradient + at, shape.padded, value_sums, shape.padded);
    multiply<true>(length, shape.padded, rows, changes, 1, wide, query + at, shape.padded, key_sums, shape.padded);
    multiply<false>(rows, shape.padded, length, changes, wide, 1, key, shape.padded, query_sums + at, shape.padded);
  }
  float* target = io.packed_gradient + first;
  add_rows(query_sums, length, shape, shape.scale, target, step);
  add_rows(key_sums, length, shape, 1.0f, target + shape.width, step);
  add_rows(value_sums, length, shape, 1.0f, target + 2 * shape.width, step);
}

int64_t backward_room(const Windows& windows, const Shape& shape) {
  const int64_t wide = round_up(windows.longest, kLanes);
  return 8 * wide * shape.padded + 2 * kBlock * wide;
}

}  // namespace
}  // namespace recmill

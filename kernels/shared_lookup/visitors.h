// What to do with every id of a batch: pool its row, add its gradient to the array, compute its weight's gradient.
#pragma once

#include "shared_lookup/walk.h"

namespace recmill::shared {

constexpr int64_t kLine = 16;  // slots that share a touched flag, a row-wise momentum and, if packed, an exponent
enum Mode { kSum = 0, kMean = 1, kMax = 2 };

// An array of plain weights; packed.h defines the other kind.
template <typename Value>
RECMILL_INLINE const Value* first_slot(const Value* array) {
  return array;
}

template <typename Value>
RECMILL_INLINE const Value* read_slots(const Value* array, const Segment& segment, std::vector<Value>&) {
  return array + segment.start;
}

template <typename Value, typename Array = const Value*>
struct Pool {
  static constexpr int kWrites = 0;
  const Job<Value>& job;
  Array array;
  Value* out;
  int32_t* winners;        // for max: the position in its list of the id with the largest element
  std::vector<Value> row;  // scratch for unpacked weights

  RECMILL_INLINE bool needs(const Segment&) const { return true; }

  RECMILL_INLINE void empty(const Feature& feature, int64_t sample) {
    if (!job.is_pooled) return;
    const int64_t at = sample * job.width + feature.column;
    std::fill(out + at, out + at + feature.dim, Value{0});
    if (feature.mode == kMax) std::fill(winners + at, winners + at + feature.dim, -1);
  }

  RECMILL_INLINE void operator()(const Item& item, const Segment* segments) {
    const Feature& feature = *item.feature;
    const int64_t vector = job.vector_at(feature, item.sample, item.position);
    const bool is_first = !job.is_pooled || item.position == item.begin;
    const Value weight = job.weights ? job.weights[item.position] : Value{1};
    int64_t at = vector;
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      const Value factor = segment.is_negative ? -weight : weight;
      const Value* from = read_slots(array, segment, row);
      if (feature.mode == kMax && job.is_pooled)
        take_larger(from, factor, at, segment.length, is_first, static_cast<int32_t>(item.position - item.begin));
      else if (is_first)
        scale_into<Value, false>(out + at, from, factor, segment.length);
      else
        scale_into<Value, true>(out + at, from, factor, segment.length);
      at += segment.length;
    }
    const int64_t count = item.end - item.begin;
    if (feature.mode == kMean && job.is_pooled && count > 1 && item.position + 1 == item.end)
      for (int64_t i = vector; i < vector + feature.dim; ++i) out[i] /= static_cast<Value>(count);
  }

  RECMILL_INLINE void take_larger(const Value* from, Value factor, int64_t at, int64_t length, bool is_first, int32_t which) {
    for (int64_t i = 0; i < length; ++i) {
      const Value value = factor * from[i];
      // A NaN wins and stays, as in torch.
      const bool wins = is_first || value > out[at + i] || (value != value && out[at + i] == out[at + i]);
      out[at + i] = wins ? value : out[at + i];
      winners[at + i] = wins ? which : winners[at + i];
    }
  }
};

// target[slots of an id] += scale * gradient of its list, for the slots in [low, high). Each thread owns slots, not
// samples, so that a slot's sum has the same order at any number of threads.
template <typename Value>
struct Scatter {
  static constexpr int kWrites = 1;
  const Job<Value>& job;
  const Value* gradient;
  const int32_t* winners;
  Value* target;
  uint8_t* touched;  // a byte per line, or null
  Value scale;
  int64_t low, high;

  // Lines of other threads must not be prefetched for writing.
  RECMILL_INLINE bool needs(const Segment& segment) const {
    return segment.start < high && segment.start + segment.length > low;
  }

  RECMILL_INLINE void empty(const Feature&, int64_t) {}

  RECMILL_INLINE void operator()(const Item& item, const Segment* segments) {
    const Feature& feature = *item.feature;
    int64_t at = job.vector_at(feature, item.sample, item.position);
    Value weight = job.weights ? scale * job.weights[item.position] : scale;
    if (feature.mode == kMean && job.is_pooled) weight /= static_cast<Value>(item.end - item.begin);
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      const Value factor = segment.is_negative ? -weight : weight;
      const int64_t start = std::max(segment.start, low), stop = std::min(segment.start + segment.length, high);
      if (start < stop) {
        const int64_t from = at + start - segment.start;
        if (feature.mode == kMax && job.is_pooled)
          add_won(start, from, factor, stop - start, static_cast<int32_t>(item.position - item.begin));
        else
          scale_into<Value, true>(target + start, gradient + from, factor, stop - start);
        if (touched)
          for (int64_t line = start / kLine; line <= (stop - 1) / kLine; ++line) touched[line] = 1;
      }
      at += segment.length;
    }
  }

  RECMILL_INLINE void add_won(int64_t start, int64_t from, Value factor, int64_t length, int32_t which) {
    for (int64_t i = 0; i < length; ++i)
      if (winners[from + i] == which) target[start + i] += factor * gradient[from + i];
  }
};

// out[id] = row of the id . gradient of its list: the gradient of the id's weight.
template <typename Value, typename Array = const Value*>
struct Weigh {
  static constexpr int kWrites = 0;
  const Job<Value>& job;
  Array array;
  const Value* gradient;
  Value* out;
  std::vector<Value> row;

  RECMILL_INLINE bool needs(const Segment&) const { return true; }

  RECMILL_INLINE void empty(const Feature&, int64_t) {}

  RECMILL_INLINE void operator()(const Item& item, const Segment* segments) {
    const Feature& feature = *item.feature;
    const Value* from = gradient + job.vector_at(feature, item.sample, item.position);
    Value total = 0;
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      const Value* own = read_slots(array, segment, row);
      Value part = 0;
      for (int64_t i = 0; i < segment.length; ++i) part += own[i] * from[i];
      total += segment.is_negative ? -part : part;
      from += segment.length;
    }
    if (feature.mode == kMean && job.is_pooled) total /= static_cast<Value>(item.end - item.begin);
    out[item.position] = total;
  }
};

}  // namespace recmill::shared

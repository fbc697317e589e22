// Visits every id of a batch with the parts of the array that make up its row, which are prefetched: Pool adds up its row,
// Scatter adds its gradient to the array.
#pragma once

#include <cstring>
#include <vector>

#include "shared_lookup/mapping.h"

namespace recmill::shared {

constexpr int64_t kLine = 16;   // slots that share a touched flag, a row-wise momentum and, if packed, an exponent
constexpr int64_t kAhead = 16;  // rows between prefetching and use; chosen without a sweep

// B samples of F lists each; list f of sample b is ids[offsets[f * B + b] : offsets[f * B + b + 1]].
template <typename Value>
struct Job {
  Layout layout;
  std::vector<Feature> features;
  const int64_t* ids;
  const int64_t* offsets;
  int64_t num_samples, num_values, width, max_segments;
  bool is_pooled;

  int64_t vector_at(const Feature& feature, int64_t sample, int64_t position) const {
    return is_pooled ? sample * width + feature.column : position * width;
  }
};

struct Item {
  const Feature* feature;
  int64_t sample, position, begin, end, num_segments;
};

template <typename Value>
struct Vector {
  static constexpr int64_t kSize = 32 / sizeof(Value);
  typedef Value Type __attribute__((vector_size(32)));
};

template <typename Value, bool kAdd>
RECMILL_INLINE void scale_vector(Value* to, const Value* from, const typename Vector<Value>::Type& factor) {
  typename Vector<Value>::Type a, b;
  std::memcpy(&b, from, 32);
  b *= factor;
  if (kAdd) {
    std::memcpy(&a, to, 32);
    b += a;
  }
  std::memcpy(to, &b, 32);
}

// to = factor * from, or to += factor * from. Without FMA, so that all CPUs give the same bits.
template <typename Value, bool kAdd>
RECMILL_INLINE void scale_into(Value* to, const Value* from, Value factor, int64_t length) {
  constexpr int64_t kSize = Vector<Value>::kSize;
  const typename Vector<Value>::Type factors = typename Vector<Value>::Type{} + factor;
  int64_t i = 0;
  for (; i + 2 * kSize <= length; i += 2 * kSize) {
    scale_vector<Value, kAdd>(to + i, from + i, factors);
    scale_vector<Value, kAdd>(to + i + kSize, from + i + kSize, factors);
  }
  for (; i + kSize <= length; i += kSize) scale_vector<Value, kAdd>(to + i, from + i, factors);
  for (; i < length; ++i) {
    const Value scaled = factor * from[i];
    to[i] = kAdd ? to[i] + scaled : scaled;
  }
}

// Calls visit(item, segments) for every id in the order sample, feature, list, while the memory of the next ids is
// prefetched, and visit.empty(feature, sample) for lists without ids. The order of samples does not depend on how they are
// spread over processes, so neither do the bits of sums.
template <typename Value, typename Slot, typename Visit>
RECMILL_INLINE void walk(const Job<Value>& job, int64_t first, int64_t last, const Slot* memory, Visit& visit) {
  std::vector<Segment> segments(kAhead * job.max_segments);
  Item items[kAhead];
  const int64_t num_features = static_cast<int64_t>(job.features.size());
  int64_t sample = first, f = -1, position = 0, begin = 0, end = 0, filled = 0, done = 0;
  bool is_open = first < last && num_features > 0;
  for (;;) {
    while (is_open && filled - done < kAhead) {
      if (position == end) {
        if (++f == num_features) {
          f = 0;
          if (++sample == last) {
            is_open = false;
            break;
          }
        }
        const int64_t* bag = job.offsets + f * job.num_samples + sample;
        position = begin = bag[0];
        end = bag[1];
        if (position == end) visit.empty(job.features[f], sample);
        continue;
      }
      const int64_t slot = filled % kAhead;
      Segment* own = segments.data() + slot * job.max_segments;
      const Feature& feature = job.features[f];
      const int64_t count = find_segments(job.layout, feature, job.ids[position], own);
      for (int64_t s = 0; s < count; ++s) {
        if (!visit.needs(own[s])) continue;
        const char* line = reinterpret_cast<const char*>(memory + own[s].start);
        const char* stop = reinterpret_cast<const char*>(memory + own[s].start + own[s].length);
        for (; line < stop; line += 64) __builtin_prefetch(line, Visit::kWrites);
        __builtin_prefetch(stop - 1, Visit::kWrites);
      }
      items[slot] = {&feature, sample, position, begin, end, count};
      ++position;
      ++filled;
    }
    if (done == filled) return;
    const int64_t slot = done++ % kAhead;
    visit(items[slot], segments.data() + slot * job.max_segments);
  }
}

template <typename Value, typename Slot, typename Visit>
void run(const Job<Value>& job, int64_t first, int64_t last, const Slot* memory, Visit& visit) {
  run_avx2([&]() RECMILL_BODY { walk(job, first, last, memory, visit); });
}

// An array of plain weights; packed.h defines the other kind.
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
  std::vector<Value> row;  // scratch for unpacked weights

  RECMILL_INLINE bool needs(const Segment&) const { return true; }

  RECMILL_INLINE void empty(const Feature& feature, int64_t sample) {
    if (!job.is_pooled) return;
    const int64_t at = sample * job.width + feature.column;
    std::fill(out + at, out + at + feature.dim, Value{0});
  }

  RECMILL_INLINE void operator()(const Item& item, const Segment* segments) {
    const Feature& feature = *item.feature;
    const int64_t vector = job.vector_at(feature, item.sample, item.position);
    const bool is_first = !job.is_pooled || item.position == item.begin;
    int64_t at = vector;
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      const Value* from = read_slots(array, segment, row);
      if (is_first)
        scale_into<Value, false>(out + at, from, Value{1}, segment.length);
      else
        scale_into<Value, true>(out + at, from, Value{1}, segment.length);
      at += segment.length;
    }
    const int64_t count = item.end - item.begin;
    if (feature.is_mean && job.is_pooled && count > 1 && item.position + 1 == item.end)
      for (int64_t i = vector; i < vector + feature.dim; ++i) out[i] /= static_cast<Value>(count);
  }
};

// target[slots of an id] += scale * gradient of its list, for the slots in [low, high). Each thread owns slots, not
// samples, so that a slot's sum has the same order at any number of threads.
template <typename Value>
struct Scatter {
  static constexpr int kWrites = 1;
  const Job<Value>& job;
  const Value* gradient;
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
    Value factor = scale;
    if (feature.is_mean && job.is_pooled) factor /= static_cast<Value>(item.end - item.begin);
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      const int64_t start = std::max(segment.start, low), stop = std::min(segment.start + segment.length, high);
      if (start < stop) {
        scale_into<Value, true>(target + start, gradient + at + start - segment.start, factor, stop - start);
        if (touched)
          for (int64_t line = start / kLine; line <= (stop - 1) / kLine; ++line) touched[line] = 1;
      }
      at += segment.length;
    }
  }
};

}  // namespace recmill::shared

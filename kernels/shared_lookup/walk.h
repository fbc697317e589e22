// Visits every id of a batch with the parts of the array that make up its row, which are prefetched.
#pragma once

#include <cstring>
#include <vector>

#include "shared_lookup/mapping.h"

namespace recmill::shared {

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
  const Value* weights;  // of the ids, or null

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
void run(const Job<Value>& job, int64_t first, int64_t last, const Slot* memory, Visit& visit, bool allow_avx2) {
  run_avx2([&]() RECMILL_BODY { walk(job, first, last, memory, visit); }, allow_avx2);
}

}  // namespace recmill::shared

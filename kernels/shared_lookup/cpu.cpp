// Rows of many logical tables out of one shared array: hashed, gathered and pooled in one pass, and the way back.
// No index is stored: an int64 index of a row of 64 floats would be 512 bytes, twice the row itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <sys/mman.h>

#include <cmath>

#include "jagged.h"
#include "shared_lookup/mapping.h"

namespace nb = nanobind;

namespace recmill {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int64_t kBytesPerThread = 1 << 19;
constexpr int64_t kAhead = 16;  // rows on their way into the cache; chosen without a sweep
constexpr int64_t kLine = 16;   // slots whose first touch is noted together, and that share a row-wise momentum
constexpr int64_t kColumns = 8;
enum Mode { kSum = 0, kMean = 1, kMax = 2 };

// What all passes know: B samples of F lists each; list f of sample b is ids[offsets[f * B + b] : offsets[f * B + b + 1]].
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
INLINE void scale_vector(Value* to, const Value* from, const typename Vector<Value>::Type& factor) {
  typename Vector<Value>::Type a, b;
  std::memcpy(&b, from, 32);
  b *= factor;
  if (kAdd) {
    std::memcpy(&a, to, 32);
    b += a;
  }
  std::memcpy(to, &b, 32);
}

// to = factor * from, or added to it. Multiplied and added apart on every CPU, so all give the same bits.
template <typename Value, bool kAdd>
INLINE void scale_into(Value* to, const Value* from, Value factor, int64_t length) {
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

// Calls visit(item, segments) for every id in the order sample, feature, list, with the memory of the next ones already
// on its way; visit.empty(feature, sample) for lists without ids. The order of samples never depends on how they are
// spread over processes, so neither do the bits of what is summed.
template <typename Value, typename Visit>
INLINE void walk(const Job<Value>& job, int64_t first, int64_t last, const Value* memory, Visit& visit) {
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

template <typename Value>
struct Pool {
  static constexpr int kWrites = 0;
  const Job<Value>& job;
  const Value* array;
  Value* out;
  int32_t* winners;  // of max: which id of the list

  INLINE bool needs(const Segment&) const { return true; }

  INLINE void empty(const Feature& feature, int64_t sample) {
    if (!job.is_pooled) return;
    const int64_t at = sample * job.width + feature.column;
    std::fill(out + at, out + at + feature.dim, Value{0});
    if (feature.mode == kMax) std::fill(winners + at, winners + at + feature.dim, -1);
  }

  INLINE void operator()(const Item& item, const Segment* segments) {
    const Feature& feature = *item.feature;
    const int64_t vector = job.vector_at(feature, item.sample, item.position);
    const bool is_first = !job.is_pooled || item.position == item.begin;
    const Value weight = job.weights ? job.weights[item.position] : Value{1};
    int64_t at = vector;
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      const Value factor = segment.is_negative ? -weight : weight;
      const Value* from = array + segment.start;
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

  INLINE void take_larger(const Value* from, Value factor, int64_t at, int64_t length, bool is_first, int32_t which) {
    for (int64_t i = 0; i < length; ++i) {
      const Value value = factor * from[i];
      // A NaN wins and stays, as in torch.
      const bool wins = is_first || value > out[at + i] || (value != value && out[at + i] == out[at + i]);
      out[at + i] = wins ? value : out[at + i];
      winners[at + i] = wins ? which : winners[at + i];
    }
  }
};

// target[slots of an id] += scale * gradient of its list, for the slots in [low, high): each slot sums in the order of
// the walk whatever the number of threads, because each thread owns slots, not samples.
template <typename Value>
struct Scatter {
  static constexpr int kWrites = 1;
  const Job<Value>& job;
  const Value* gradient;
  const int32_t* winners;
  Value* target;
  uint8_t* touched;  // a byte a line, or null
  Value scale;
  int64_t low, high;

  // Another thread's lines must not be fetched for writing.
  INLINE bool needs(const Segment& segment) const {
    return segment.start < high && segment.start + segment.length > low;
  }

  INLINE void empty(const Feature&, int64_t) {}

  INLINE void operator()(const Item& item, const Segment* segments) {
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

  INLINE void add_won(int64_t start, int64_t from, Value factor, int64_t length, int32_t which) {
    for (int64_t i = 0; i < length; ++i)
      if (winners[from + i] == which) target[start + i] += factor * gradient[from + i];
  }
};

// out[id] = row of the id . gradient of its list, the derivative by the id's weight.
template <typename Value>
struct Weigh {
  static constexpr int kWrites = 0;
  const Job<Value>& job;
  const Value* array;
  const Value* gradient;
  Value* out;

  INLINE bool needs(const Segment&) const { return true; }

  INLINE void empty(const Feature&, int64_t) {}

  INLINE void operator()(const Item& item, const Segment* segments) {
    const Feature& feature = *item.feature;
    const Value* from = gradient + job.vector_at(feature, item.sample, item.position);
    Value total = 0;
    for (int64_t s = 0; s < item.num_segments; ++s) {
      const Segment segment = segments[s];
      Value part = 0;
      for (int64_t i = 0; i < segment.length; ++i) part += array[segment.start + i] * from[i];
      total += segment.is_negative ? -part : part;
      from += segment.length;
    }
    if (feature.mode == kMean && job.is_pooled) total /= static_cast<Value>(item.end - item.begin);
    out[item.position] = total;
  }
};

template <typename Value, typename Visit>
void run_portable(const Job<Value>& job, int64_t first, int64_t last, const Value* memory, Visit& visit) {
  walk(job, first, last, memory, visit);
}

#if defined(__x86_64__)
template <typename Value, typename Visit>
__attribute__((target("avx2"))) void run_avx2(const Job<Value>& job, int64_t first, int64_t last, const Value* memory,
                                              Visit& visit) {
  walk(job, first, last, memory, visit);
}
#endif

template <typename Value, typename Visit>
void run(const Job<Value>& job, int64_t first, int64_t last, const Value* memory, Visit& visit, bool allow_avx2) {
#if defined(__x86_64__)
  if (allow_avx2 && __builtin_cpu_supports("avx2")) return run_avx2(job, first, last, memory, visit);
#endif
  (void)allow_avx2;
  run_portable(job, first, last, memory, visit);
}

// size, key, block, is randomfold, is signed
using LayoutArgument = std::tuple<int64_t, int64_t, int64_t, bool, bool>;
// ids, number of ids, offsets, number of samples, weights (0: none)
using ListsOfIds = std::tuple<Address, int64_t, Address, int64_t, Address>;
// features x 8: key, base, dim, mode, column, first exact id, number of exact ids, first slot of the exact rows;
// number of features, exact ids, width of a vector of the output, whether lists are pooled
using FeaturesArgument = std::tuple<Address, int64_t, Address, int64_t, bool>;

template <typename Value>
Job<Value> read_job(const LayoutArgument& layout, const ListsOfIds& lists, const FeaturesArgument& features) {
  Job<Value> job;
  const auto [size, key, block, is_fold, is_signed] = layout;
  job.layout = {static_cast<uint64_t>(size), static_cast<uint64_t>(key), block, is_fold, is_signed};
  const auto [ids, num_values, offsets, num_samples, weights] = lists;
  job.ids = pointer<const int64_t>(ids);
  job.offsets = pointer<const int64_t>(offsets);
  job.num_samples = num_samples;
  job.num_values = num_values;
  job.weights = pointer<const Value>(weights);
  const auto [rows, num_features, exact, width, is_pooled] = features;
  job.width = width;
  job.is_pooled = is_pooled;
  job.max_segments = 1;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t* row = pointer<const int64_t>(rows) + f * kColumns;
    job.features.push_back({static_cast<uint64_t>(row[0]), static_cast<uint64_t>(row[1]), row[2], row[3], row[4],
                            pointer<const int64_t>(exact) + row[5], row[6], row[7]});
    job.max_segments = std::max(job.max_segments, count_segments(job.layout, row[2]));
  }
  check_offsets({{nullptr, 1, num_values, job.offsets}}, num_features * num_samples);
  return job;
}

template <typename Value>
int count_threads(const Job<Value>& job, int requested) {
  const int64_t row_bytes = job.width / std::max<int64_t>(1, job.is_pooled ? job.features.size() : 1) * sizeof(Value);
  return choose_threads(requested, job.num_values * row_bytes, kBytesPerThread);
}

// Visitors are made by `make(thread)`; each walks its share of the samples.
template <typename Value, typename Make>
void walk_samples(const Job<Value>& job, const Value* memory, int threads, bool allow_avx2, Make make) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    auto visit = make(thread);
    run(job, job.num_samples * thread / threads, job.num_samples * (thread + 1) / threads, memory, visit, allow_avx2);
  }
}

template <typename Value>
void lookup(Address array, LayoutArgument layout, ListsOfIds lists, FeaturesArgument features, Address out,
            Address winners, int num_threads, bool allow_avx2) {
  const Job<Value> job = read_job<Value>(layout, lists, features);
  const Value* memory = pointer<const Value>(array);
  walk_samples(job, memory, count_threads(job, num_threads), allow_avx2,
               [&](int) { return Pool<Value>{job, memory, pointer<Value>(out), pointer<int32_t>(winners)}; });
}

template <typename Value>
void weigh(Address array, LayoutArgument layout, ListsOfIds lists, FeaturesArgument features, Address gradient,
           Address out, int num_threads, bool allow_avx2) {
  const Job<Value> job = read_job<Value>(layout, lists, features);
  const Value* memory = pointer<const Value>(array);
  walk_samples(job, memory, count_threads(job, num_threads), allow_avx2,
               [&](int) { return Weigh<Value>{job, memory, pointer<const Value>(gradient), pointer<Value>(out)}; });
}

// Threads own samples and add into arrays of their own, which are summed at the end: no thread hashes what another
// does, but the bits depend on the number of threads.
template <typename Value>
void scatter_apart(const Job<Value>& job, const Scatter<Value>& whole, int threads, bool allow_avx2) {
  std::vector<std::vector<Value>> own(threads);
  walk_samples(job, whole.target, threads, allow_avx2, [&](int thread) {
    Scatter<Value> part = whole;
    part.touched = nullptr;
    if (thread > 0) {
      own[thread].assign(whole.high, Value{0});
      part.target = own[thread].data();
    }
    return part;
  });
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t slot = 0; slot < whole.high; ++slot)
    for (int thread = 1; thread < threads; ++thread) whole.target[slot] += own[thread][slot];
  if (whole.touched) std::fill(whole.touched, whole.touched + (whole.high + kLine - 1) / kLine, 1);
}

// target += scale * (gradient of the array): zeros give the gradient, the array itself with -lr a step of SGD.
template <typename Value>
void scatter(Address target, int64_t num_slots, LayoutArgument layout, ListsOfIds lists, FeaturesArgument features,
             Address gradient, Address winners, Address touched, double scale, int num_threads, bool is_deterministic,
             bool allow_avx2) {
  const Job<Value> job = read_job<Value>(layout, lists, features);
  const int threads = count_threads(job, num_threads);
  const Scatter<Value> whole{job,
                             pointer<const Value>(gradient),
                             pointer<const int32_t>(winners),
                             pointer<Value>(target),
                             pointer<uint8_t>(touched),
                             static_cast<Value>(scale),
                             0,
                             num_slots};
  if (!is_deterministic && threads > 1) return scatter_apart(job, whole, threads, allow_avx2);
  const int64_t num_lines = (num_slots + kLine - 1) / kLine;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    Scatter<Value> part = whole;
    part.low = num_lines * thread / threads * kLine;
    part.high = std::min(num_slots, num_lines * (thread + 1) / threads * kLine);
    run(job, 0, job.num_samples, static_cast<const Value*>(whole.target), part, allow_avx2);
  }
}

template <typename Value>
INLINE void adagrad_line(Value* array, Value* momentum, Value* gradient, int64_t length, bool is_grouped, Value lr,
                         Value eps) {
  if (is_grouped) {
    Value squares = 0;
    for (int64_t i = 0; i < length; ++i) squares += gradient[i] * gradient[i];
    *momentum += squares / static_cast<Value>(length);
    const Value step = lr / (std::sqrt(*momentum) + eps);
    for (int64_t i = 0; i < length; ++i) array[i] -= step * gradient[i];
  } else {
    for (int64_t i = 0; i < length; ++i) {
      momentum[i] += gradient[i] * gradient[i];
      array[i] -= lr * gradient[i] / (std::sqrt(momentum[i]) + eps);
    }
  }
  std::fill(gradient, gradient + length, Value{0});
}

// A step of Adagrad on the lines that were touched; leaves gradient and touched all zero for the next one. Grouped:
// one momentum a line, from the mean of its squares, as row-wise Adagrad keeps one a row.
template <typename Value>
void adagrad(Address array, Address momentum, Address gradient, Address touched, int64_t num_slots, bool is_grouped,
             double lr, double eps, int num_threads) {
  uint8_t* lines = pointer<uint8_t>(touched);
  const int64_t num_lines = (num_slots + kLine - 1) / kLine;
  const int threads = choose_threads(num_threads, num_slots * static_cast<int64_t>(sizeof(Value)), kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t line = 0; line < num_lines; ++line) {
    if (!lines[line]) continue;
    const int64_t start = line * kLine;
    adagrad_line(pointer<Value>(array) + start, pointer<Value>(momentum) + (is_grouped ? line : start),
                 pointer<Value>(gradient) + start, std::min(kLine, num_slots - start), is_grouped,
                 static_cast<Value>(lr), static_cast<Value>(eps));
    lines[line] = 0;
  }
}

// Random rows of 10 MB in pages of 4 KiB miss the TLB: huge pages took a row from 48 to 36 ns in one run on a busy machine. Only advice:
// a system that does not know or want it says no, and nothing else changes.
bool advise_huge_pages(Address address, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr Address kPage = Address{1} << 21;
  const Address start = (address + kPage - 1) / kPage * kPage, stop = (address + num_bytes) / kPage * kPage;
  return start < stop && madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE) == 0;
#else
  (void)address, (void)num_bytes;
  return false;
#endif
}

}  // namespace

void bind_shared_lookup(nb::module_& m) {
  m.def("advise_huge_pages", &advise_huge_pages);
  m.def("shared_lookup_float32", &lookup<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_lookup_float64", &lookup<double>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_scatter_float32", &scatter<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_scatter_float64", &scatter<double>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_weigh_float32", &weigh<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_weigh_float64", &weigh<double>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_adagrad_float32", &adagrad<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_adagrad_float64", &adagrad<double>, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

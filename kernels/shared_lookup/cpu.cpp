// Rows of many logical tables out of one shared array: hashed, gathered and pooled in one pass, and the way back.
// No index is stored: an int64 index of a row of 64 floats would be 512 bytes, twice the row itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <sys/mman.h>

#include <cmath>

#include "jagged.h"
#include "shared_lookup/pieces.h"

namespace nb = nanobind;

namespace recmill {
namespace {

using namespace shared;

constexpr int64_t kBytesPerThread = 1 << 19;
constexpr int64_t kColumns = 9;

// size, key, block, is randomfold, is signed
using LayoutArgument = std::tuple<int64_t, int64_t, int64_t, bool, bool>;
// ids, number of ids, offsets, number of samples, weights (0: none)
using ListsOfIds = std::tuple<Address, int64_t, Address, int64_t, Address>;
// features x 9: key, base, dim, mode, column, first exact id, number of exact ids, first slot of the exact rows, own
// weights of each; number of features, exact ids, width of a vector of the output, whether lists are pooled
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
                            pointer<const int64_t>(exact) + row[5], row[6], row[7], row[8]});
    job.max_segments = std::max(job.max_segments, count_segments(job.layout, job.features.back()));
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
void walk_samples(const Job<Value>& job, int threads, bool allow_avx2, Make make) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    auto visit = make(thread);
    run(job, job.num_samples * thread / threads, job.num_samples * (thread + 1) / threads, visit, allow_avx2);
  }
}

template <typename Value>
struct Plain {
  using Argument = Address;
  using Array = const Value*;
  static Array read(Argument array) { return pointer<const Value>(array); }
};

struct InBytes {
  using Argument = std::tuple<Address, Address>;  // codes, exponents
  using Array = Packed;
  static Array read(Argument array) {
    return {pointer<const int8_t>(std::get<0>(array)), pointer<const int8_t>(std::get<1>(array))};
  }
};

template <typename Value, typename Form = Plain<Value>>
void lookup(typename Form::Argument array, LayoutArgument layout, ListsOfIds lists, FeaturesArgument features,
            Address out, Address winners, int num_threads, bool allow_avx2) {
  using Visitor = Pool<Value, typename Form::Array>;
  const Job<Value> job = read_job<Value>(layout, lists, features);
  walk_samples(job, count_threads(job, num_threads), allow_avx2, [&](int) {
    return Visitor{job, Form::read(array), pointer<Value>(out), pointer<int32_t>(winners), {}};
  });
}

template <typename Value, typename Form = Plain<Value>>
void weigh(typename Form::Argument array, LayoutArgument layout, ListsOfIds lists, FeaturesArgument features,
           Address gradient, Address out, int num_threads, bool allow_avx2) {
  using Visitor = Weigh<Value, typename Form::Array>;
  const Job<Value> job = read_job<Value>(layout, lists, features);
  walk_samples(job, count_threads(job, num_threads), allow_avx2, [&](int) {
    return Visitor{job, Form::read(array), pointer<const Value>(gradient), pointer<Value>(out), {}};
  });
}

// Threads own samples and add into arrays of their own, which are summed at the end: no thread hashes what another
// does, but the bits depend on the number of threads.
template <typename Value>
void scatter_apart(const Job<Value>& job, const Scatter<Value>& whole, int threads, bool allow_avx2) {
  std::vector<std::vector<Value>> own(threads);
  walk_samples(job, threads, allow_avx2, [&](int thread) {
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
    run(job, 0, job.num_samples, part, allow_avx2);
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

enum PackedStep { kPlainStep = 0, kAdagradStep = 1, kGroupedStep = 2 };

// A step of SGD, Adagrad or row-wise Adagrad on the touched lines of an array of bytes. `key`: of this step's rounding.
void step_bytes(InBytes::Argument array, Address momentum, Address gradient, Address touched, int64_t num_slots,
                int kind, double lr, double eps, int64_t key, int num_threads) {
  uint8_t* lines = pointer<uint8_t>(touched);
  int8_t* codes = pointer<int8_t>(std::get<0>(array));
  int8_t* exponents = pointer<int8_t>(std::get<1>(array));
  const int64_t num_lines = (num_slots + kLine - 1) / kLine;
  const int threads = choose_threads(num_threads, num_slots * static_cast<int64_t>(sizeof(float)), kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t line = 0; line < num_lines; ++line) {
    if (!lines[line]) continue;
    const int64_t start = line * kLine, length = std::min(kLine, num_slots - start);
    float* slope = pointer<float>(gradient) + start;
    float values[kLine];
    const float unit = power_of_two(exponents[line]);
    for (int64_t i = 0; i < length; ++i) values[i] = unit * static_cast<float>(codes[start + i]);
    if (kind == kPlainStep) {
      for (int64_t i = 0; i < length; ++i) values[i] -= static_cast<float>(lr) * slope[i];
      std::fill(slope, slope + length, 0.0f);
    } else {
      const bool is_grouped = kind == kGroupedStep;
      adagrad_line(values, pointer<float>(momentum) + (is_grouped ? line : start), slope, length, is_grouped,
                   static_cast<float>(lr), static_cast<float>(eps));
    }
    pack_line(values, length, static_cast<uint64_t>(key), line, codes + start, exponents + line);
    lines[line] = 0;
  }
}

// Random rows of 10 MB in pages of 4 KiB miss the TLB: huge pages took a row from 48 to 36 ns in one run on a busy
// machine. Only advice: a system that does not know or want it says no, and nothing else changes.
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
  m.def("shared_lookup_int8", &lookup<float, InBytes>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_weigh_int8", &weigh<float, InBytes>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_step_int8", &step_bytes, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_adagrad_float32", &adagrad<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("shared_adagrad_float64", &adagrad<double>, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

// Rows of many logical tables in one shared array: hashed, gathered and pooled in one pass, and the gradient back.
// No index is stored: an int64 index for a row of 64 floats would take 512 bytes, twice the row itself.
#include <sys/mman.h>

#include <nanobind/stl/pair.h>

#include <cmath>

#include "jagged.h"
#include "shared_lookup/pieces.h"

namespace recmill {
namespace {

using namespace shared;

constexpr int64_t kBytesPerThread = 1 << 19;
constexpr int64_t kMostSlots = int64_t{1} << 46, kMostWidth = int64_t{1} << 22;  // sums and products fit into 64 bits
constexpr int64_t kColumns = 8;  // of the features: see SharedFeatures in layout.py

int64_t count_lines(int64_t num_slots) { return (num_slots + kLine - 1) / kLine; }

// The lists of ids of a lookup and the features they belong to. Keeps the arrays alive; built once for all passes.
class SharedLists {
 public:
  // `layout`: shared slots, slots per block.
  SharedLists(Input ids, Input offsets, Input features, Input exact_ids, std::pair<int64_t, int64_t> layout,
              int64_t width, bool is_pooled)
      : ids_(std::move(ids)), offsets_(std::move(offsets)), exact_ids_(std::move(exact_ids)),
        layout_{layout.first, layout.second}, width(width), is_pooled(is_pooled) {
    const int64_t num_features = features.dim(0), num_offsets = offsets_.num_items();
    if (num_features == 0 || offsets_.ndim() != 1 || num_offsets == 0 || (num_offsets - 1) % num_features)
      refuse("offsets: received " + std::to_string(num_offsets) + " for " + std::to_string(num_features) +
             " features, expected F * B + 1 of them");
    if (layout_.block < 1 || layout_.size < layout_.block || layout_.size > kMostSlots || width < 1 || width > kMostWidth)
      refuse("layout: expected blocks of at least one slot that fit into the shared slots");
    num_samples_ = (num_offsets - 1) / num_features;
    read_features(features.as<const int64_t>("features", num_features * kColumns), num_features);
    check_offsets({nullptr, 1, ids_.num_items(), offsets_.as<const int64_t>("offsets")}, num_offsets - 1);
  }

  template <typename Value>
  Job<Value> job() const {
    return {layout_,      features_,        ids_.as<const int64_t>("ids"), offsets_.as<const int64_t>("offsets"),
            num_samples_, ids_.num_items(), width,                         max_segments_,
            is_pooled};
  }

  int64_t num_rows() const { return is_pooled ? num_samples_ : ids_.num_items(); }
  int64_t num_out() const { return num_rows() * width; }

  // Nothing outside of the array is read: it must hold the shared slots and all exact rows.
  template <typename Array>
  void check_size(const Array& array) const {
    if (array.ndim() != 1 || array.num_items() < needed_)
      refuse("array: has " + std::to_string(array.num_items()) + " slots, expected one dimension of at least " +
             std::to_string(needed_) + " slots");
  }

 private:
  void read_features(const int64_t* row, int64_t num_features) {
    const int64_t* exact = exact_ids_.as<const int64_t>("exact_ids");
    needed_ = layout_.size;
    for (int64_t f = 0; f < num_features; ++f, row += kColumns) {
      const int64_t dim = row[1], column = row[3], start = row[4], count = row[5], base = row[6], own = row[7];
      const int64_t num_exact = exact_ids_.num_items();
      // Each number is small enough before it is added or multiplied.
      if (dim < 1 || dim > width || own < 1 || own > dim || count < 0 || count > num_exact || start < 0 ||
          start > num_exact - count || base < 0 || base > kMostSlots || column < 0 || (is_pooled && column > width - dim))
        refuse("features: row " + std::to_string(f) + " does not fit the exact ids or the width");
      features_.push_back({static_cast<uint64_t>(row[0]), dim, column, row[2] != 0, exact + start, count, base, own});
      if (count) needed_ = std::max(needed_, base + count * own);
      max_segments_ = std::max(max_segments_, count_segments(layout_, features_.back()));
    }
  }

  const Input ids_, offsets_, exact_ids_;
  const Layout layout_;
  std::vector<Feature> features_;
  int64_t num_samples_, needed_, max_segments_ = 1;

 public:
  const int64_t width;
  const bool is_pooled;
};

template <typename Value>
int count_threads(const Job<Value>& job) {
  const int64_t row_bytes = job.width / std::max<int64_t>(1, job.is_pooled ? job.features.size() : 1) * sizeof(Value);
  return choose_threads(job.num_values * row_bytes, kBytesPerThread);
}

// Calls run(Value{}, weights) with the array as float, double or, with exponents, packed bytes.
template <typename Run>
void with_weights(const SharedLists& lists, const Input& array, const OptionalInput& exponents, Run run) {
  lists.check_size(array);
  if (exponents)
    return run(float{}, Packed{array.as<const int8_t>("array"),
                               exponents->as<const int8_t>("exponents", count_lines(array.num_items()))});
  array.with_dtype<float, double>("array", [&](auto value) {
    run(value, array.as<const decltype(value)>("array"));
  });
}

void shared_lookup(const SharedLists& lists, const Input& array, const OptionalInput& exponents, const Output& out) {
  with_weights(lists, array, exponents, [&](auto value, auto weights) {
    using Value = decltype(value);
    const Job<Value> job = lists.job<Value>();
    Value* vectors = out.as<Value>("out", lists.num_out());
    const int threads = count_threads(job);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread) {
      Pool<Value, decltype(weights)> visit{job, weights, vectors, {}};
      run(job, job.num_samples * thread / threads, job.num_samples * (thread + 1) / threads, visit);
    }
  });
}

// target += scale * (gradient of the array): zeros give the gradient, the array itself with -lr a step of SGD.
void shared_scatter(const SharedLists& lists, const Output& target, const Input& gradient,
                    const OptionalOutput& touched, double scale) {
  lists.check_size(target);
  const int64_t num_slots = target.num_items(), num_lines = count_lines(num_slots);
  target.with_dtype<float, double>("array", [&](auto value) {
    using Value = decltype(value);
    const Job<Value> job = lists.job<Value>();
    const Scatter<Value> whole{job,
                               gradient.as<const Value>("gradient", lists.num_out()),
                               target.as<Value>("array"),
                               touched ? touched->as<uint8_t>("touched", num_lines) : nullptr,
                               static_cast<Value>(scale),
                               0,
                               num_slots};
    const int threads = count_threads(job);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread) {
      Scatter<Value> part = whole;
      part.low = num_lines * thread / threads * kLine;
      part.high = std::min(num_slots, num_lines * (thread + 1) / threads * kLine);
      run(job, 0, job.num_samples, part);
    }
  });
}

enum StepKind { kPlainStep, kAdagradStep, kGroupedStep };

// One step on a line of weights, which leaves its gradient zero.
template <typename Value>
RECMILL_INLINE void step_line(StepKind kind, Value* weights, Value* momentum, Value* gradient, int64_t length, Value lr,
                              Value eps) {
  if (kind == kAdagradStep) {
    for (int64_t i = 0; i < length; ++i) {
      momentum[i] += gradient[i] * gradient[i];
      weights[i] -= lr * gradient[i] / (std::sqrt(momentum[i]) + eps);
    }
  } else {
    if (kind == kGroupedStep) {
      Value squares = 0;
      for (int64_t i = 0; i < length; ++i) squares += gradient[i] * gradient[i];
      *momentum += squares / static_cast<Value>(length);
      lr /= std::sqrt(*momentum) + eps;
    }
    for (int64_t i = 0; i < length; ++i) weights[i] -= lr * gradient[i];
  }
  std::fill(gradient, gradient + length, Value{0});
}

// A step on the touched lines of an array, which leaves gradient and touched zero. The size of `momentum` decides: none is
// SGD, one element per slot Adagrad, one per line row-wise Adagrad with the mean of the line's squares. With exponents the
// array is packed, and `key` determines this step's rounding.
void shared_step(const Output& array, const OptionalOutput& exponents, const Output& momentum, const Output& gradient,
                 const Output& touched, double lr, double eps, int64_t key) {
  const int64_t num_slots = array.num_items(), num_lines = count_lines(num_slots), num_momentum = momentum.num_items();
  if (num_momentum != 0 && num_momentum != num_slots && num_momentum != num_lines)
    refuse("momentum: has " + std::to_string(num_momentum) + " elements, expected 0, " + std::to_string(num_slots) +
           " or " + std::to_string(num_lines));
  const StepKind kind = num_momentum == 0 ? kPlainStep : num_momentum == num_slots ? kAdagradStep : kGroupedStep;
  uint8_t* lines = touched.as<uint8_t>("touched", num_lines);
  int8_t* exponent = exponents ? exponents->as<int8_t>("exponents", num_lines) : nullptr;
  if (exponents) gradient.as<float>("gradient");  // packed weights are trained in float32
  gradient.with_dtype<float, double>("gradient", [&](auto value) {
    using Value = decltype(value);
    Value* slope = gradient.as<Value>("gradient", num_slots);
    Value* history = momentum.as<Value>("momentum");
    Value* weights = exponents ? nullptr : array.as<Value>("array");
    int8_t* codes = exponents ? array.as<int8_t>("array") : nullptr;
    const int threads = choose_threads(num_slots * static_cast<int64_t>(sizeof(Value)), kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t line = 0; line < num_lines; ++line) {
      if (!lines[line]) continue;
      const int64_t start = line * kLine, length = std::min(kLine, num_slots - start);
      Value* own = history + (kind == kGroupedStep ? line : kind == kAdagradStep ? start : 0);
      const Value rate = static_cast<Value>(lr), small = static_cast<Value>(eps);
      if (codes == nullptr) {
        step_line(kind, weights + start, own, slope + start, length, rate, small);
      } else {
        Value values[kLine];
        const float unit = power_of_two(exponent[line]);
        for (int64_t i = 0; i < length; ++i) values[i] = unit * static_cast<float>(codes[start + i]);
        step_line(kind, values, own, slope + start, length, rate, small);
        if constexpr (std::is_same_v<Value, float>)
          pack_line(values, length, static_cast<uint64_t>(key), line, codes + start, exponent + line);
      }
      lines[line] = 0;
    }
  });
}

// Random rows of a 10 MB array in pages of 4 KiB miss the TLB: huge pages reduced the time per row from 48 to 36 ns in one
// run on a busy machine. This is only advice: where the system does not support it, it returns false and changes nothing.
bool advise_huge_pages([[maybe_unused]] const Output& array) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto address = reinterpret_cast<uintptr_t>(array.bytes("array"));
  const uintptr_t start = (address + kPage - 1) / kPage * kPage, stop = (address + array.nbytes()) / kPage * kPage;
  return start < stop && madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace

void bind_shared_lookup(nb::module_& m) {
  nb::class_<SharedLists>(m, "SharedLists")
      .def(nb::init<Input, Input, Input, Input, std::pair<int64_t, int64_t>, int64_t, bool>())
      .def_prop_ro("num_rows", &SharedLists::num_rows)
      .def_ro("width", &SharedLists::width);
  add_function(m, "shared_lookup", &shared_lookup);
  add_function(m, "shared_scatter", &shared_scatter);
  add_function(m, "shared_step", &shared_step);
  add_function(m, "advise_huge_pages", &advise_huge_pages);
}

}  // namespace recmill

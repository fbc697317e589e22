// Distinct rows back to one row a sample, and the gradient the other way.
#include <nanobind/nanobind.h>

#include "jagged.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;

void expand_rows(Address distinct_address, int64_t num_distinct, int64_t row_bytes, Address inverse_address,
                 int64_t num_rows, Address out_address, int num_threads) {
  const char* distinct = pointer<const char>(distinct_address);
  const int64_t* inverse = pointer<const int64_t>(inverse_address);
  char* out = pointer<char>(out_address);
  check_rows("inverse", inverse, num_rows, num_distinct);
  const int threads = choose_threads(num_threads, num_rows * row_bytes, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row)
    copy_bytes(out + row * row_bytes, distinct + inverse[row] * row_bytes, row_bytes);
}

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void narrow(float value, float& out) { out = value; }
inline void narrow(double value, double& out) { out = value; }
inline void narrow(float value, BFloat16& out) {  // to nearest, ties to even, as torch rounds
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  out.bits = value != value ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Where the copies of each distinct row begin in the gradient, in ascending order of samples: places[starts[u] :
// starts[u + 1]]. A stable counting sort.
struct Members {
  std::vector<int64_t> starts, places;

  template <typename Place>
  Members(const int64_t* inverse, int64_t num_rows, int64_t num_distinct, Place place)
      : starts(num_distinct + 1, 0), places(num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) ++starts[inverse[row] + 1];
    for (int64_t u = 0; u < num_distinct; ++u) starts[u + 1] += starts[u];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t row = 0; row < num_rows; ++row) places[next[inverse[row]]++] = place(row);
  }
};

// Vectors of 32 bytes: AVX2 registers where the caller is compiled for it, pairs of SSE or NEON ones elsewhere. Written
// out because the compiler keeps a plain array of sums in memory, which is half as fast.
template <typename Wide>
struct Vector {
  static constexpr int64_t kSize = 32 / sizeof(Wide);
  typedef Wide Type __attribute__((vector_size(32)));
};

template <typename Wide>
inline __attribute__((always_inline)) void add_vector(typename Vector<Wide>::Type& sum, const Wide* from) {
  typename Vector<Wide>::Type vector;
  std::memcpy(&vector, from, 32);
  sum += vector;
}

inline __attribute__((always_inline)) void add_vector(Vector<float>::Type& sum, const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, 16);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Vector<float>::Type vector;
  std::memcpy(&vector, &words, 32);
  sum += vector;
}

constexpr int64_t kVectors = 4;  // sums at once

// out[i] = sum over places of gradient[place + i], always first to last: the bits depend on neither threads nor vectors.
template <typename Value>
inline __attribute__((always_inline)) void sum_vectors(const Value* gradient, const int64_t* places, int64_t count,
                                                       Value* out) {
  using Wide = decltype(widen(Value{}));
  constexpr int64_t kSize = Vector<Wide>::kSize;
  typename Vector<Wide>::Type sums[kVectors] = {};
  for (int64_t at = 0; at < count; ++at) {
    const Value* row = gradient + places[at];
    add_vector(sums[0], row);
    add_vector(sums[1], row + kSize);
    add_vector(sums[2], row + 2 * kSize);
    add_vector(sums[3], row + 3 * kSize);
  }
  for (int64_t i = 0; i < kVectors * kSize; ++i) narrow(sums[i / kSize][i % kSize], out[i]);
}

template <typename Value>
inline __attribute__((always_inline)) void sum_column(const Value* gradient, const int64_t* places, int64_t count,
                                                      Value* out) {
  decltype(widen(Value{})) sum = 0;
  for (int64_t at = 0; at < count; ++at) sum += widen(gradient[places[at]]);
  narrow(sum, *out);
}

template <typename Value>
inline __attribute__((always_inline)) void sum_list(const Value* gradient, const int64_t* places, int64_t count,
                                                    Value* out, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kVectors * Vector<decltype(widen(Value{}))>::kSize;
  int64_t column = begin;
  for (; column + kColumns <= end; column += kColumns) sum_vectors(gradient + column, places, count, out + column);
  for (; column < end; ++column) sum_column(gradient + column, places, count, out + column);
}

template <typename Value>
void sum_list_portable(const Value* gradient, const int64_t* places, int64_t count, Value* out, int64_t begin,
                       int64_t end) {
  sum_list(gradient, places, count, out, begin, end);
}

template <typename Value>
using SumList = void (*)(const Value*, const int64_t*, int64_t, Value*, int64_t, int64_t);

#if defined(__x86_64__)
template <typename Value>
__attribute__((target("avx2"))) void sum_list_avx2(const Value* gradient, const int64_t* places, int64_t count,
                                                   Value* out, int64_t begin, int64_t end) {
  sum_list(gradient, places, count, out, begin, end);
}
#endif

template <typename Value>
SumList<Value> choose_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return sum_list_avx2<Value>;
#endif
  return sum_list_portable<Value>;
}

// Distinct rows go to threads; a batch of few distinct rows is cut by columns as well, so that no thread stands idle.
template <typename Value>
void sum_rows(Address gradient_address, int64_t num_rows, int64_t width, Address inverse_address, Address out_address,
              int64_t num_distinct, int num_threads) {
  const Value* gradient = pointer<const Value>(gradient_address);
  const int64_t* inverse = pointer<const int64_t>(inverse_address);
  Value* out = pointer<Value>(out_address);
  check_rows("inverse", inverse, num_rows, num_distinct);
  const Members members(inverse, num_rows, num_distinct, [&](int64_t row) { return row * width; });
  const SumList<Value> sum = choose_sum<Value>();
  const int threads = choose_threads(num_threads, num_rows * width * static_cast<int64_t>(sizeof(Value)), kBytesPerThread);
  const int64_t pieces = num_distinct < 8 * threads ? std::max<int64_t>(1, std::min<int64_t>(threads, width / 64)) : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (int64_t task = 0; task < num_distinct * pieces; ++task) {
    const int64_t u = task / pieces, piece = task % pieces;
    sum(gradient, members.places.data() + members.starts[u], members.starts[u + 1] - members.starts[u], out + u * width,
        width * piece / pieces, width * (piece + 1) / pieces);
  }
}

// The same for lists of vectors: row b of the gradient is gradient[out_offsets[b] : out_offsets[b + 1]].
template <typename Value>
void sum_jagged(Address gradient_address, int64_t num_gradients, int64_t width, Address expanded_address,
                Address inverse_address, int64_t num_rows, Address offsets_address, int64_t num_distinct,
                Address out_address, int64_t num_values, int num_threads) {
  const Value* gradient = pointer<const Value>(gradient_address);
  const int64_t* expanded = pointer<const int64_t>(expanded_address);
  const int64_t* inverse = pointer<const int64_t>(inverse_address);
  const int64_t* offsets = pointer<const int64_t>(offsets_address);
  Value* out = pointer<Value>(out_address);
  check_offsets({{nullptr, 1, num_values, offsets}}, num_distinct);
  check_offsets({{nullptr, 1, num_gradients, expanded}}, num_rows);
  check_rows("inverse", inverse, num_rows, num_distinct);
  for (int64_t row = 0; row < num_rows; ++row)
    if (expanded[row + 1] - expanded[row] != offsets[inverse[row] + 1] - offsets[inverse[row]])
      throw std::invalid_argument("row " + std::to_string(row) + ": its expanded list has another length");
  const Members members(inverse, num_rows, num_distinct, [&](int64_t row) { return expanded[row] * width; });
  const SumList<Value> sum = choose_sum<Value>();
  const int threads =
      choose_threads(num_threads, num_gradients * width * static_cast<int64_t>(sizeof(Value)), kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (int64_t u = 0; u < num_distinct; ++u)
    sum(gradient, members.places.data() + members.starts[u], members.starts[u + 1] - members.starts[u],
        out + offsets[u] * width, 0, (offsets[u + 1] - offsets[u]) * width);
}

}  // namespace

void bind_expand_rows(nb::module_& m) {
  m.def("expand_rows", &expand_rows, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_rows_float32", &sum_rows<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_rows_float64", &sum_rows<double>, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_rows_bfloat16", &sum_rows<BFloat16>, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_jagged_float32", &sum_jagged<float>, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_jagged_float64", &sum_jagged<double>, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_jagged_bfloat16", &sum_jagged<BFloat16>, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

// Distinct rows expanded to one row per sample, and the gradient the other way.
#include "jagged.h"

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;

struct BFloat16 {
  uint16_t bits;
};

}  // namespace
}  // namespace recmill

template <>
struct nanobind::detail::dtype_traits<recmill::BFloat16> {
  static constexpr dlpack::dtype value{(uint8_t)dlpack::dtype_code::Bfloat, 16, 1};
  static constexpr auto name = const_name("bfloat16");
};

namespace recmill {
namespace {

void expand_rows(const Input& distinct, const Input& inverse_rows, const Output& out) {
  const int64_t num_rows = inverse_rows.num_items(), row_bytes = distinct.row_bytes();
  const int64_t* inverse = inverse_rows.as<const int64_t>("inverse");
  const char* from = distinct.bytes("distinct");
  char* to = out.bytes("out");
  if (out.dim(0) != num_rows || (num_rows > 0 && out.row_bytes() != row_bytes)) refuse("out: has another shape");
  check_rows("inverse", inverse, num_rows, distinct.dim(0));
  const int threads = choose_threads(num_rows * row_bytes, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row)
    copy_bytes(to + row * row_bytes, from + inverse[row] * row_bytes, row_bytes);
}

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
inline void narrow(float value, BFloat16& out) {  // to the nearest, ties to even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  out.bits = value != value ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Where the copies of distinct row u begin in the gradient, in ascending order of samples: places[starts[u] :
// starts[u + 1]]. A stable counting sort.
struct Members {
  std::vector<int64_t> starts, places;

  Members(const int64_t* inverse, int64_t num_rows, int64_t num_distinct, int64_t width)
      : starts(num_distinct + 1, 0), places(num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) ++starts[inverse[row] + 1];
    for (int64_t u = 0; u < num_distinct; ++u) starts[u + 1] += starts[u];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t row = 0; row < num_rows; ++row) places[next[inverse[row]]++] = row * width;
  }
};

// Vectors of 32 bytes: AVX2 registers where the caller is compiled for AVX2, pairs of SSE or NEON registers elsewhere.
// Written out because the compiler keeps a plain array of sums in memory, which is half as fast.
template <typename Wide>
struct Vector {
  static constexpr int64_t kSize = 32 / sizeof(Wide);
  typedef Wide Type __attribute__((vector_size(32)));
};

template <typename Wide>
RECMILL_INLINE void add_vector(typename Vector<Wide>::Type& sum, const Wide* from) {
  typename Vector<Wide>::Type vector;
  std::memcpy(&vector, from, 32);
  sum += vector;
}

RECMILL_INLINE void add_vector(Vector<float>::Type& sum, const BFloat16* from) {
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

// out[i] = sum over places of gradient[place + i], in order, so that the bits depend on neither threads nor vectors.
template <typename Value>
RECMILL_INLINE void sum_vectors(const Value* gradient, const int64_t* places, int64_t count, Value* out) {
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
RECMILL_INLINE void sum_column(const Value* gradient, const int64_t* places, int64_t count, Value* out) {
  decltype(widen(Value{})) sum = 0;
  for (int64_t at = 0; at < count; ++at) sum += widen(gradient[places[at]]);
  narrow(sum, *out);
}

template <typename Value>
RECMILL_INLINE void sum_list(const Value* gradient, const int64_t* places, int64_t count, Value* out, int64_t begin,
                             int64_t end) {
  constexpr int64_t kColumns = kVectors * Vector<decltype(widen(Value{}))>::kSize;
  int64_t column = begin;
  for (; column + kColumns <= end; column += kColumns) sum_vectors(gradient + column, places, count, out + column);
  for (; column < end; ++column) sum_column(gradient + column, places, count, out + column);
}

// Threads take distinct rows. A batch with few distinct rows is also split by columns, so that no thread is idle.
void sum_rows(const Input& gradient, const Input& inverse_rows, const Output& out) {
  const int64_t num_distinct = out.dim(0), width = num_distinct ? out.num_items() / num_distinct : 0;
  const int64_t num_rows = inverse_rows.num_items();
  const int64_t* inverse = inverse_rows.as<const int64_t>("inverse");
  check_rows("inverse", inverse, num_rows, num_distinct);
  const Members members(inverse, num_rows, num_distinct, width);
  gradient.with_dtype<float, double, BFloat16>("gradient", [&](auto value) {
    using Value = decltype(value);
    const Value* from = gradient.as<const Value>("gradient", num_distinct ? num_rows * width : -1);
    Value* sums = out.as<Value>("out");
    const int threads = choose_threads(num_rows * width * static_cast<int64_t>(sizeof(Value)), kBytesPerThread);
    const int64_t split = std::max<int64_t>(1, std::min<int64_t>(threads, width / 64));
    const int64_t pieces = num_distinct < 8 * threads ? split : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t task = 0; task < num_distinct * pieces; ++task) {
      const int64_t u = task / pieces, piece = task % pieces;
      run_avx2([&]() RECMILL_BODY {
        sum_list(from, members.places.data() + members.starts[u], members.starts[u + 1] - members.starts[u],
                 sums + u * width, width * piece / pieces, width * (piece + 1) / pieces);
      });
    }
  });
}

}  // namespace

void bind_expand_rows(nb::module_& m) {
  add_function(m, "expand_rows", &expand_rows);
  add_function(m, "sum_rows", &sum_rows);
}

}  // namespace recmill

// Distinct rows expanded to one row per sample, and the gradient the other way.
#include "jagged.h"

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;

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

// A vector of 32 bytes: an AVX2 register where the caller is compiled for AVX2, a pair of SSE or NEON registers elsewhere.
// Written out because the compiler keeps a plain array of sums in memory, which is half as fast.
template <typename Value>
struct Vector {
  static constexpr int64_t kSize = 32 / sizeof(Value);
  typedef Value Type __attribute__((vector_size(32)));

  static RECMILL_INLINE void add(Type& sum, const Value* from) {
    Type vector;
    std::memcpy(&vector, from, 32);
    sum += vector;
  }
};

constexpr int64_t kVectors = 4;  // sums at once

// out[i] = sum over places of gradient[place + i], in order, so that the bits depend on neither threads nor vectors.
template <typename Value>
RECMILL_INLINE void sum_vectors(const Value* gradient, const int64_t* places, int64_t count, Value* out) {
  typename Vector<Value>::Type sums[kVectors] = {};
  for (int64_t at = 0; at < count; ++at)
#pragma GCC unroll 4
    for (int64_t i = 0; i < kVectors; ++i)
      Vector<Value>::add(sums[i], gradient + places[at] + i * Vector<Value>::kSize);
  std::memcpy(out, sums, sizeof(sums));
}

template <typename Value>
RECMILL_INLINE void sum_list(const Value* gradient, const int64_t* places, int64_t count, Value* out, int64_t begin,
                             int64_t end) {
  constexpr int64_t kColumns = kVectors * Vector<Value>::kSize;
  int64_t column = begin;
  for (; column + kColumns <= end; column += kColumns) sum_vectors(gradient + column, places, count, out + column);
  for (; column < end; ++column) {
    Value sum = 0;
    for (int64_t at = 0; at < count; ++at) sum += gradient[places[at] + column];
    out[column] = sum;
  }
}

// Threads take distinct rows. A batch with few distinct rows is also split by columns, so that no thread is idle.
void sum_rows(const Input& gradient, const Input& inverse_rows, const Output& out) {
  const int64_t num_distinct = out.dim(0), width = num_distinct ? out.num_items() / num_distinct : 0;
  const int64_t num_rows = inverse_rows.num_items();
  const int64_t* inverse = inverse_rows.as<const int64_t>("inverse");
  check_rows("inverse", inverse, num_rows, num_distinct);
  const Members members(inverse, num_rows, num_distinct, width);
  gradient.with_dtype<float, double>("gradient", [&](auto value) {
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

// The way of a gradient from bags of lookups to rows of a table: which rows, their sums, one optimiser step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;
constexpr int64_t kAhead = 8;  // rows whose weights are fetched before their turn

void check_ends(const char* name, const int64_t* ends, int64_t count, int64_t total) {
  bool good = ends[0] == 0 && ends[count] == total;
  for (int64_t i = 0; i < count; ++i) good &= ends[i] <= ends[i + 1];
  if (!good)
    throw std::invalid_argument(std::string(name) + ": expected ascending numbers from 0 to " + std::to_string(total));
}

// Writes the distinct rows in ascending order and for every id its place among them; returns how many there are.
// Rows are marked, not sorted: hot rows are few.
template <typename Id>
int64_t find_rows(Address ids_address, int64_t num_ids, Address edges_address, Address bases_address, int64_t num_features,
                  int64_t num_rows, Address rows_address, Address inverse_address) {
  const Id* ids = pointer<const Id>(ids_address);
  const int64_t* edges = pointer<const int64_t>(edges_address);
  const int64_t* bases = pointer<const int64_t>(bases_address);
  int32_t* rows = pointer<int32_t>(rows_address);
  int32_t* inverse = pointer<int32_t>(inverse_address);
  check_ends("edges", edges, num_features, num_ids);
  std::vector<int32_t> place(num_rows, 0);
  for (int64_t f = 0; f < num_features; ++f)
    for (int64_t n = edges[f]; n < edges[f + 1]; ++n) {
      const int64_t row = static_cast<int64_t>(ids[n]) + bases[f];
      if (ids[n] < 0 || row >= num_rows)
        throw std::invalid_argument("ids[" + std::to_string(n) + "] is " + std::to_string(ids[n]) +
                                    ", expected a row in [0, " + std::to_string(num_rows - bases[f]) + ")");
      inverse[n] = static_cast<int32_t>(row);
      place[row] = 1;
    }
  int32_t count = 0;
  for (int64_t row = 0; row < num_rows; ++row)
    if (place[row]) {
      place[row] = count;
      rows[count++] = static_cast<int32_t>(row);
    }
  for (int64_t n = edges[0]; n < edges[num_features]; ++n) inverse[n] = place[inverse[n]];
  return count;
}

using Gradient = std::tuple<Address, int64_t>;  // of one feature: where it starts, floats from one bag to the next

struct Bags {
  std::vector<Gradient> gradients;
  const int64_t* offsets;  // feature-major; null: every bag has one id
  const int32_t* inverse;
  int64_t num_bags, width;
  bool is_mean;
};

// Bag by bag, features inside: gradients are read as they lie. A thread takes the sums of rows [begin, end) from all
// bags, so a sum has the same order at any number of threads.
RECMILL_INLINE void add_bags(const Bags& bags, float* out, int64_t begin, int64_t end) {
  const int64_t num_features = static_cast<int64_t>(bags.gradients.size());
  for (int64_t bag = 0; bag < bags.num_bags; ++bag)
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t place = f * bags.num_bags + bag;
      const int64_t first = bags.offsets ? bags.offsets[place] : place;
      const int64_t last = bags.offsets ? bags.offsets[place + 1] : place + 1;
      const auto& [address, step] = bags.gradients[f];
      const float* from = pointer<const float>(address) + bag * step;
      const float weight = bags.is_mean && last > first ? 1.0f / static_cast<float>(last - first) : 1.0f;
      for (int64_t n = first; n < last; ++n) {
        const int64_t row = bags.inverse[n];
        if (row < begin || row >= end) continue;
        float* sum = out + row * bags.width;
        int64_t i = 0;
        for (; i + kLanes <= bags.width; i += kLanes) store(sum + i, load(sum + i) + load(from + i) * weight);
        for (; i < bags.width; ++i) sum[i] += from[i] * weight;
      }
    }
}

void add_bags_portable(const Bags& bags, float* out, int64_t begin, int64_t end) { add_bags(bags, out, begin, end); }

enum Optimiser { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2 };

struct Table {
  float* weights;
  float* state;  // a float an element, a row, or none, by optimiser
  int64_t width;
  int optimiser;
  double lr, eps, scale;
};

// Gradients of one row: the first, and where the next one lies.
struct Chain {
  const float* gradient;
  int64_t row;
  int64_t next;  // -1: no other
};

typedef double WideVec __attribute__((vector_size(64)));

RECMILL_INLINE WideVec load_wide(const double* from) {
  WideVec vector;
  std::memcpy(&vector, from, sizeof(WideVec));
  return vector;
}

RECMILL_INLINE double square_sum(const double* from, int64_t width) {
  WideVec sums{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) sums += load_wide(from + i) * load_wide(from + i);
  double sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (; i < width; ++i) sum += from[i] * from[i];
  return sum;
}

// In double until a weight or state is stored, as FBGEMM's update of single rows computes.
RECMILL_INLINE void step_row(const Table& table, int64_t row, const double* gradient) {
  float* weights = table.weights + row * table.width;
  if (table.optimiser == kAdagrad) {
    float* state = table.state + row * table.width;
    for (int64_t i = 0; i < table.width; ++i) {
      state[i] = static_cast<float>(state[i] + gradient[i] * gradient[i]);
      weights[i] = static_cast<float>(weights[i] - table.lr * gradient[i] / (std::sqrt(state[i]) + table.eps));
    }
    return;
  }
  double rate = table.lr;
  if (table.optimiser == kRowWiseAdagrad) {
    float& state = table.state[row];
    state = static_cast<float>(state + square_sum(gradient, table.width) / static_cast<double>(table.width));
    rate = table.lr / (std::sqrt(state) + table.eps);
  }
  for (int64_t i = 0; i < table.width; ++i) weights[i] = static_cast<float>(weights[i] - gradient[i] * rate);
}

RECMILL_INLINE void step_rows(const Table& table, const std::vector<Chain>& chains, const std::vector<int64_t>& firsts,
                              int64_t begin, int64_t end, double* sum) {
  for (int64_t at = begin; at < end; ++at) {
    if (at + kAhead < end) {
      const float* later = table.weights + chains[firsts[at + kAhead]].row * table.width;
      for (int64_t i = 0; i < table.width; i += 16) __builtin_prefetch(later + i, 1);
    }
    const Chain& first = chains[firsts[at]];
    for (int64_t i = 0; i < table.width; ++i) sum[i] = first.gradient[i];
    for (int64_t next = first.next; next >= 0; next = chains[next].next)
      for (int64_t i = 0; i < table.width; ++i) sum[i] += chains[next].gradient[i];
    for (int64_t i = 0; i < table.width; ++i) sum[i] *= table.scale;
    step_row(table, first.row, sum);
  }
}

void step_rows_portable(const Table& table, const std::vector<Chain>& chains, const std::vector<int64_t>& firsts,
                        int64_t begin, int64_t end, double* sum) {
  step_rows(table, chains, firsts, begin, end, sum);
}

#if defined(__x86_64__)
// Without FMA: a product is rounded before it is added, here as in the portable loops, so both give the same bits.
__attribute__((target("avx2"))) void add_bags_avx2(const Bags& bags, float* out, int64_t begin, int64_t end) {
  add_bags(bags, out, begin, end);
}

__attribute__((target("avx2"))) void step_rows_avx2(const Table& table, const std::vector<Chain>& chains,
                                                    const std::vector<int64_t>& firsts, int64_t begin, int64_t end,
                                                    double* sum) {
  step_rows(table, chains, firsts, begin, end, sum);
}
#endif

auto choose_add() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return &add_bags_avx2;
#endif
  return &add_bags_portable;
}

auto choose_step() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return &step_rows_avx2;
#endif
  return &step_rows_portable;
}

void sum_bags(const std::vector<Gradient>& gradients, Address offsets, Address inverse, int64_t num_ids,
              int64_t num_bags, int64_t width, bool is_mean, Address out_address, int64_t num_distinct,
              int num_threads) {
  const Bags bags{gradients, pointer<const int64_t>(offsets), pointer<const int32_t>(inverse), num_bags, width, is_mean};
  if (offsets) check_ends("offsets", bags.offsets, static_cast<int64_t>(gradients.size()) * num_bags, num_ids);
  float* out = pointer<float>(out_address);
  const auto add = choose_add();
  const int64_t work = static_cast<int64_t>(gradients.size()) * num_bags * width * static_cast<int64_t>(sizeof(float));
  const int threads = choose_threads(num_threads, work, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t begin = num_distinct * thread / threads, end = num_distinct * (thread + 1) / threads;
    std::fill(out + begin * width, out + end * width, 0.0f);
    add(bags, out, begin, end);
  }
}

using Block = std::tuple<Address, Address, int64_t>;  // rows (int32), gradients, how many

// Gradients of the same row are chained in the order in which they come, so that a row is stepped once, by one thread.
void update_rows(Address weights, Address state, int64_t num_rows, int64_t width, int optimiser, double lr, double eps,
                 double scale, const std::vector<Block>& blocks, int num_threads) {
  const Table table{pointer<float>(weights), pointer<float>(state), width, optimiser, lr, eps, scale};
  std::vector<Chain> chains;
  std::vector<int64_t> firsts;
  std::vector<int32_t> last(num_rows, -1);
  for (size_t block = 0; block < blocks.size(); ++block) {
    const auto& [rows_address, gradients_address, count] = blocks[block];
    const int32_t* rows = pointer<const int32_t>(rows_address);
    const float* gradients = pointer<const float>(gradients_address);
    for (int64_t i = 0; i < count; ++i) {
      if (rows[i] < 0 || rows[i] >= num_rows)
        throw std::invalid_argument("rows of block " + std::to_string(block) + "[" + std::to_string(i) + "] is " +
                                    std::to_string(rows[i]) + ", expected a row in [0, " + std::to_string(num_rows) + ")");
      const int32_t place = static_cast<int32_t>(chains.size());
      chains.push_back({gradients + i * width, rows[i], -1});
      if (last[rows[i]] < 0) firsts.push_back(place);
      else chains[last[rows[i]]].next = place;
      last[rows[i]] = place;
    }
  }
  const auto step = choose_step();
  const int64_t distinct = static_cast<int64_t>(firsts.size());
  const int64_t work = static_cast<int64_t>(chains.size()) * width * static_cast<int64_t>(sizeof(float));
  const int threads = choose_threads(num_threads, work, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    std::vector<double> sum(width);
    step(table, chains, firsts, distinct * thread / threads, distinct * (thread + 1) / threads, sum.data());
  }
}

}  // namespace

void bind_update_rows(nb::module_& m) {
  m.def("find_rows_int64", &find_rows<int64_t>, nb::call_guard<nb::gil_scoped_release>());
  m.def("find_rows_int32", &find_rows<int32_t>, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_bags", &sum_bags, nb::call_guard<nb::gil_scoped_release>());
  m.def("update_rows", &update_rows, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

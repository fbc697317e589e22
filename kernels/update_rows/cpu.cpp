// From gradients of bags of lookups to an optimiser step of table rows: which rows, the sums of their gradients, the step.
#include <cmath>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "vectors.h"

namespace recmill {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;
constexpr int64_t kAhead = 8;  // rows between prefetching weights and using them

void check_ends(const char* name, const int64_t* ends, int64_t count, int64_t total) {
  bool good = ends[0] == 0 && ends[count] == total;
  for (int64_t i = 0; i < count; ++i) good &= ends[i] <= ends[i + 1];
  if (!good)
    refuse(std::string(name) + ": expected ascending numbers from 0 to " + std::to_string(total));
}

// Rows are marked in bits, not sorted: 64 rows that nobody reads cost one comparison.
template <typename Id>
int64_t mark_rows(const Id* ids, int64_t num_ids, const int64_t* edges, const int64_t* bases, int64_t num_features,
                  int64_t num_rows, int32_t* rows, int32_t* inverse) {
  check_ends("edges", edges, num_features, num_ids);
  const int64_t num_words = (num_rows + 63) / 64;
  std::vector<uint64_t> marks(num_words, 0);
  for (int64_t f = 0; f < num_features; ++f)
    for (int64_t n = edges[f]; n < edges[f + 1]; ++n) {
      // Unsigned: hostile ids wrap around, and end outside of the rows or, below 0, are refused themselves.
      const uint64_t row = static_cast<uint64_t>(ids[n]) + static_cast<uint64_t>(bases[f]);
      if (ids[n] < 0 || row >= static_cast<uint64_t>(num_rows))
        refuse("ids[" + std::to_string(n) + "] is " + std::to_string(ids[n]) + ", expected a row in [0, " +
               std::to_string(num_rows - bases[f]) + ")");
      inverse[n] = static_cast<int32_t>(row);
      marks[row >> 6] |= uint64_t{1} << (row & 63);
    }
  std::vector<int32_t> before(num_words);  // marked rows in the words before
  int32_t count = 0;
  for (int64_t word = 0; word < num_words; ++word) {
    before[word] = count;
    for (uint64_t left = marks[word]; left; left &= left - 1)
      rows[count++] = static_cast<int32_t>(word * 64 + __builtin_ctzll(left));
  }
  for (int64_t n = edges[0]; n < edges[num_features]; ++n) {
    const uint64_t word = marks[inverse[n] >> 6], lower = (uint64_t{1} << (inverse[n] & 63)) - 1;
    inverse[n] = before[inverse[n] >> 6] + __builtin_popcountll(word & lower);
  }
  return count;
}

// Writes the distinct rows in ascending order and the place of every id among them; returns their number.
int64_t find_rows(const Input& ids, const Input& edges, const Input& bases, int64_t num_rows, const Output& rows,
                  const Output& inverse) {
  const int64_t num_ids = ids.num_items(), num_features = bases.num_items();
  if (num_rows < 0 || num_rows > INT32_MAX) refuse("num_rows: is " + std::to_string(num_rows));
  int32_t* found = rows.as<int32_t>("rows", std::min(num_ids, num_rows));
  int64_t count = 0;
  ids.with_dtype<int64_t, int32_t>("ids_N", [&](auto id) {
    count = mark_rows(ids.as<const decltype(id)>("ids_N"), num_ids, edges.as<const int64_t>("edges_F", num_features + 1),
                      bases.as<const int64_t>("bases_F"), num_features, num_rows, found,
                      inverse.as<int32_t>("inverse", num_ids));
  });
  return count;
}

struct Bags {
  std::vector<const float*> gradients;
  std::vector<int64_t> steps;  // floats from one bag to the next, per feature
  const int64_t* offsets;      // feature-major; null: every bag has one id
  const int32_t* inverse;
  int64_t num_bags, width;
  bool is_mean;
};

// Bag by bag, and feature by feature inside: gradients are read in the order of memory. A thread adds up rows [begin, end)
// over all bags, so the order of a sum does not depend on the number of threads.
RECMILL_INLINE void add_bags(const Bags& bags, float* out, int64_t begin, int64_t end) {
  const int64_t num_features = static_cast<int64_t>(bags.gradients.size());
  for (int64_t bag = 0; bag < bags.num_bags; ++bag)
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t place = f * bags.num_bags + bag;
      const int64_t first = bags.offsets ? bags.offsets[place] : place;
      const int64_t last = bags.offsets ? bags.offsets[place + 1] : place + 1;
      const float* from = bags.gradients[f] + bag * bags.steps[f];
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

enum OptimiserKind { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2 };

struct Table {
  float* weights;
  float* state;  // a float per element, per row, or none, depending on the optimiser
  int64_t width;
  int optimiser;
  double lr, eps, scale;
};

// A gradient of a row, and the position of the row's next gradient.
struct Chain {
  const float* gradient;
  int64_t row;
  int64_t next;  // -1: none
};

struct Block {
  const int32_t* rows;
  const float* gradients;
  int64_t count;
};

// Few blocks of ascending rows, as find_rows returns them, are merged without an entry per row of the tables.
constexpr size_t kMergedBlocks = 8;

bool are_ascending(const std::vector<Block>& blocks) {
  if (blocks.size() > kMergedBlocks) return false;
  for (const Block& block : blocks)
    for (int64_t i = 1; i < block.count; ++i)
      if (block.rows[i - 1] >= block.rows[i]) return false;
  return true;
}

void merge_blocks(const std::vector<Block>& blocks, int64_t width, std::vector<Chain>& chains,
                  std::vector<int64_t>& firsts) {
  std::vector<int64_t> at(blocks.size(), 0);
  while (true) {
    int64_t row = INT64_MAX;
    for (size_t block = 0; block < blocks.size(); ++block)
      if (at[block] < blocks[block].count) row = std::min<int64_t>(row, blocks[block].rows[at[block]]);
    if (row == INT64_MAX) return;
    const size_t first = chains.size();
    firsts.push_back(static_cast<int64_t>(first));
    for (size_t block = 0; block < blocks.size(); ++block) {
      if (at[block] == blocks[block].count || blocks[block].rows[at[block]] != row) continue;
      if (chains.size() > first) chains.back().next = static_cast<int64_t>(chains.size());
      chains.push_back({blocks[block].gradients + at[block]++ * width, row, -1});
    }
  }
}

void chain_blocks(const std::vector<Block>& blocks, int64_t width, int64_t num_rows, std::vector<Chain>& chains,
                  std::vector<int64_t>& firsts) {
  std::vector<int32_t> last(num_rows, -1);
  for (const Block& block : blocks)
    for (int64_t i = 0; i < block.count; ++i) {
      const int32_t place = static_cast<int32_t>(chains.size());
      int32_t& before = last[block.rows[i]];
      chains.push_back({block.gradients + i * width, block.rows[i], -1});
      if (before < 0) firsts.push_back(place);
      else chains[before].next = place;
      before = place;
    }
}

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

// Computed in double until a weight or state is stored, as FBGEMM's update of single rows does.
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

// Without FMA: products are rounded before they are added, so all CPUs give the same bits.
void sum_bags(const std::vector<Input>& gradients, const OptionalInput& offsets, const Input& inverse, bool is_mean,
              const Output& out) {
  const int64_t num_distinct = out.dim(0), width = out.dim(1), num_ids = inverse.num_items();
  const int64_t num_features = static_cast<int64_t>(gradients.size());
  Bags bags{{}, {}, as_or_null<int64_t>(offsets, "offsets"), inverse.as<const int32_t>("inverse_N"),
            gradients.empty() ? 0 : gradients[0].dim(0), width, is_mean};
  for (const Input& own : gradients) {
    if (own.ndim() != 2 || own.dim(0) != bags.num_bags || own.dim(1) != width || own.dtype() != nb::dtype<float>())
      refuse("gradients: expected float32 matrices of one shape");
    bags.gradients.push_back(own.rows_as<const float>("gradients"));
    bags.steps.push_back(own.stride(0));
  }
  const int64_t num_ends = offsets ? offsets->num_items() : num_ids + 1;
  if (num_ends != num_features * bags.num_bags + 1) refuse("offsets: expected one more than bags");
  if (offsets) check_ends("offsets", bags.offsets, num_features * bags.num_bags, num_ids);
  float* sums = out.as<float>("out");
  const int64_t work = num_features * bags.num_bags * width * static_cast<int64_t>(sizeof(float));
  const int threads = choose_threads(work, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t begin = num_distinct * thread / threads, end = num_distinct * (thread + 1) / threads;
    std::fill(sums + begin * width, sums + end * width, 0.0f);
    run_avx2([&]() RECMILL_BODY { add_bags(bags, sums, begin, end); });
  }
}

// Gradients of the same row are chained in the order in which they arrive, so that one thread steps a row once.
void update_rows(const Output& weights, const OptionalOutput& state, int kind, double lr, double eps, double scale,
                 const std::vector<Input>& rows_of_blocks, const std::vector<Input>& gradients_of_blocks) {
  const int64_t num_rows = weights.dim(0), width = weights.dim(1);
  const int64_t state_size[] = {0, num_rows * width, num_rows};
  if (kind < kSgd || kind > kRowWiseAdagrad || state.has_value() != (kind != kSgd))
    refuse("state: does not fit the optimiser");
  float* own_state = state ? state->as<float>("state", state_size[kind]) : nullptr;
  const Table table{weights.as<float>("weights_HD"), own_state, width, kind, lr, eps, scale};
  if (rows_of_blocks.size() != gradients_of_blocks.size()) refuse("blocks: expected as many rows as gradients");
  std::vector<Block> blocks;
  for (size_t block = 0; block < rows_of_blocks.size(); ++block) {
    const int64_t count = rows_of_blocks[block].num_items();
    blocks.push_back({rows_of_blocks[block].as<const int32_t>("rows"),
                      gradients_of_blocks[block].as<const float>("gradient", count * width), count});
    for (int64_t i = 0; i < count; ++i)
      if (blocks[block].rows[i] < 0 || blocks[block].rows[i] >= num_rows)
        refuse("rows of block " + std::to_string(block) + "[" + std::to_string(i) + "] is " +
               std::to_string(blocks[block].rows[i]) + ", expected a row in [0, " + std::to_string(num_rows) + ")");
  }
  std::vector<Chain> chains;
  std::vector<int64_t> firsts;
  if (are_ascending(blocks)) merge_blocks(blocks, width, chains, firsts);
  else chain_blocks(blocks, width, num_rows, chains, firsts);
  const int64_t distinct = static_cast<int64_t>(firsts.size());
  const int64_t work = static_cast<int64_t>(chains.size()) * width * static_cast<int64_t>(sizeof(float));
  const int threads = choose_threads(work, kBytesPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    std::vector<double> sum(width);
    const int64_t begin = distinct * thread / threads, end = distinct * (thread + 1) / threads;
    run_avx2([&]() RECMILL_BODY { step_rows(table, chains, firsts, begin, end, sum.data()); });
  }
}

}  // namespace

void bind_update_rows(nb::module_& m) {
  add_function(m, "find_rows", &find_rows);
  add_function(m, "sum_bags", &sum_bags);
  add_function(m, "update_rows", &update_rows);
}

}  // namespace recmill

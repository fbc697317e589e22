// Lists of several features, each looked up in a table of any form and pooled, in one call: a request with one candidate
// has some twenty lists of a few ids, and a call of torch per list costs more than its rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "arrays.h"
#include "jagged.h"
#include "parallel.h"

namespace recmill {
namespace {

constexpr int64_t kWorkPerThread = 1 << 18;  // floats that are added
constexpr int64_t kAhead = 8;                // rows that are requested from memory before they are added

enum Form : int64_t { kFloat32, kBf16, kInt8, kInt4, kNumForms };

// Rows of bytes begin anywhere.
typedef float AnyFloat __attribute__((aligned(1), may_alias));
typedef uint16_t AnyShort __attribute__((aligned(1), may_alias));

RECMILL_INLINE float float_of_half(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu, sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t bits = magnitude << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  value *= 0x1p112f;  // exact, also for numbers that are subnormal as a half
  std::memcpy(&bits, &value, sizeof(bits));
  bits = (magnitude >= 0x7c00u ? 0x7f800000u | magnitude << 13 : bits) | sign;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

RECMILL_INLINE float float_of_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// FBGEMM adds the offset of a quantised row first, then scale * number; so do these.
template <int64_t kForm>
RECMILL_INLINE void add_row(const char* row, int64_t dim, float* __restrict sum) {
  if constexpr (kForm == kFloat32) {
    const AnyFloat* own = reinterpret_cast<const AnyFloat*>(row);
    for (int64_t i = 0; i < dim; ++i) sum[i] += own[i];
  } else if constexpr (kForm == kBf16) {
    const AnyShort* own = reinterpret_cast<const AnyShort*>(row);
    for (int64_t i = 0; i < dim; ++i) sum[i] += float_of_bf16(own[i]);
  } else if constexpr (kForm == kInt8) {
    const uint8_t* own = reinterpret_cast<const uint8_t*>(row);
    const AnyFloat* rest = reinterpret_cast<const AnyFloat*>(row + dim);
    const float scale = rest[0], offset = rest[1];
    for (int64_t i = 0; i < dim; ++i) sum[i] = (sum[i] + offset) + scale * static_cast<float>(own[i]);
  } else {
    const uint8_t* own = reinterpret_cast<const uint8_t*>(row);
    const AnyShort* rest = reinterpret_cast<const AnyShort*>(row + (dim + 1) / 2);
    const float scale = float_of_half(rest[0]), offset = float_of_half(rest[1]);
    for (int64_t i = 0; i < dim / 2; ++i) {
      sum[2 * i] = (sum[2 * i] + offset) + scale * static_cast<float>(own[i] & 15);
      sum[2 * i + 1] = (sum[2 * i + 1] + offset) + scale * static_cast<float>(own[i] >> 4);
    }
    if (dim % 2) sum[dim - 1] = (sum[dim - 1] + offset) + scale * static_cast<float>(own[dim / 2] & 15);
  }
}

struct TableFeature {
  const char* rows;
  const int32_t* order;  // the place of each row among `rows`, or null
  int64_t num_rows, row_bytes;
  int64_t form, dim, column, is_mean, max_length;

  bool is_pooled() const { return column >= 0; }
  // Where row `id` is; -1 if the order, which comes from a file, names no place.
  int64_t place(int64_t id) const {
    if (order == nullptr) return id;
    return static_cast<uint64_t>(order[id]) < static_cast<uint64_t>(num_rows) ? order[id] : -1;
  }
};

int64_t bytes_of_row(int64_t form, int64_t dim) {
  const int64_t bytes[] = {4 * dim, 2 * dim, dim + 8, (dim + 1) / 2 + 4};
  return bytes[form];
}

// The tables of several features. Keeps their arrays alive; built once per model.
class PooledTables {
 public:
  // `numbers` has a row per feature: form, width, first column of its vector (-1: its rows are not pooled), whether the
  // mean is taken, and how many of the last ids of a list count (0: all).
  PooledTables(std::vector<Input> rows, std::vector<OptionalInput> orders, const Input& numbers, int64_t width)
      : width(width), rows_(std::move(rows)), orders_(std::move(orders)) {
    const int64_t count = static_cast<int64_t>(rows_.size());
    const int64_t* own = numbers.as<const int64_t>("numbers", 5 * count);
    if (orders_.size() != rows_.size()) refuse("expected as many orders as tables");
    for (int64_t f = 0; f < count; ++f, own += 5) {
      TableFeature feature{rows_[f].bytes("rows", f), nullptr, rows_[f].dim(0), rows_[f].row_bytes(), own[0], own[1],
                           own[2],                    own[3],  own[4]};
      if (orders_[f]) feature.order = orders_[f]->as<const int32_t>("order", feature.num_rows, f);
      if (feature.form < 0 || feature.form >= kNumForms || feature.dim < 1 || feature.dim > (int64_t{1} << 24) ||
          feature.row_bytes != bytes_of_row(feature.form, feature.dim))
        refuse("feature " + std::to_string(f) + ": rows of form " + std::to_string(feature.form) + " and width " +
               std::to_string(feature.dim) + " do not have " + std::to_string(feature.row_bytes) + " bytes");
      if (feature.column < -1 || (feature.is_pooled() && feature.column > width - feature.dim) ||
          feature.max_length < 0)
        refuse("feature " + std::to_string(f) + ": its vector does not fit into " + std::to_string(width) + " columns");
      features.push_back(feature);
    }
  }

  const int64_t width;
  std::vector<TableFeature> features;

 private:
  std::vector<Input> rows_;
  std::vector<OptionalInput> orders_;
};

template <int64_t kForm>
RECMILL_INLINE bool add_rows(const TableFeature& feature, const int64_t* ids, int64_t begin, int64_t end, int64_t last,
                             float* sum) {
  bool good = true;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < last) {
      const int64_t next = feature.place(ids[i + kAhead]);
      if (next >= 0) __builtin_prefetch(feature.rows + next * feature.row_bytes);
    }
    const int64_t place = feature.place(ids[i]);
    if (place >= 0) add_row<kForm>(feature.rows + place * feature.row_bytes, feature.dim, sum);
    good &= place >= 0;
  }
  return good;
}

// Lists [first, last) of a feature; `step` floats lie between the vectors of two lists.
template <int64_t kForm>
RECMILL_INLINE bool pool_lists(const TableFeature& feature, const int64_t* ids, const int64_t* offsets, int64_t first,
                               int64_t last, float* out, int64_t step) {
  bool good = true;
  for (int64_t list = first; list < last; ++list) {
    float* sum = out + list * step;
    std::fill(sum, sum + feature.dim, 0.0f);
    int64_t begin = offsets[list];
    const int64_t end = offsets[list + 1];
    if (feature.max_length && end - begin > feature.max_length) begin = end - feature.max_length;
    good &= add_rows<kForm>(feature, ids, begin, end, offsets[last], sum);
    if (feature.is_mean && end - begin > 1)
      for (int64_t i = 0; i < feature.dim; ++i) sum[i] /= static_cast<float>(end - begin);
  }
  return good;
}

template <int64_t kForm>
RECMILL_INLINE bool copy_rows(const TableFeature& feature, const int64_t* ids, int64_t first, int64_t last,
                              float* out) {
  bool good = true;
  for (int64_t i = first; i < last; ++i) {
    float* sum = out + i * feature.dim;
    std::fill(sum, sum + feature.dim, 0.0f);
    good &= add_rows<kForm>(feature, ids, i, i + 1, last, sum);
  }
  return good;
}

struct Task {
  const TableFeature& feature;
  const int64_t* ids;
  const int64_t* offsets;
  int64_t num_values;
  float* out;
};

template <int64_t kForm>
RECMILL_INLINE bool run_part(const Task& task, int64_t num_lists, int64_t step, int64_t part, int64_t parts) {
  const int64_t count = task.feature.is_pooled() ? num_lists : task.num_values;
  const int64_t first = count * part / parts, last = count * (part + 1) / parts;
  if (task.feature.is_pooled())
    return pool_lists<kForm>(task.feature, task.ids, task.offsets, first, last, task.out, step);
  return copy_rows<kForm>(task.feature, task.ids, first, last, task.out);
}

bool run_part(const Task& task, int64_t num_lists, int64_t step, int64_t part, int64_t parts) {
  bool good = true;
  run_fma([&]() RECMILL_BODY {
    switch (task.feature.form) {
      case kFloat32: good = run_part<kFloat32>(task, num_lists, step, part, parts); break;
      case kBf16: good = run_part<kBf16>(task, num_lists, step, part, parts); break;
      case kInt8: good = run_part<kInt8>(task, num_lists, step, part, parts); break;
      default: good = run_part<kInt4>(task, num_lists, step, part, parts);
    }
  });
  return good;
}

// A list ends where the next begins, the first begins at 0, and all ids are rows of the table.
void check_lists(const TableFeature& feature, const Lists& lists, int64_t num_lists, int64_t f) {
  check_offsets(lists, num_lists, f);
  if (lists.offsets[0] != 0 || lists.offsets[num_lists] != lists.num_values)
    refuse("offsets of feature " + std::to_string(f) + ": expected them to rise from 0 to " +
           std::to_string(lists.num_values));
  const auto* ids = reinterpret_cast<const int64_t*>(lists.values);
  if (!are_rows(ids, 0, lists.num_values, feature.num_rows))
    refuse("feature " + std::to_string(f) + ": expected ids in [0, " + std::to_string(feature.num_rows) + ")");
}

// Writes the vectors of `num_lists` lists per feature to their columns of `out`, and the rows of features that are not
// pooled to `rows`, one array for each of them.
void pool_tables(const PooledTables& tables, const std::vector<Input>& values, const std::vector<Input>& offsets,
                 int64_t num_lists, const Output& out, const std::vector<Output>& rows) {
  if (values.size() != tables.features.size() || offsets.size() != values.size() || num_lists < 0)
    refuse("received " + std::to_string(values.size()) + " features, expected " +
           std::to_string(tables.features.size()));
  float* vectors = out.as<float>("out", num_lists * tables.width);
  std::vector<Task> tasks;
  tasks.reserve(values.size());
  int64_t work = 0;
  size_t num_unpooled = 0;
  for (size_t f = 0; f < values.size(); ++f) {
    const TableFeature& feature = tables.features[f];
    const auto position = static_cast<int64_t>(f);
    const int64_t* ids = values[f].as<const int64_t>("values", Input::kAnySize, position);
    const int64_t num_values = values[f].num_items();
    if (values[f].ndim() != 1 || offsets[f].ndim() != 1)
      refuse("feature " + std::to_string(f) + ": expected values and offsets of one dimension");
    const int64_t* own = offsets[f].as<const int64_t>("offsets", num_lists + 1, position);
    check_lists(feature, {reinterpret_cast<const char*>(ids), 8, num_values, own}, num_lists, position);
    float* to = nullptr;
    if (feature.is_pooled()) {
      to = vectors + feature.column;
    } else {
      if (num_unpooled == rows.size()) refuse("expected an array of rows per feature that is not pooled");
      to = rows[num_unpooled++].as<float>("rows", num_values * feature.dim, position);
    }
    tasks.push_back({feature, ids, own, num_values, to});
    work += num_values * feature.dim;
  }
  if (num_unpooled != rows.size()) refuse("expected an array of rows per feature that is not pooled");
  const int threads = choose_threads(work, kWorkPerThread);
  bool good = true;
  if (threads == 1) {
    for (const Task& task : tasks) good &= run_part(task, num_lists, tables.width, 0, 1);
  } else {
#pragma omp parallel for num_threads(threads) schedule(static) reduction(& : good)
    for (int part = 0; part < threads; ++part)
      for (const Task& task : tasks) good &= run_part(task, num_lists, tables.width, part, threads);
  }
  if (!good) refuse("the order of a table names a row that it does not have");
}

}  // namespace

void bind_pool_tables(nb::module_& m) {
  nb::class_<PooledTables>(m, "PooledTables")
      .def(nb::init<std::vector<Input>, std::vector<OptionalInput>, const Input&, int64_t>());
  add_function(m, "pool_tables", &pool_tables);
}

}  // namespace recmill

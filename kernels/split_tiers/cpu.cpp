// Which tier of a table a row lives in, and where there; and the distinct keys of a batch in ascending order.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"

namespace nb = nanobind;

namespace recmill {
namespace {

constexpr int64_t kIdsPerThread = 64 * 1024;
constexpr int64_t kBlock = 1024;
constexpr int kTierBits = 3;  // a moved row is stored as slot << 3 | tier

template <typename Id>
struct TierMap {
  const uint64_t* bits;   // bit r % 64 of word r / 64: row r is not in the common tier
  const int32_t* ranks;   // such rows before each word
  const int64_t* moved;   // slot << 3 | tier of each of them, in row order
  int64_t num_rows;
  int64_t common_tier;

  // Both outcomes are computed and a mask chooses: whether a row is hot is a coin toss for the branch predictor, and
  // written with ?: the compiler branches. Without moved rows there is one harmless entry to read.
  __attribute__((always_inline)) void split(Id id, uint8_t& tier, int64_t& slot) const {
    const uint64_t row = static_cast<uint64_t>(id);
    const uint64_t word = bits[row >> 6];
    const int64_t below = ranks[row >> 6] + __builtin_popcountll(word & ((1ull << (row & 63)) - 1));
    const int64_t is_moved = -static_cast<int64_t>((word >> (row & 63)) & 1);  // all bits or none
    const int64_t entry = moved[below & is_moved];
    tier = static_cast<uint8_t>((entry & ((1 << kTierBits) - 1) & is_moved) | (common_tier & ~is_moved));
    slot = ((entry >> kTierBits) & is_moved) | ((static_cast<int64_t>(row) - below) & ~is_moved);
  }

  bool holds(const Id* ids, int64_t begin, int64_t end) const {
    bool good = true;
    for (int64_t i = begin; i < end; ++i) good &= static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(num_rows);
    return good;
  }
};

template <typename Id>
void split_block(const TierMap<Id>& map, const Id* ids, int64_t begin, int64_t end, uint8_t* tiers, int64_t* slots) {
  for (int64_t i = begin; i < end; ++i) map.split(ids[i], tiers[i], slots[i]);
}

#if defined(__x86_64__)
// The same with the popcnt instruction, which the baseline of x86-64 lacks.
template <typename Id>
__attribute__((target("popcnt"))) void split_block_popcnt(const TierMap<Id>& map, const Id* ids, int64_t begin,
                                                          int64_t end, uint8_t* tiers, int64_t* slots) {
  for (int64_t i = begin; i < end; ++i) map.split(ids[i], tiers[i], slots[i]);
}
#endif

template <typename Id>
void split_tiers(Address ids_address, int64_t num_ids, Address bits, Address ranks, Address moved, int64_t num_rows,
                 int64_t common_tier, Address tiers_address, Address slots_address, int num_threads) {
  const Id* ids = pointer<const Id>(ids_address);
  const TierMap<Id> map{pointer<const uint64_t>(bits), pointer<const int32_t>(ranks), pointer<const int64_t>(moved),
                        num_rows, common_tier};
  uint8_t* tiers = pointer<uint8_t>(tiers_address);
  int64_t* slots = pointer<int64_t>(slots_address);
  auto split = split_block<Id>;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("popcnt")) split = split_block_popcnt<Id>;
#endif
  FirstError error;
  const int threads = choose_threads(num_threads, num_ids, kIdsPerThread);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < (num_ids + kBlock - 1) / kBlock; ++block) {
    const int64_t begin = block * kBlock, end = std::min(num_ids, begin + kBlock);
    if (map.holds(ids, begin, end)) {
      split(map, ids, begin, end, tiers, slots);
      continue;
    }
    for (int64_t i = begin; i < end; ++i)
      if (!map.holds(ids, i, i + 1)) {
        error.report(i);
        break;
      }
  }
  if (error.found())
    throw std::invalid_argument("ids[" + std::to_string(error.position()) + "] is " +
                                std::to_string(ids[error.position()]) + ", expected a row in [0, " +
                                std::to_string(num_rows) + ")");
}

struct Entry {
  int64_t key;
  int64_t position;
};

// Least significant digit first, stable; as many passes as the bound has digits (3 for a billion rows).
constexpr int kDigitBits = 11;
constexpr int64_t kDigits = 1 << kDigitBits;

void sort_entries(std::vector<Entry>& entries, int64_t bound) {
  std::vector<Entry> other(entries.size());
  for (int shift = 0; shift < 63 && (bound - 1) >> shift; shift += kDigitBits) {
    std::vector<int64_t> starts(kDigits + 1, 0);
    for (const Entry& entry : entries) ++starts[((entry.key >> shift) & (kDigits - 1)) + 1];
    for (int64_t digit = 0; digit < kDigits; ++digit) starts[digit + 1] += starts[digit];
    for (const Entry& entry : entries) other[starts[(entry.key >> shift) & (kDigits - 1)]++] = entry;
    entries.swap(other);
  }
}

int64_t distinct_keys(Address keys_address, int64_t num_keys, int64_t bound, Address distinct_address,
                      Address inverse_address) {
  const int64_t* keys = pointer<const int64_t>(keys_address);
  int64_t* distinct = pointer<int64_t>(distinct_address);
  int64_t* inverse = pointer<int64_t>(inverse_address);
  std::vector<Entry> entries(num_keys);
  for (int64_t i = 0; i < num_keys; ++i) {
    if (static_cast<uint64_t>(keys[i]) >= static_cast<uint64_t>(bound))
      throw std::invalid_argument("keys[" + std::to_string(i) + "] is " + std::to_string(keys[i]) +
                                  ", expected one in [0, " + std::to_string(bound) + ")");
    entries[i] = {keys[i], i};
  }
  sort_entries(entries, bound);
  int64_t count = 0;
  for (const Entry& entry : entries) {
    if (count == 0 || distinct[count - 1] != entry.key) distinct[count++] = entry.key;
    inverse[entry.position] = count - 1;
  }
  return count;
}

}  // namespace

void bind_split_tiers(nb::module_& m) {
  m.def("split_tiers_int64", &split_tiers<int64_t>, nb::call_guard<nb::gil_scoped_release>());
  m.def("split_tiers_int32", &split_tiers<int32_t>, nb::call_guard<nb::gil_scoped_release>());
  m.def("distinct_keys", &distinct_keys, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

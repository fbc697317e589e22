// The tier of a table that holds a row, and its slot there; and the distinct keys of a batch in ascending order.
#include "jagged.h"

namespace recmill {
namespace {

constexpr int64_t kIdsPerThread = 64 * 1024;
constexpr int64_t kBlock = 1024;
constexpr int kTierBits = 3;  // a moved row is stored as slot << 3 | tier

template <typename Id>
struct TierMap {
  const uint64_t* bits;   // bit r % 64 of word r / 64: row r is not in the common tier
  const int32_t* ranks;   // number of such rows before each word
  const int64_t* moved;   // slot << 3 | tier of each such row, in row order
  int64_t num_rows, common_tier;

  // Both outcomes are computed and a mask selects one: the branch predictor cannot know whether a row is hot, and with ?:
  // the compiler branches. Without moved rows there is one unused entry to read.
  RECMILL_BODY void split(Id id, uint8_t& tier, int64_t& slot) const {
    const uint64_t row = static_cast<uint64_t>(id);
    const uint64_t word = bits[row >> 6];
    const int64_t below = ranks[row >> 6] + __builtin_popcountll(word & ((1ull << (row & 63)) - 1));
    const int64_t is_moved = -static_cast<int64_t>((word >> (row & 63)) & 1);  // all bits or none
    const int64_t entry = moved[below & is_moved];
    tier = static_cast<uint8_t>((entry & ((1 << kTierBits) - 1) & is_moved) | (common_tier & ~is_moved));
    slot = ((entry >> kTierBits) & is_moved) | ((static_cast<int64_t>(row) - below) & ~is_moved);
  }
};

template <typename Id>
void split_ids(const TierMap<Id>& map, const Id* ids, int64_t num_ids, uint8_t* tiers, int64_t* slots) {
  bool is_good = true;
#pragma omp parallel for num_threads(choose_threads(num_ids, kIdsPerThread)) schedule(static) reduction(& : is_good)
  for (int64_t begin = 0; begin < num_ids; begin += kBlock) {
    const int64_t end = std::min(num_ids, begin + kBlock);
    const bool are_inside = are_rows(ids, begin, end, map.num_rows);
    is_good &= are_inside;
    if (are_inside)
      run_avx2([&]() RECMILL_BODY {  // for the popcnt instruction
        for (int64_t i = begin; i < end; ++i) map.split(ids[i], tiers[i], slots[i]);
      });
  }
  if (!is_good) check_rows("ids", ids, num_ids, map.num_rows);  // names the first one
}

// `moved` has at least one entry.
void split_tiers(const Input& ids, const Input& bits, const Input& ranks, const Input& moved, int64_t num_rows,
                 int64_t common_tier, const Output& tiers, const Output& slots) {
  const int64_t num_ids = ids.num_items();
  if (moved.num_items() < 1) refuse("moved: expected at least one entry");
  if (num_rows < 0 || num_rows > INT64_MAX - 63) refuse("num_rows is " + std::to_string(num_rows));
  const int64_t num_words = (num_rows + 63) / 64;
  ids.with_dtype<int64_t, int32_t>("ids", [&](auto id) {
    using Id = decltype(id);
    const TierMap<Id> map{reinterpret_cast<const uint64_t*>(bits.as<const int64_t>("bits", num_words)),
                          ranks.as<const int32_t>("ranks", num_words), moved.as<const int64_t>("moved"),
                          num_rows, common_tier};
    split_ids(map, ids.as<const Id>("ids"), num_ids, tiers.as<uint8_t>("tiers", num_ids),
              slots.as<int64_t>("slots", num_ids));
  });
}

struct Entry {
  int64_t key;
  int64_t position;
};

// A stable radix sort, least significant digit first, with as many passes as the bound has digits (3 for a billion rows).
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

// Returns the number of distinct keys.
int64_t distinct_keys(const Input& all_keys, int64_t bound, const Output& distinct_out, const Output& inverse_out) {
  const int64_t num_keys = all_keys.num_items();
  const int64_t* keys = all_keys.as<const int64_t>("keys");
  int64_t* distinct = distinct_out.as<int64_t>("distinct", num_keys);
  int64_t* inverse = inverse_out.as<int64_t>("inverse", num_keys);
  check_rows("keys", keys, num_keys, bound);
  if (num_keys == 0) return 0;
  std::vector<Entry> entries(num_keys);
  for (int64_t i = 0; i < num_keys; ++i) entries[i] = {keys[i], i};
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
  add_function(m, "split_tiers", &split_tiers);
  add_function(m, "distinct_keys", &distinct_keys);
}

}  // namespace recmill

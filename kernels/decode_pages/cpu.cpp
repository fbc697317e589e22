// Column chunks of a Parquet row group as Arrow's buffers: values, and offsets of lists. One call per row group that
// holds no GIL and uses one thread.
//
// Every read of a page is bounds-checked (pages.h): files may be damaged. Pages are copied or decompressed into scratch
// memory with 16 spare bytes behind them, so that loads of 8 bytes stay inside.
#include <zstd.h>

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "decode_pages/pages.h"
#include "decode_pages/values.h"

namespace recmill {
namespace {

// One row of the matrix that kernels/decode_pages/__init__.py passes, int64 each.
struct Column {
  int64_t begin, size;           // the chunk's bytes in `data`
  int64_t num_levels, num_rows;  // values plus empty lists; lists, or values of a flat column
  int64_t stored_bytes, item_bytes;          // per value in the file and in memory, 0 for bits
  int64_t max_definition, empty_definition;  // levels of a value and of an empty list; other levels are missing values
  int64_t is_list, is_compressed;
  int64_t piece, values_at, offsets_at;  // which output holds the column, and where in it
  int64_t bound;                         // of ids that are kept in 4 instead of 8 bytes
};

struct Target {
  uint8_t* values;   // room for num_levels values
  int32_t* offsets;  // of a list column: room for num_rows + 1
};

struct Buffers {
  Scratch page, dictionary, levels, wide;
  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> zstd{ZSTD_createDCtx(), &ZSTD_freeDCtx};
};

int bit_width(int64_t most) { return most == 0 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(most)); }

template <typename Number>
void unpack(const Run& run, int width, Number* out) {
  const uint64_t mask = (uint64_t{1} << width) - 1;
  for (int64_t i = 0, bit = 0; i < run.count; ++i, bit += width)
    out[i] = static_cast<Number>((load(run.bits + (bit >> 3)) >> (bit & 7)) & mask);
}

void unpack_levels(Cursor in, int width, int64_t count, uint8_t* out) {
  while (count > 0) {
    const Run run = next_run(in, width, count);
    if (run.bits) unpack(run, width, out);
    else std::memset(out, static_cast<int>(run.value), run.count);
    out += run.count;
    count -= run.count;
  }
}

bool are_all(Cursor in, int width, int64_t count, uint32_t level) {
  while (count > 0) {
    const Run run = next_run(in, width, count);
    if (run.bits || run.value != level) return false;
    count -= run.count;
  }
  return true;
}

// Turns the levels of consecutive pages into offsets.
class Rows {
 public:
  Rows(int32_t* offsets, int64_t num_rows) : offsets_(offsets), num_rows_(num_rows) {}

  void add(int64_t value) {
    expect(row_ < num_rows_);
    offsets_[row_++] = static_cast<int32_t>(value);
  }
  // For pages in which every level is a value: a row begins where the repetition level is 0.
  void add_runs(Cursor in, int64_t count, int64_t value) {
    while (count > 0) {
      const Run run = next_run(in, 1, count);
      if (run.bits) {
        add_bits(run, value);
      } else if (run.value == 0) {
        for (int64_t i = 0; i < run.count; ++i) add(value + i);
      }
      value += run.count;
      count -= run.count;
    }
  }
  bool are_complete() const { return row_ == num_rows_ && (row_ == 0 || offsets_[0] == 0); }

 private:
  void add_bits(const Run& run, int64_t value) {
    for (int64_t i = 0; i < run.count; i += 64) {
      uint64_t begins = ~load(run.bits + (i >> 3));
      if (run.count - i < 64) begins &= (uint64_t{1} << (run.count - i)) - 1;
      expect(__builtin_popcountll(begins) <= num_rows_ - row_);
      for (; begins; begins &= begins - 1)
        offsets_[row_++] = static_cast<int32_t>(value + i + __builtin_ctzll(begins));
    }
  }

  int32_t* offsets_;
  int64_t num_rows_, row_ = 0;
};

template <typename Stored, typename Value>
class Chunk {
 public:
  static constexpr bool kIsNarrow = sizeof(Stored) == 8 && sizeof(Value) == 4;

  Chunk(const Column& column, const uint8_t* data, const Target& target, Buffers& buffers)
      : column_(column), target_(target), in_{data + column.begin, data + column.begin + column.size},
        buffers_(buffers), rows_(target.offsets, column.num_rows) {}

  // Returns the number of values.
  int64_t decode() {
    while (num_levels_ < column_.num_levels) {
      const PageHeader page = read_header(in_);
      Cursor body = open(page);
      if (page.type == kDictionaryPage) take_dictionary(page, body);
      else take_page(page, body);
    }
    if (column_.is_list) {
      expect(rows_.are_complete() && (column_.num_rows > 0 || num_values_ == 0));
      target_.offsets[column_.num_rows] = static_cast<int32_t>(num_values_);
    }
    return num_values_;
  }

 private:
  // The page in scratch memory, decompressed.
  Cursor open(const PageHeader& page) {
    expect(page.size <= 1024 + 2 * column_.num_levels * (column_.stored_bytes + 4));  // no page of these values is larger
    const Cursor stored = in_.take(page.stored_size);
    uint8_t* bytes = buffers_.page.get(page.size);
    if (column_.is_compressed) {
      const size_t size = static_cast<size_t>(page.size);  // zstd reports an error as a size that no page has
      expect(ZSTD_decompressDCtx(buffers_.zstd.get(), bytes, size, stored.at, stored.left()) == size);
    } else {
      expect(page.size == page.stored_size);
      std::memcpy(bytes, stored.at, page.size);
    }
    return {bytes, bytes + page.size};
  }

  void take_dictionary(const PageHeader& page, Cursor body) {
    expect(page.encoding == kPlain || page.encoding == kPlainDictionary);
    num_distinct_ = page.num_values;
    expect(num_distinct_ * static_cast<int64_t>(sizeof(Stored)) <= body.left());
    // As many entries as an index of this bit width can address, so that a bad index reads no other memory. It is
    // detected after the loop.
    num_entries_ = int64_t{1} << bit_width(std::max<int64_t>(1, num_distinct_ - 1));
    auto* entries = reinterpret_cast<Value*>(buffers_.dictionary.get(num_entries_ * sizeof(Value)));
    if constexpr (kIsNarrow) narrow(body.take(8 * num_distinct_).at, num_distinct_, column_.bound, entries);
    else take_plain<Stored>(body, num_distinct_, entries);
    std::fill(entries + num_distinct_, entries + num_entries_, Value{0});
    dictionary_ = entries;
  }

  void take_page(const PageHeader& page, Cursor body) {
    const int64_t count = page.num_values;
    expect(count <= column_.num_levels - num_levels_);
    expect(page.definition_encoding == kRuns && page.repetition_encoding == kRuns);
    Cursor repetition{nullptr, nullptr}, definition{nullptr, nullptr};
    if (column_.is_list) repetition = take_levels(body);
    if (column_.max_definition) definition = take_levels(body);
    const int width = bit_width(column_.max_definition);
    int64_t num_new = count;
    if (!column_.max_definition || are_all(definition, width, count, column_.max_definition)) {
      if (column_.is_list) rows_.add_runs(repetition, count, num_values_);
    } else {
      num_new = add_levels(repetition, definition, width, count);
    }
    take_values(page.encoding, body, num_new);
    num_values_ += num_new;
    num_levels_ += count;
  }

  static Cursor take_levels(Cursor& body) {
    uint32_t num_bytes;
    std::memcpy(&num_bytes, body.take(4).at, 4);
    return body.take(num_bytes);
  }

  // For pages with empty lists. Missing values are left to Arrow. Returns the number of values.
  int64_t add_levels(Cursor repetition, Cursor definition, int width, int64_t count) {
    uint8_t* repeated = buffers_.levels.get(2 * count);
    uint8_t* defined = repeated + count;
    unpack_levels(definition, width, count, defined);
    if (column_.is_list) unpack_levels(repetition, 1, count, repeated);
    int64_t num_new = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (column_.is_list && repeated[i] == 0) rows_.add(num_values_ + num_new);
      if (defined[i] == column_.max_definition) ++num_new;
      else expect(column_.is_list && defined[i] == column_.empty_definition && repeated[i] == 0);
    }
    return num_new;
  }

  void take_values(int64_t encoding, Cursor body, int64_t count) {
    if (column_.stored_bytes == 0) {
      expect(encoding == kPlain);
      return take_bits(body, count, target_.values, num_values_);
    }
    Value* out = reinterpret_cast<Value*>(target_.values) + num_values_;
    if (encoding == kDictionary || encoding == kPlainDictionary) return take_indices(body, count, out);
    if constexpr (kIsNarrow) {
      uint8_t* wide = buffers_.wide.get(8 * count);
      take_numbers(encoding, body, count, reinterpret_cast<uint64_t*>(wide));
      narrow(wide, count, column_.bound, out);
    } else {
      take_numbers(encoding, body, count, out);
    }
  }

  template <typename Number>
  static void take_numbers(int64_t encoding, Cursor body, int64_t count, Number* out) {
    if (encoding == kPlain) take_plain<Stored>(body, count, out);
    else if (encoding == kByteStreamSplit) take_split<Stored>(body, count, out);
    else if (encoding == kDelta) take_deltas<Stored>(body, count, out);
    else throw NotForUs{};
  }

  void take_indices(Cursor in, int64_t count, Value* out) {
    if (count == 0) return;
    const int width = in.byte();
    expect(dictionary_ && width < 32 && (int64_t{1} << width) <= num_entries_);
    uint64_t most = 0;
    while (count > 0) {
      const Run run = next_run(in, width, count);
      if (run.bits) {
        most = std::max(most, look_up(run, width, out));
      } else {
        expect(run.value < num_distinct_);
        std::fill(out, out + run.count, dictionary_[run.value]);
      }
      out += run.count;
      count -= run.count;
    }
    expect(most < static_cast<uint64_t>(num_distinct_));
  }

  // Returns the highest index.
  uint64_t look_up(const Run& run, int width, Value* out) const {
    const uint64_t mask = (uint64_t{1} << width) - 1;
    const Value* dictionary = dictionary_;
    uint64_t most = 0;
    for (int64_t i = 0, bit = 0; i < run.count; ++i, bit += width) {
      const uint64_t index = (load(run.bits + (bit >> 3)) >> (bit & 7)) & mask;
      most = std::max(most, index);
      out[i] = dictionary[index];
    }
    return most;
  }

  const Column& column_;
  const Target target_;
  Cursor in_;
  Buffers& buffers_;
  Rows rows_;
  const Value* dictionary_ = nullptr;
  int64_t num_distinct_ = 0, num_entries_ = 0, num_values_ = 0, num_levels_ = 0;
};

// Where the column's results go; the output must have room for all of them.
Target find_target(const Column& column, const std::vector<Output>& pieces) {
  expect(column.piece >= 0 && column.piece < static_cast<int64_t>(pieces.size()));
  const Output& piece = pieces[column.piece];
  const int64_t room = static_cast<int64_t>(piece.nbytes()), num_bits = 8 * column.item_bytes + (column.item_bytes == 0);
  expect(column.values_at >= 0 && column.values_at % 8 == 0 && column.offsets_at % 8 == 0);
  expect(column.values_at <= column.offsets_at && column.offsets_at <= room);
  expect((column.num_levels * num_bits + 7) / 8 <= column.offsets_at - column.values_at);
  expect(!column.is_list || 4 * (column.num_rows + 1) <= room - column.offsets_at);
  auto* memory = reinterpret_cast<uint8_t*>(piece.bytes("pieces"));
  return {memory + column.values_at, reinterpret_cast<int32_t*>(memory + column.offsets_at)};
}

int64_t decode_column(const Column& column, const Input& data, const std::vector<Output>& pieces, Buffers& buffers) {
  try {
    const int64_t num_bytes = static_cast<int64_t>(data.nbytes()), most = int64_t{1} << 31;
    expect(column.begin >= 0 && column.begin <= num_bytes);
    expect(column.size >= 0 && column.size <= num_bytes - column.begin);
    expect(column.num_levels >= 0 && column.num_levels < most && column.num_rows >= 0 && column.num_rows < most);
    expect(column.is_list || column.num_levels == column.num_rows);
    const Target target = find_target(column, pieces);
    const auto* bytes = reinterpret_cast<const uint8_t*>(data.bytes("data"));
    if (column.stored_bytes == 8 && column.item_bytes == 8)
      return Chunk<uint64_t, uint64_t>(column, bytes, target, buffers).decode();
    if (column.stored_bytes == 8 && column.item_bytes == 4)
      return Chunk<uint64_t, uint32_t>(column, bytes, target, buffers).decode();
    expect(column.stored_bytes == 4 || (column.stored_bytes == 0 && column.item_bytes == 0));
    if (column.item_bytes == 2) return Chunk<uint32_t, uint16_t>(column, bytes, target, buffers).decode();
    if (column.item_bytes <= 1) return Chunk<uint32_t, uint8_t>(column, bytes, target, buffers).decode();
    expect(column.item_bytes == 4);
    return Chunk<uint32_t, uint32_t>(column, bytes, target, buffers).decode();
  } catch (const NotForUs&) {
    return -1;
  }
}

// Fills `counts` with the number of values per column, or -1 where Arrow has to read the column.
void decode_pages(const Input& data, const Input& columns, const std::vector<Output>& pieces, const Output& counts) {
  thread_local Buffers buffers;
  const int64_t num_columns = counts.num_items(), num_fields = sizeof(Column) / sizeof(int64_t);
  const auto* described =
      reinterpret_cast<const Column*>(columns.as<const int64_t>("columns", num_columns * num_fields));
  for (int64_t i = 0; i < num_columns; ++i)
    counts.as<int64_t>("counts")[i] = decode_column(described[i], data, pieces, buffers);
  buffers.page.trim();
  buffers.dictionary.trim();
  buffers.levels.trim();
  buffers.wide.trim();
}

// Writes columns of float32, which begin at `places` of the piece, side by side; a value that is NaN becomes 0, or counts
// as infinite with `keeps_missing`. Returns the first column with an infinite value, or -1.
int64_t stack_columns(const Input& piece, const Input& places, const Output& stacked, bool keeps_missing) {
  const int64_t num_columns = places.num_items(), num_rows = num_columns ? stacked.num_items() / num_columns : 0;
  const auto* begins = places.as<const int64_t>("places");
  float* out = stacked.as<float>("stacked", num_columns * num_rows);
  const char* memory = piece.bytes("piece");
  int64_t found = -1;
  for (int64_t c = num_columns - 1; c >= 0; --c) {
    const int64_t room = static_cast<int64_t>(piece.nbytes()) - begins[c];
    if (begins[c] < 0 || begins[c] % 4 != 0 || room < 4 * num_rows) refuse("column " + std::to_string(c) + ": no such place");
    const auto* column = reinterpret_cast<const float*>(memory + begins[c]);
    bool has_infinite = false;
    for (int64_t row = 0; row < num_rows; ++row) {
      const float value = column[row];
      has_infinite |= keeps_missing ? !std::isfinite(value) : std::isinf(value);
      out[row * num_columns + c] = std::isnan(value) && !keeps_missing ? 0.0F : value;
    }
    if (has_infinite) found = c;
  }
  return found;
}

}  // namespace

void bind_decode_pages(nb::module_& m) {
  add_function(m, "decode_pages", &decode_pages);
  add_function(m, "stack_columns", &stack_columns);
}

}  // namespace recmill

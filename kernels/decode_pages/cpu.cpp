// Column chunks of a Parquet row group as Arrow's buffers: values, and offsets of lists. One call per row group that
// holds no GIL and uses one thread.
//
// Every read of a page is bounds-checked (pages.h): files may be damaged. Pages are copied or decompressed into scratch
// memory with 16 spare bytes behind them, so that loads of 8 bytes stay inside.
#include <zstd.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>

#include "arrays.h"
#include "decode_pages/pages.h"

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
};

struct Target {
  uint8_t* values;   // room for num_levels values
  int32_t* offsets;  // of a list column: room for num_rows + 1
};

struct Buffers {
  Scratch page, dictionary, levels;
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

// Values that are narrower in memory than in the file (int8, say) lose their upper bytes.
template <typename Stored, typename Value>
void take_plain(Cursor in, int64_t count, Value* out) {
  const uint8_t* stored = in.take(count * static_cast<int64_t>(sizeof(Stored))).at;
  if constexpr (sizeof(Stored) == sizeof(Value)) {
    std::memcpy(out, stored, count * sizeof(Value));
  } else {
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + i, stored + i * sizeof(Stored), sizeof(Value));
  }
}

// BYTE_STREAM_SPLIT: first byte 0 of all values, then byte 1 of all values, and so on.
template <typename Stored, typename Value>
void take_split(Cursor in, int64_t count, Value* out) {
  constexpr int kBytes = sizeof(Value);
  expect(in.left() == count * static_cast<int64_t>(sizeof(Stored)));
  const uint8_t* planes = in.at;
  int64_t i = 0;
#ifdef __SSE2__
  for (; i + 16 <= count; i += 16) {
    // Interleave byte b with byte b + kBytes / 2 of 16 values until the bytes of each value are together.
    __m128i from[kBytes], to[kBytes];
    for (int b = 0; b < kBytes; ++b)
      from[b] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes + b * count + i));
    for (int step = 1; step < kBytes; step *= 2) {
      for (int b = 0; b < kBytes / 2; ++b) {
        to[2 * b] = _mm_unpacklo_epi8(from[b], from[b + kBytes / 2]);
        to[2 * b + 1] = _mm_unpackhi_epi8(from[b], from[b + kBytes / 2]);
      }
      std::copy(to, to + kBytes, from);
    }
    for (int b = 0; b < kBytes; ++b) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i) + b, from[b]);
  }
#endif
  for (; i < count; ++i) {
    Value value = 0;
    for (int b = 0; b < kBytes; ++b) value |= static_cast<Value>(planes[b * count + i]) << (8 * b);
    out[i] = value;
  }
}

// DELTA_BINARY_PACKED: differences between neighbours minus the smallest of their block, bit-packed part by part.
template <typename Stored, typename Value>
void take_deltas(Cursor in, int64_t count, Value* out) {
  const uint64_t block = in.varint(), num_parts = in.varint(), total = in.varint();
  expect(num_parts > 0 && num_parts <= block && block <= (uint64_t{1} << 20));  // before 8 * num_parts may overflow
  expect(block % (8 * num_parts) == 0 && total == static_cast<uint64_t>(count));
  const int64_t part = static_cast<int64_t>(block / num_parts);
  auto value = static_cast<Stored>(in.zigzag());
  if (count > 0) out[0] = static_cast<Value>(value);
  for (int64_t i = 1; i < count;) {
    const auto least = static_cast<Stored>(in.zigzag());
    const uint8_t* widths = in.take(static_cast<int64_t>(num_parts)).at;
    for (uint64_t p = 0; p < num_parts && i < count; ++p) {
      const int width = widths[p];
      expect(width <= 56);  // so that a difference fits into one load of 8 bytes at any bit position
      const uint8_t* bits = in.take(part / 8 * width).at;
      const uint64_t mask = (uint64_t{1} << width) - 1;
      const int64_t stop = std::min(count, i + part);
      for (int64_t bit = 0; i < stop; ++i, bit += width) {
        value += least + static_cast<Stored>((load(bits + (bit >> 3)) >> (bit & 7)) & mask);
        out[i] = static_cast<Value>(value);
      }
    }
  }
}

// Appends bits at bit `first`: pages need not end on a whole byte.
void take_bits(Cursor in, int64_t count, uint8_t* out, int64_t first) {
  const uint8_t* bits = in.take((count + 7) / 8).at;
  if (first % 8 == 0) {
    std::memcpy(out + first / 8, bits, (count + 7) / 8);
    return;
  }
  for (int64_t i = 0; i < count; ++i, ++first) {
    const int shift = first % 8, bit = bits[i / 8] >> (i % 8) & 1;
    out[first / 8] = static_cast<uint8_t>((shift ? out[first / 8] & ((1 << shift) - 1) : 0) | bit << shift);
  }
}

template <typename Stored, typename Value>
class Chunk {
 public:
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
    take_plain<Stored>(body, num_distinct_, entries);
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
    if (encoding == kPlain) take_plain<Stored>(body, count, out);
    else if (encoding == kByteStreamSplit) take_split<Stored>(body, count, out);
    else if (encoding == kDelta) take_deltas<Stored>(body, count, out);
    else if (encoding == kDictionary || encoding == kPlainDictionary) take_indices(body, count, out);
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
}

}  // namespace

void bind_decode_pages(nb::module_& m) { add_function(m, "decode_pages", &decode_pages); }

}  // namespace recmill

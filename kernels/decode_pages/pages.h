// Reading Parquet's column chunks: page headers (Thrift's compact protocol), and runs of levels and indices.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace recmill {

// Thrown where a column is damaged or encoded in a way this reader does not know. Arrow then reads that column, and
// reports the damage.
struct NotForUs {};

inline void expect(bool holds) {
  if (!holds) throw NotForUs{};
}

// Bytes that are read from the front, never beyond their end.
struct Cursor {
  const uint8_t* at;
  const uint8_t* end;

  int64_t left() const { return end - at; }
  uint8_t byte() {
    expect(at < end);
    return *at++;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint64_t next = byte();
      value |= (next & 127) << shift;
      if (next < 128) return value;
    }
    throw NotForUs{};
  }
  int64_t zigzag() {
    const uint64_t value = varint();
    return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
  }
  Cursor take(int64_t num_bytes) {
    expect(num_bytes >= 0 && num_bytes <= left());
    at += num_bytes;
    return {at - num_bytes, at};
  }
};

enum Wire { kTrue = 1, kFalse = 2, kByte = 3, kInt64 = 6, kDouble = 7, kBinary = 8, kStruct = 12 };

// Calls visit(field, type) for each field of a struct; visit reads the field's value.
template <typename Visit>
void visit_fields(Cursor& in, Visit visit) {
  for (int64_t field = 0;;) {
    const uint8_t head = in.byte();
    if (head == 0) return;
    field = head >> 4 ? field + (head >> 4) : in.zigzag();
    visit(field, head & 15);
  }
}

inline void skip_value(Cursor& in, int type, int depth = 0) {
  expect(depth < 8);
  if (type == kTrue || type == kFalse) return;
  if (type == kByte) in.take(1);
  else if (type > kByte && type <= kInt64) in.varint();
  else if (type == kDouble) in.take(8);
  else if (type == kBinary) in.take(static_cast<int64_t>(in.varint()));
  else if (type == kStruct) visit_fields(in, [&](int64_t, int inner) { skip_value(in, inner, depth + 1); });
  else throw NotForUs{};  // lists and maps do not occur in page headers
}

enum PageType { kDataPage = 0, kDictionaryPage = 2 };
enum Encoding { kPlain = 0, kPlainDictionary = 2, kRuns = 3, kDelta = 5, kDictionary = 8, kByteStreamSplit = 9 };

struct PageHeader {
  int64_t type = -1, size = -1, stored_size = -1, num_values = -1, encoding = -1;
  int64_t definition_encoding = kRuns, repetition_encoding = kRuns;
  bool has_crc = false;
  uint32_t crc = 0;  // of the stored bytes
};

inline PageHeader read_header(Cursor& in) {
  PageHeader page;
  const auto number = [&](int type) {
    expect(type > kByte && type <= kInt64);
    return in.zigzag();
  };
  const auto inner = [&](int64_t field, int type) {
    if (field == 1) page.num_values = number(type);
    else if (field == 2) page.encoding = number(type);
    else if (field == 3 && page.type == kDataPage) page.definition_encoding = number(type);
    else if (field == 4 && page.type == kDataPage) page.repetition_encoding = number(type);
    else skip_value(in, type);
  };
  visit_fields(in, [&](int64_t field, int type) {
    if (field == 1) page.type = number(type);
    else if (field == 2) page.size = number(type);
    else if (field == 3) page.stored_size = number(type);
    else if (field == 4) page.has_crc = true, page.crc = static_cast<uint32_t>(number(type));
    else if (type == kStruct && field == (page.type == kDataPage ? 5 : 7)) visit_fields(in, inner);
    else skip_value(in, type);
  });
  expect(page.type == kDataPage || page.type == kDictionaryPage);
  expect(page.size >= 0 && page.num_values >= 0 && page.num_values < (int64_t{1} << 31));
  return page;
}

// Numbers of `width` bits: one that repeats, or groups of eight, bit-packed. Loads may read 8 bytes beyond `bits`.
struct Run {
  int64_t count;
  const uint8_t* bits;  // null if `value` repeats
  uint32_t value;
};

inline Run next_run(Cursor& in, int width, int64_t num_left) {
  const uint64_t head = in.varint();
  expect(head >> 1 > 0 && head >> 1 < (uint64_t{1} << 31));
  Run run{static_cast<int64_t>(head >> 1), nullptr, 0};
  if (head & 1) {
    run.bits = in.take(run.count * width).at;
    run.count *= 8;
  } else {
    const Cursor bytes = in.take((width + 7) / 8);
    std::memcpy(&run.value, bytes.at, bytes.left());  // little-endian, as Parquet's files are
  }
  run.count = run.count < num_left ? run.count : num_left;
  return run;
}

inline uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Memory that a thread reuses from page to page.
class Scratch {
 public:
  static constexpr int64_t kPadding = 16, kKept = 4 << 20;

  uint8_t* get(int64_t num_bytes) {
    if (num_bytes + kPadding > size_) {
      bytes_.reset();  // first, so that old and new memory never exist together
      bytes_.reset(new uint8_t[num_bytes + kPadding]);
      size_ = num_bytes + kPadding;
    }
    return bytes_.get();
  }
  void trim() {
    if (size_ > kKept) bytes_.reset(), size_ = 0;
  }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
  int64_t size_ = 0;
};

}  // namespace recmill

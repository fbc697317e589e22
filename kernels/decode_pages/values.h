// Reading the values of a Parquet page, in each of the encodings that GroupDecoder knows.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>

#include "decode_pages/pages.h"

namespace recmill {

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

// Ids in half of the memory. All of them must lie in [0, bound), and a bound is at most 2^31.
inline void narrow(const uint8_t* stored, int64_t count, int64_t bound, uint32_t* out) {
  expect(bound >= 0 && bound <= (int64_t{1} << 31));
  const auto most = static_cast<uint64_t>(bound) - 1;  // wraps around if there are no valid ids
  uint64_t signs = 0;  // the highest bit is set as soon as an id or (most - id) is negative
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t value = load(stored + i * static_cast<int64_t>(sizeof(uint64_t)));
    signs |= value | (most - value);
    out[i] = static_cast<uint32_t>(value);
  }
  expect(signs >> 63 == 0);
}

// Appends bits at bit `first`: pages need not end on a whole byte.
inline void take_bits(Cursor in, int64_t count, uint8_t* out, int64_t first) {
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

}  // namespace recmill

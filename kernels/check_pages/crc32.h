// CRC-32 as gzip, zip and Parquet use it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "parallel.h"

namespace recmill {

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    tables[0][byte] = crc;
  }
  for (int t = 1; t < 8; ++t)
    for (int byte = 0; byte < 256; ++byte)
      tables[t][byte] = tables[t - 1][byte] >> 8 ^ tables[0][tables[t - 1][byte] & 255];
  return tables;
}
inline constexpr CrcTables kCrcTables = make_crc_tables();

// Eight bytes at a time, by tables. `crc` is the inverted checksum of the bytes before.
inline uint32_t crc32_by_tables(const uint8_t* at, int64_t num_bytes, uint32_t crc) {
  for (; num_bytes >= 8; num_bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= crc;
    crc = 0;
    for (int byte = 0; byte < 8; ++byte) crc ^= kCrcTables[7 - byte][word >> (8 * byte) & 255];
  }
  for (; num_bytes > 0; --num_bytes, ++at) crc = crc >> 8 ^ kCrcTables[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)
// Carry-less products fold 64 bytes at a time into 64 (V. Gopal et al., "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", Intel 2009, where the constants are). At least 64 bytes, a multiple of 16.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t crc32_by_folding(
    const uint8_t* at, int64_t num_bytes, uint32_t crc) {
  const auto next = [&] {
    at += 16;
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at - 16));
  };
  __m128i parts[4], by = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  for (__m128i& part : parts) part = next();
  parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (num_bytes -= 64; num_bytes >= 64; num_bytes -= 64)
    for (__m128i& part : parts)
      part = _mm_xor_si128(
          _mm_xor_si128(_mm_clmulepi64_si128(part, by, 0x00), _mm_clmulepi64_si128(part, by, 0x11)), next());
  by = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i sum = parts[0];
  for (int p = 1; p < 4; ++p)
    sum = _mm_xor_si128(
        _mm_xor_si128(_mm_clmulepi64_si128(sum, by, 0x00), _mm_clmulepi64_si128(sum, by, 0x11)), parts[p]);
  for (; num_bytes >= 16; num_bytes -= 16)
    sum = _mm_xor_si128(
        _mm_xor_si128(_mm_clmulepi64_si128(sum, by, 0x00), _mm_clmulepi64_si128(sum, by, 0x11)), next());
  // From 128 bits to 64, then to 32 (Barrett).
  const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by, 0x10));
  by = _mm_set_epi64x(0, 0x0163cd6124);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 4), _mm_clmulepi64_si128(_mm_and_si128(sum, low), by, 0x00));
  by = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low), by, 0x10), low);
  sum = _mm_xor_si128(sum, _mm_clmulepi64_si128(quotient, by, 0x00));
  return static_cast<uint32_t>(_mm_extract_epi32(sum, 1));
}
#endif

inline uint32_t crc32(const uint8_t* at, int64_t num_bytes) {
  uint32_t crc = ~0u;
#if defined(__x86_64__)
  if (num_bytes >= 64 && !forced.is_portable && __builtin_cpu_supports("pclmul")) {
    const int64_t folded = num_bytes / 16 * 16;
    crc = crc32_by_folding(at, folded, crc);
    at += folded;
    num_bytes -= folded;
  }
#endif
  return ~crc32_by_tables(at, num_bytes, crc);
}

}  // namespace recmill

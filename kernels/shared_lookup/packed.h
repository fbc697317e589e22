// Weights of one byte: an integer from -127 to 127 times a power of two that the 16 slots of a line share. Steps round up
// or down at random with the probability of the lost fraction, so that steps far smaller than a unit still add up. The
// random bits are a hash of step and slot: the same on every machine and at any number of threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "shared_lookup/walk.h"

namespace recmill::shared {

constexpr float kTop = 127;
constexpr int kNotFinite = -128;  // the exponent of a line that holds an infinity or NaN: all of it reads as NaN
constexpr int kMinExponent = -120, kMaxExponent = 120;

RECMILL_INLINE float power_of_two(int exponent) {
  if (exponent == kNotFinite) return std::numeric_limits<float>::quiet_NaN();
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Packed {
  const int8_t* codes;
  const int8_t* exponents;  // one per line
};

// The weights of a segment, unpacked into `row`.
RECMILL_INLINE const float* read_slots(const Packed& array, const Segment& segment, std::vector<float>& row) {
  if (static_cast<int64_t>(row.size()) < segment.length) row.resize(segment.length);
  const int64_t stop = segment.start + segment.length;
  float* to = row.data();
  for (int64_t slot = segment.start; slot < stop;) {
    const float unit = power_of_two(array.exponents[slot / kLine]);
    const int64_t end = std::min(stop, (slot / kLine + 1) * kLine);
    for (; slot < end; ++slot) *to++ = unit * static_cast<float>(array.codes[slot]);
  }
  return row.data();
}

// The smallest exponent with which 127 units reach `largest`; a line of zeros keeps its exponent.
RECMILL_INLINE int choose_exponent(float largest, int kept) {
  if (!std::isfinite(largest)) return kNotFinite;
  if (largest == 0) return kept == kNotFinite ? 0 : kept;
  int exponent;
  if (std::frexp(largest / kTop, &exponent) == 0.5f) --exponent;
  return std::max(kMinExponent, std::min(kMaxExponent, exponent));
}

// Packs the values of a line. `key` and the line's number determine the rounding, with sixteen bits per slot.
RECMILL_INLINE void pack_line(const float* values, int64_t length, uint64_t key, int64_t line, int8_t* codes, int8_t* exponent) {
  float largest = 0;
  for (int64_t i = 0; i < length; ++i) {
    const float size = std::fabs(values[i]);
    largest = size <= largest ? largest : size;  // a NaN stays: no comparison with it is true
    if (size != size) break;
  }
  *exponent = static_cast<int8_t>(choose_exponent(largest, *exponent));
  if (*exponent == kNotFinite) {
    std::fill(codes, codes + length, 1);
    return;
  }
  const float scale = power_of_two(-*exponent);
  for (int64_t i = 0; i < length; i += 4) {
    uint64_t bits = mix_bits(key + static_cast<uint64_t>(line * (kLine / 4) + i / 4) * kIdFactor);
    for (int64_t at = i; at < std::min(i + 4, length); ++at, bits >>= 16) {
      const float raised = std::floor(values[at] * scale + static_cast<float>(bits & 0xFFFF) * 0x1p-16f);
      codes[at] = static_cast<int8_t>(std::max(-kTop, std::min(kTop, raised)));
    }
  }
}

}  // namespace recmill::shared

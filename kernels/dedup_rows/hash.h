// A fast hash of the bytes of a list. It only finds candidates, which are then compared byte by byte. Its quality affects
// speed only, and CPUs may use different hashes.
#pragma once

#include "jagged.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace recmill {

constexpr uint64_t kPrimes[4] = {0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
                                 0xD6E8FEB86659FD93ULL};

inline uint64_t mix(uint64_t a, uint64_t b) {
  const __uint128_t product = static_cast<__uint128_t>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// 16 bytes per multiplication; the two states are independent, so two multiplications run at once.
inline uint64_t hash_portable(const char* bytes, int64_t num_bytes, uint64_t seed) {
  uint64_t a = seed ^ kPrimes[0], b = mix(seed ^ kPrimes[1], static_cast<uint64_t>(num_bytes) ^ kPrimes[2]);
  int64_t i = 0;
  for (; i + 32 <= num_bytes; i += 32) {
    a = mix(load_word(bytes + i) ^ kPrimes[0], load_word(bytes + i + 8) ^ a);
    b = mix(load_word(bytes + i + 16) ^ kPrimes[1], load_word(bytes + i + 24) ^ b);
  }
  for (; i + 8 <= num_bytes; i += 8) a = mix(load_word(bytes + i) ^ kPrimes[2], a ^ kPrimes[3]);
  if (i < num_bytes) {
    uint64_t rest = 0;
    std::memcpy(&rest, bytes + i, num_bytes - i);
    a = mix(rest ^ kPrimes[2], a ^ kPrimes[3]);
  }
  return mix(a ^ kPrimes[3], b);
}

#if defined(__x86_64__)
// 64 bytes per step in eight 64-bit sums of 32 x 32-bit products. The key changes with every step: otherwise permutations
// of a list (a shifted history) would collide.
__attribute__((target("avx2"))) inline uint64_t hash_avx2(const char* bytes, int64_t num_bytes, uint64_t seed) {
  if (num_bytes < 128) return hash_portable(bytes, num_bytes, seed);
  __m256i key_a = _mm256_setr_epi64x(kPrimes[0], kPrimes[1], kPrimes[2], kPrimes[3]);
  __m256i key_b = _mm256_setr_epi64x(kPrimes[2] + 1, kPrimes[3] + 1, kPrimes[0] + 1, kPrimes[1] + 1);
  const __m256i step = _mm256_setr_epi64x(kPrimes[3], kPrimes[0], kPrimes[1], kPrimes[2]);
  __m256i sum_a = _mm256_set1_epi64x(static_cast<int64_t>(seed)), sum_b = sum_a;
  int64_t i = 0;
  for (; i + 64 <= num_bytes; i += 64) {
    const __m256i word_a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    const __m256i word_b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i + 32));
    const __m256i keyed_a = _mm256_xor_si256(word_a, key_a), keyed_b = _mm256_xor_si256(word_b, key_b);
    sum_a = _mm256_add_epi64(sum_a, _mm256_mul_epu32(keyed_a, _mm256_srli_epi64(keyed_a, 32)));
    sum_b = _mm256_add_epi64(sum_b, _mm256_mul_epu32(keyed_b, _mm256_srli_epi64(keyed_b, 32)));
    key_a = _mm256_add_epi64(key_a, step);
    key_b = _mm256_add_epi64(key_b, step);
  }
  alignas(32) uint64_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum_a);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 4), sum_b);
  const uint64_t tail = hash_portable(bytes + i, num_bytes - i, seed ^ static_cast<uint64_t>(num_bytes));
  const uint64_t low = mix(lanes[0] ^ kPrimes[0], lanes[1] ^ tail) ^ mix(lanes[2] ^ kPrimes[1], lanes[3] ^ tail);
  const uint64_t high = mix(lanes[4] ^ kPrimes[2], lanes[5] ^ tail) ^ mix(lanes[6] ^ kPrimes[3], lanes[7] ^ tail);
  return mix(low ^ kPrimes[0], high ^ tail);
}
#endif

using Hash = uint64_t (*)(const char*, int64_t, uint64_t);

inline Hash choose_hash() {
#if defined(__x86_64__)
  if (has_avx2()) return hash_avx2;
#endif
  return hash_portable;
}

}  // namespace recmill

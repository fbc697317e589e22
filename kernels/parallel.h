// What all CPU kernels share: the number of threads, and code compiled for AVX2.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace recmill {

// What tests force, through `_cpu.force`: threads on small inputs, code for any CPU, hashes that collide.
struct Forced {
  int threads = 0;
  bool is_portable = false;
  uint64_t hash_mask = ~uint64_t{0};
};
inline Forced forced;

// An explicit number of threads is used as given. With 0, small work stays on one thread: starting a team of threads
// costs 5 to 20 us, and a process that never starts one can still fork safely.
inline int choose_threads(int64_t work, int64_t work_per_thread, int requested = 0) {
  if (requested > 0 || forced.threads > 0) return requested > 0 ? requested : forced.threads;
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), work / work_per_thread)));
}

// run_avx2(body) calls `body` compiled for AVX2 where the CPU has it, run_fma(body) for AVX2 and FMA. `body` is a lambda
// marked RECMILL_BODY, and everything it calls must be inlined to be compiled the same way. With FMA, products are not
// rounded before they are added, so results may differ from those of other CPUs in the last bits.
#define RECMILL_INLINE inline __attribute__((always_inline))
#define RECMILL_BODY __attribute__((always_inline))

#if defined(__x86_64__)
template <typename Body>
__attribute__((target("avx2"))) void call_for_avx2(const Body& body) {
  body();
}

template <typename Body>
__attribute__((target("avx2,fma"))) void call_for_fma(const Body& body) {
  body();
}

inline bool has_avx2() { return !forced.is_portable && __builtin_cpu_supports("avx2"); }
inline bool has_fma() { return has_avx2() && __builtin_cpu_supports("fma"); }
#else
template <typename Body>
void call_for_avx2(const Body& body) {
  body();
}

template <typename Body>
void call_for_fma(const Body& body) {
  body();
}

inline bool has_avx2() { return false; }
inline bool has_fma() { return false; }
#endif

template <typename Body>
__attribute__((noinline)) void call_portably(const Body& body) {
  body();
}

template <typename Body>
void run_avx2(const Body& body) {
  if (has_avx2()) call_for_avx2(body);
  else call_portably(body);
}

template <typename Body>
void run_fma(const Body& body) {
  if (has_fma()) call_for_fma(body);
  else call_portably(body);
}

}  // namespace recmill

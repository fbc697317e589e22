// Fuzzers run on one thread; what threads would do, they do one after the other.
#pragma once

inline int omp_get_max_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }

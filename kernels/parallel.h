// What every CPU kernel shares: addresses handed over by Python, the number of threads, and errors inside loops.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

namespace recmill {

using Address = std::uintptr_t;  // Python checks dtype, contiguity and length, then passes the plain address

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// A caller who asks for a number of threads gets it. Otherwise small work stays on one thread: starting a team costs
// some 5-20 us, and a process that never starts one can still fork safely.
inline int choose_threads(int requested, int64_t work, int64_t work_per_thread) {
  if (requested > 0) return requested;
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), work / work_per_thread)));
}

// The lowest position at which any thread found something wrong, so that the message is the same at any thread count.
class FirstError {
 public:
  void report(int64_t position) {
    int64_t seen = position_.load(std::memory_order_relaxed);
    while (position < seen && !position_.compare_exchange_weak(seen, position, std::memory_order_relaxed)) {
    }
  }
  bool found() const { return position() != kNone; }
  int64_t position() const { return position_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> position_{kNone};
};

}  // namespace recmill

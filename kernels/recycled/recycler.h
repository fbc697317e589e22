// Memory for arrays that are allocated again and again: row groups, batches. A block that is freed is kept for the next
// array of its size, because fresh pages are expensive: the system clears them, on a virtual machine often in the host,
// too. Allocators return large blocks sooner or later, and each of their threads has blocks of its own.
//
// All functions are called with the GIL held, which makes them safe in threads and across a fork.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <new>
#include <vector>

namespace recmill {

class Recycler {
 public:
  static constexpr int64_t kMaxIdleBytes = 256 << 20, kHugePage = 2 << 20, kRegionBytes = 32 << 20;
  static constexpr size_t kMaxIdleBlocks = 512;
  static constexpr std::chrono::seconds kMaxIdleTime{10};  // checked whenever a block is taken or given back

  // The size of the block for so many bytes: up to an eighth more, so that row groups of similar size share blocks.
  static int64_t block_bytes(int64_t num_bytes) {
    int64_t step = 4096;
    while (step * 16 <= num_bytes) step *= 2;
    return (num_bytes + step - 1) / step * step;
  }

  void* take(int64_t num_bytes) {
    release(kMaxIdleTime, kMaxIdleBytes);
    for (auto block = idle_.rbegin(); block != idle_.rend(); ++block) {  // the last one used is still in the cache
      if (block->num_bytes != num_bytes) continue;
      void* memory = block->memory;
      idle_.erase(std::next(block).base());
      idle_bytes_ -= num_bytes;
      return memory;
    }
    std::vector<char*>& cold = cold_[num_bytes];
    if (cold.empty()) return carve(num_bytes);
    void* memory = cold.back();
    cold.pop_back();
    return memory;
  }

  void give_back(void* memory, int64_t num_bytes) {
    idle_.push_back({memory, num_bytes, Clock::now()});
    idle_bytes_ += num_bytes;
    release(kMaxIdleTime, kMaxIdleBytes);
  }

  // Returns to the system what has been idle for longer than `age`, and the oldest blocks beyond `num_bytes`.
  int64_t release(std::chrono::seconds age, int64_t num_bytes) {
    const auto now = Clock::now();
    int64_t released = 0;
    while (!idle_.empty() && (idle_bytes_ > num_bytes || idle_.size() > kMaxIdleBlocks || now - idle_[0].since > age)) {
      const Block oldest = idle_.front();
      idle_.pop_front();
      idle_bytes_ -= oldest.num_bytes;
      released += oldest.num_bytes;
      madvise(oldest.memory, oldest.num_bytes, MADV_DONTNEED);
      cold_[oldest.num_bytes].push_back(static_cast<char*>(oldest.memory));
    }
    return released;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Block {
    void* memory;
    int64_t num_bytes;
    Clock::time_point since;
  };

  // A new block. Blocks lie side by side in regions of huge pages: the lists of a batch are scattered over many of them.
  char* carve(int64_t num_bytes) {
    if (num_bytes > region_left_) {
      const int64_t wanted = (std::max(num_bytes, kRegionBytes) + kHugePage - 1) / kHugePage * kHugePage;
      void* found = mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (found == MAP_FAILED) throw std::bad_alloc();
      char* begin = static_cast<char*>(found);
      const auto after = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) % kHugePage);
      const int64_t before = after ? kHugePage - after : 0;
      if (before) munmap(begin, before);
      if (after) munmap(begin + before + wanted, after);
      region_ = begin + before;
      region_left_ = wanted;
#ifdef MADV_HUGEPAGE
      madvise(region_, wanted, MADV_HUGEPAGE);
#endif
    }
    char* memory = region_;
    region_ += num_bytes;
    region_left_ -= num_bytes;
    return memory;
  }

  std::deque<Block> idle_;  // the one that was given back first is in front
  int64_t idle_bytes_ = 0;
  std::map<int64_t, std::vector<char*>> cold_;  // blocks without memory, by size: addresses are used again, too
  char* region_ = nullptr;                      // what is left of the newest region
  int64_t region_left_ = 0;
};

// Never destroyed: arrays may be freed after the module.
inline Recycler& recycler() {
  static auto* only = new Recycler;
  return *only;
}

}  // namespace recmill

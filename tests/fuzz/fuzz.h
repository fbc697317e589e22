// What all fuzzers share: bytes of the input as numbers, arrays of exactly the size that is claimed, and checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "arrays.h"

namespace fuzz {

inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::abort();
}

// The input, read from the front; zeros behind its end.
class Feed {
 public:
  Feed(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  template <typename T>
  T number() {
    T value{};
    const size_t size = std::min(sizeof(T), static_cast<size_t>(end_ - at_));
    std::memcpy(&value, at_, size);
    at_ += size;
    return value;
  }
  int64_t below(int64_t limit) { return number<uint8_t>() % limit; }
  // A number in [0, limit] most of the time, any other number of its type else.
  template <typename T = int64_t>
  T mostly_up_to(int64_t limit) {
    const uint8_t kind = number<uint8_t>();
    if (kind < 248) return static_cast<T>(kind % (limit + 1));
    if (kind == 248) return static_cast<T>(limit + 1);
    if (kind == 249) return static_cast<T>(-1);
    return number<T>();
  }
  int64_t left() const { return end_ - at_; }
  const uint8_t* rest() const { return at_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// An array on the heap: one byte beyond its end is a finding.
template <typename T>
class Held {
 public:
  explicit Held(int64_t rows, int64_t columns = 0) : shape_{static_cast<size_t>(rows), static_cast<size_t>(columns)} {
    size_ = rows * (columns ? columns : 1);
    memory_.reset(new T[size_]());
  }
  Held(const T* begin, const T* end) : Held(end - begin) { std::copy(begin, end, memory_.get()); }

  T& operator[](int64_t at) { return memory_[at]; }
  int64_t size() const { return size_; }
  T* get() { return memory_.get(); }
  recmill::Input in() const { return as<recmill::Input>(); }
  recmill::Output out() const { return as<recmill::Output>(); }

 private:
  template <typename Kind>
  Kind as() const {
    return Kind(memory_.get(), shape_[1] ? 2 : 1, shape_, nb::handle(), nullptr, nb::dtype<T>(), nb::device::cpu::value, 0);
  }

  std::unique_ptr<T[]> memory_;
  size_t shape_[2];
  int64_t size_;
};

// Offsets of `rows` lists over at most `num_values` values, ascending unless the input wants something else.
inline Held<int64_t> offsets_of(Feed& feed, int64_t rows, int64_t num_values) {
  Held<int64_t> offsets(rows + 1);
  int64_t at = feed.below(3) == 0 ? feed.mostly_up_to(num_values) : 0;
  for (int64_t row = 0; row <= rows; ++row) {
    offsets[row] = at;
    const int64_t step = feed.mostly_up_to(6);
    at = step >= 0 && step <= 6 ? std::min(num_values, at) + step : step;
  }
  if (feed.below(4)) offsets[rows] = std::min(offsets[rows], num_values);
  return offsets;
}

}  // namespace fuzz

// A kernel refuses what it is given with an exception; anything else that ends it is a finding.
#define FUZZ(target)                                                     \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { \
    fuzz::Feed feed(data, size);                                         \
    try {                                                                \
      target(feed);                                                      \
    } catch (const std::invalid_argument&) {                             \
    } catch (const std::out_of_range&) {                                 \
    }                                                                    \
    return 0;                                                            \
  }

// Windows into a buffer of rows, and which of them share rows.
#pragma once

#include <numeric>
#include <vector>

#include "arrays.h"
#include "parallel.h"

namespace recmill {

// Window w covers the rows [starts[w], starts[w] + lengths[w]). Its results begin at row places[w] of the output.
struct Windows {
  const int64_t* starts;
  const int64_t* lengths;
  int64_t count;
  std::vector<int64_t> places;
  int64_t longest = 0;

  Windows(const Input& starts, const Input& lengths, int64_t num_rows)
      : Windows(starts.as<const int64_t>("starts"), lengths.as<const int64_t>("lengths", starts.num_items()),
                starts.num_items(), num_rows) {}

  Windows(const int64_t* starts, const int64_t* lengths, int64_t count, int64_t num_rows)
      : starts(starts), lengths(lengths), count(count), places(count + 1, 0) {
    for (int64_t w = 0; w < count; ++w) {
      if (lengths[w] < 0 || starts[w] < 0 || starts[w] > num_rows - lengths[w])
        refuse("window " + std::to_string(w) + ": start " + std::to_string(starts[w]) + " and length " +
               std::to_string(lengths[w]) + " lie outside of the " + std::to_string(num_rows) + " rows");
      places[w + 1] = places[w] + lengths[w];
      longest = std::max(longest, lengths[w]);
    }
  }

  int64_t work(int64_t width) const {
    int64_t sum = 0;
    for (int64_t w = 0; w < count; ++w) sum += lengths[w] * lengths[w] * width;
    return sum;
  }
};

// Windows that share rows form a cluster. One thread adds up the gradients of a cluster, in the order of the windows'
// starts, so the sums do not depend on the number of threads.
struct Clusters {
  std::vector<int64_t> order, begins;  // windows order[begins[c] : begins[c + 1]] are cluster c

  explicit Clusters(const Windows& windows) : order(windows.count) {
    std::iota(order.begin(), order.end(), 0);
    const auto is_before = [&](int64_t a, int64_t b) { return windows.starts[a] < windows.starts[b]; };
    if (!std::is_sorted(order.begin(), order.end(), is_before)) std::stable_sort(order.begin(), order.end(), is_before);
    int64_t end = -1;
    for (int64_t at = 0; at < windows.count; ++at) {
      const int64_t w = order[at];
      if (at == 0 || windows.starts[w] >= end) begins.push_back(at);
      end = std::max(end, windows.starts[w] + windows.lengths[w]);
    }
    begins.push_back(windows.count);
  }

  int64_t count() const { return static_cast<int64_t>(begins.size()) - 1; }
};

// Windows order[first : last] of one cluster. With is_shared they overlap so much that scores are computed once per pair
// of rows.
struct Chunk {
  int64_t first, last;
  int64_t start, length;  // the rows that they cover together
  bool is_shared;
};

// A chunk has at most one and a half times as many rows as its first window, so that its matrix of pairs stays in cache.
inline std::vector<Chunk> find_chunks(const Windows& windows, const Clusters& clusters, int64_t cluster) {
  std::vector<Chunk> chunks;
  int64_t pairs = 0;
  for (int64_t at = clusters.begins[cluster]; at < clusters.begins[cluster + 1]; ++at) {
    const int64_t start = windows.starts[clusters.order[at]], length = windows.lengths[clusters.order[at]];
    if (!chunks.empty()) {
      Chunk& chunk = chunks.back();
      const int64_t joined = std::max(chunk.length, start + length - chunk.start);
      const int64_t most = windows.lengths[clusters.order[chunk.first]];
      if (2 * joined <= 3 * most) {
        chunk.last = at + 1;
        chunk.length = joined;
        pairs += length * length;
        chunk.is_shared = 2 * pairs >= 3 * joined * joined;
        continue;
      }
    }
    chunks.push_back({at, at + 1, start, length, false});
    pairs = length * length;
  }
  return chunks;
}

}  // namespace recmill

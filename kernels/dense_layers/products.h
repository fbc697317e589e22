// Products of a few rows with weights that were packed once, for scoring (dense_layers, encode_windows).
//
// Every element is summed from its start in the order of the inputs, so its bits depend neither on the other rows nor on
// how rows are grouped. Compiled for AVX-512, for AVX2 with FMA, and for any CPU.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "arrays.h"
#include "heads.h"
#include "parallel.h"
#include "vectors.h"

namespace recmill {

constexpr int64_t kPanel = 16;  // outputs that lie side by side in packed weights: one register of AVX-512, two of AVX2

template <typename V>
RECMILL_INLINE float sum_of(const V& vector) {
  typedef float Quad __attribute__((vector_size(16)));
  float lanes[lanes_of<V>()];
  write<V>(lanes, vector);
  Vec eight = read<Vec>(lanes);
  if constexpr (lanes_of<V>() > kLanes) eight += read<Vec>(lanes + kLanes);
  write<Vec>(lanes, eight);
  Quad four, other;
  std::memcpy(&four, lanes, sizeof(four));
  std::memcpy(&other, lanes + 4, sizeof(other));
  four += other;
  return (four[0] + four[1]) + (four[2] + four[3]);
}

// x * (1 + erf(x / sqrt(2))) / 2, with Eigen's rational approximation of erf: absolute errors below 3e-7 * max(1, |x|).
template <typename V>
RECMILL_INLINE V gelu_of(const V& x) {
  const V own = smaller(larger(x * 0.70710678118654752f, spread<V>(-4.0f)), spread<V>(4.0f)), square = own * own;
  V above = square * -2.72614225801306e-10f + 2.77068142495902e-08f;
  above = above * square + -2.10102402082508e-06f;
  above = above * square + -5.69250639462346e-05f;
  above = above * square + -7.34990630326855e-04f;
  above = above * square + -2.95459980854025e-03f;
  above = above * square + -1.60960333262415e-02f;
  V below = square * -1.45660718464996e-05f + -2.13374055278905e-04f;
  below = below * square + -1.68282697438203e-03f;
  below = below * square + -7.37332916720468e-03f;
  below = below * square + -1.42647390514189e-02f;
  return x * 0.5f * (own * above / below + 1.0f);
}

// The right side of a product: column c of input k is at panels[c / 16 * panel_step + k * step + c % 16].
struct Right {
  const float* panels;
  int64_t panel_step, step;
};

// Rows to be multiplied, what sums start from (a row of `start_step` floats each, 0: the same for all), and the results.
struct Rows {
  const float* from;
  int64_t from_step;  // between two rows; if rows lie across, between two inputs
  const float* start;
  int64_t start_step;
  float* to;
  int64_t to_step;
};

// kRows rows times kPanels panels.
template <typename V, int kRows, int kPanels, bool kHasRelu, bool kIsAcross>
RECMILL_INLINE void multiply_tile_of(int64_t depth, const Rows& rows, int64_t row, const Right& right, int64_t panel) {
  constexpr int kVecs = kPanel / lanes_of<V>(), kWidth = kPanels * kVecs;
  const float* from = rows.from + row * (kIsAcross ? 1 : rows.from_step);
  const float* start = rows.start + row * rows.start_step + panel * kPanel;
  const float* panels = right.panels + panel * right.panel_step;
  V sums[kRows][kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kWidth; ++v) sums[r][v] = read<V>(start + r * rows.start_step + v * lanes_of<V>());
  for (int64_t k = 0; k < depth; ++k) {
    V own[kWidth];
#pragma GCC unroll 16
    for (int v = 0; v < kWidth; ++v)
      own[v] = read<V>(panels + v / kVecs * right.panel_step + k * right.step + v % kVecs * lanes_of<V>());
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const V factor = spread<V>(kIsAcross ? from[k * rows.from_step + r] : from[r * rows.from_step + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kWidth; ++v) sums[r][v] += factor * own[v];
    }
  }
  float* to = rows.to + row * rows.to_step + panel * kPanel;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kWidth; ++v) {
      V sum = sums[r][v];
      if constexpr (kHasRelu) sum = larger(sum, V{});
      write<V>(to + r * rows.to_step + v * lanes_of<V>(), sum);
    }
}

// Panels [panel, panels), kPanels at a time as long as there are so many; returns the first that is left.
template <typename V, int kRows, int kPanels, bool kHasRelu, bool kIsAcross>
RECMILL_INLINE int64_t multiply_panels(int64_t count, int64_t depth, const Rows& rows, const Right& right,
                                       int64_t panel, int64_t panels) {
  for (; panel + kPanels <= panels; panel += kPanels) {
    int64_t row = 0;
    for (; row + kRows <= count; row += kRows)
      multiply_tile_of<V, kRows, kPanels, kHasRelu, kIsAcross>(depth, rows, row, right, panel);
    if constexpr (kRows > 4)
      for (; row + 4 <= count; row += 4) multiply_tile_of<V, 4, kPanels, kHasRelu, kIsAcross>(depth, rows, row, right, panel);
    for (; row < count; ++row) multiply_tile_of<V, 1, kPanels, kHasRelu, kIsAcross>(depth, rows, row, right, panel);
  }
  return panel;
}

// to = start + from * right, negative results as 0 if there is a ReLU, for `count` rows and `columns` of results, a multiple of 16. Tiles have as many sums as
// it takes to keep both multipliers busy: 16 registers of AVX-512, 8 of AVX2; of few rows, many panels at a time.
template <typename V, bool kHasRelu, bool kIsAcross = false>
RECMILL_INLINE void multiply_rows(int64_t count, int64_t columns, int64_t depth, const Rows& rows, const Right& right) {
  constexpr bool kIsWide = sizeof(V) == sizeof(WideVec);
  const int64_t panels = columns / kPanel;
  int64_t panel = 0;
  if (count < 4) {
    panel = multiply_panels<V, 1, kIsWide ? 8 : 4, kHasRelu, kIsAcross>(count, depth, rows, right, panel, panels);
    multiply_panels<V, 1, 1, kHasRelu, kIsAcross>(count, depth, rows, right, panel, panels);
    return;
  }
  if constexpr (kIsWide) panel = multiply_panels<V, 8, 2, kHasRelu, kIsAcross>(count, depth, rows, right, panel, panels);
  multiply_panels<V, kIsWide ? 8 : 4, 1, kHasRelu, kIsAcross>(count, depth, rows, right, panel, panels);
}

// The weights [outputs, inputs] of a linear layer and its bias, packed for `multiply_rows`. Outputs are padded with
// zeros to whole panels.
struct PackedLayer {
  int64_t num_inputs, num_outputs, width;  // width: outputs with their padding
  std::vector<float> panels, bias;

  PackedLayer(const Input& weight, const OptionalInput& bias_O, int64_t layer)
      : num_inputs(weight.dim(1)), num_outputs(weight.dim(0)), width(round_up(num_outputs, kPanel)) {
    const float* from = weight.as<const float>("weight", Input::kAnySize, layer);
    if (weight.ndim() != 2 || num_inputs < 1 || num_outputs < 1)
      refuse("weight of layer " + std::to_string(layer) + ": expected a matrix of at least one row and column");
    panels.resize(width * num_inputs);
    bias.resize(width);
    for (int64_t o = 0; o < num_outputs; ++o)
      for (int64_t k = 0; k < num_inputs; ++k)
        panels[o / kPanel * num_inputs * kPanel + k * kPanel + o % kPanel] = from[o * num_inputs + k];
    if (!bias_O) return;
    const float* own = bias_O->as<const float>("bias", num_outputs, layer);
    std::copy(own, own + num_outputs, bias.begin());
  }

  Right right() const { return {panels.data(), num_inputs * kPanel, kPanel}; }
};

// Floats that are not set to anything, at an address that vectors may be loaded from whole.
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(new (std::align_val_t{64}) float[size]) {}
  // Room for `size` floats, behind what was taken before.
  float* take(int64_t size) {
    float* found = memory_.get() + taken_;
    taken_ += round_up(size, kPanel);
    return found;
  }

 private:
  struct Delete {
    void operator()(float* memory) const { operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Delete> memory_;
  int64_t taken_ = 0;
};

template <typename Vector>
struct Of {
  using V = Vector;
};

inline bool forced_narrow = false;  // tests force it through `_cpu.force`: no AVX-512

#if defined(__x86_64__)
template <typename Body>
__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma"))) void call_for_avx512(const Body& body) {
  body(Of<WideVec>{});
}

inline bool has_avx512() {
  return has_fma() && !forced_narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

// Calls body(Of<WideVec>{}) compiled for AVX-512 where the CPU has it, else body(Of<Vec>{}) as run_fma does.
template <typename Body>
void run_widest(const Body& body) {
#if defined(__x86_64__)
  if (has_avx512()) {
    call_for_avx512(body);
    return;
  }
#endif
  run_fma([&]() RECMILL_BODY { body(Of<Vec>{}); });
}

}  // namespace recmill

// nb::ndarray over memory of the fuzzer.
#pragma once

#include <vector>

#include "nanobind.h"

namespace nanobind {

namespace dlpack {
struct dtype {
  uint8_t code, bits;
  uint16_t lanes;
  bool operator==(const dtype& other) const { return code == other.code && bits == other.bits; }
  bool operator!=(const dtype& other) const { return !(*this == other); }
};
struct dltensor {
  void* data;
  struct {
    int32_t device_type, device_id;
  } device;
  int32_t ndim;
  dlpack::dtype dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
}  // namespace dlpack

struct ro {};
namespace device {
struct cpu {
  static constexpr int value = 1;
};
}  // namespace device

template <typename T>
constexpr dlpack::dtype dtype() {
  constexpr uint8_t bits = sizeof(T) * 8;
  if (std::is_same_v<T, bool>) return {6, 8, 1};
  return {static_cast<uint8_t>(std::is_floating_point_v<T> ? 2 : std::is_unsigned_v<T> ? 1 : 0), bits, 1};
}

template <typename... Args>
class ndarray {
 public:
  static constexpr bool ReadOnly = (std::is_same_v<Args, ro> || ...);

  ndarray() = default;
  ndarray(void* data, size_t ndim, const size_t* shape, handle, const int64_t* strides, dlpack::dtype dtype, int device,
          int)
      : data_(data), shape_(shape, shape + ndim), dtype_(dtype), device_(device) {
    strides_.assign(ndim, 1);
    for (size_t axis = ndim; axis-- > 1;) strides_[axis - 1] = strides_[axis] * static_cast<int64_t>(shape_[axis]);
    if (strides != nullptr) strides_.assign(strides, strides + ndim);
  }

  size_t size() const {
    size_t count = 1;
    for (const size_t own : shape_) count *= own;
    return count;
  }
  size_t ndim() const { return shape_.size(); }
  size_t shape(size_t axis) const { return shape_[axis]; }
  int64_t stride(size_t axis) const { return strides_[axis]; }
  size_t itemsize() const { return dtype_.bits / 8; }
  size_t nbytes() const { return size() * itemsize(); }
  dlpack::dtype dtype() const { return dtype_; }
  int device_type() const { return device_; }
  std::conditional_t<ReadOnly, const void*, void*> data() const { return data_; }

 private:
  void* data_ = nullptr;
  std::vector<size_t> shape_;
  std::vector<int64_t> strides_;
  dlpack::dtype dtype_{0, 64, 1};
  int device_ = device::cpu::value;
};

}  // namespace nanobind

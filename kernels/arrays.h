// Arrays that Python passes to the kernels: numpy arrays, torch tensors and Arrow buffers, used where they lie.
//
// Every argument is an nb::ndarray of any dtype. A kernel asks for the elements by type and name, for example
// ids.as<const int64_t>("ids"). It gets them if dtype, device, layout and size are right; otherwise Python sees a
// ValueError that says what was received. Functions take arguments by reference, so that they are released with the GIL
// held.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace recmill {

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

inline std::string name_of(nb::dlpack::dtype dtype) {
  static constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  return dtype.code == 6 ? "bool" : (dtype.code < 6 ? kKinds[dtype.code] : "unknown") + std::to_string(dtype.bits);
}

template <typename Held>
class Array : public Held {
 public:
  using Held::Held;
  static constexpr int64_t kAnySize = -1;

  int64_t num_items() const { return static_cast<int64_t>(this->size()); }
  int64_t dim(size_t axis) const { return axis < this->ndim() ? static_cast<int64_t>(this->shape(axis)) : 1; }
  // Bytes from one entry of the first dimension to the next: an id, a weight, or a whole vector.
  int64_t row_bytes() const {
    int64_t bytes = static_cast<int64_t>(this->itemsize());
    for (size_t axis = 1; axis < this->ndim(); ++axis) bytes *= dim(axis);
    return bytes;
  }

  // The elements, contiguous on the CPU; `size` of them if that is given. `feature` is for the error message.
  template <typename T>
  T* as(const char* name, int64_t size = kAnySize, int64_t feature = -1) const {
    constexpr nb::dlpack::dtype kExpected = nb::dtype<std::remove_const_t<T>>();
    if (this->dtype() != kExpected)
      refuse(where(name, feature) + "dtype is " + name_of(this->dtype()) + ", expected " + name_of(kExpected));
    if (size != kAnySize && num_items() != size)
      refuse(where(name, feature) + "has " + std::to_string(num_items()) + " elements, expected " +
             std::to_string(size));
    return memory<T>(name, feature, this->ndim());
  }

  // The bytes of an array of any dtype.
  auto bytes(const char* name, int64_t feature = -1) const {
    return memory<std::conditional_t<Held::ReadOnly, const char, char>>(name, feature, this->ndim());
  }

  // A matrix (or vector) whose rows may lie apart: only the elements of a row must follow one another.
  template <typename T>
  T* rows_as(const char* name) const {
    if (this->itemsize() != sizeof(T)) refuse(where(name, -1) + "dtype is " + name_of(this->dtype()));
    if (this->ndim() > 2 || (this->ndim() == 2 && dim(1) > 1 && this->stride(1) != 1))
      refuse(where(name, -1) + "expected a vector, or a matrix in which the elements of a row follow one another");
    return memory<T>(name, -1, 0);
  }

  // Calls run(T{}) with the dtype of the array, one of Ts.
  template <typename... Ts, typename Run>
  void with_dtype(const char* name, Run run) const {
    if (((this->dtype() == nb::dtype<Ts>() && (run(Ts{}), true)) || ...)) return;
    std::string expected;
    ((expected += (expected.empty() ? "" : " or ") + name_of(nb::dtype<Ts>())), ...);
    refuse(where(name, -1) + "dtype is " + name_of(this->dtype()) + ", expected " + expected);
  }

 private:
  static std::string where(const char* name, int64_t feature) {
    return std::string(name) + (feature < 0 ? ": " : " of feature " + std::to_string(feature) + ": ");
  }

  template <typename T>
  T* memory(const char* name, int64_t feature, size_t num_contiguous) const {
    static_assert(!Held::ReadOnly || std::is_const_v<T>, "an Input is only read");
    if (this->device_type() != nb::device::cpu::value) refuse(where(name, feature) + "expected it on the CPU");
    int64_t step = 1;
    for (size_t axis = num_contiguous; num_items() > 0 && axis-- > 0; step *= dim(axis))
      if (dim(axis) > 1 && this->stride(axis) != step) refuse(where(name, feature) + "must be contiguous");
    return static_cast<T*>(this->data());
  }
};

using Input = Array<nb::ndarray<nb::ro>>;
using Output = Array<nb::ndarray<>>;
using OptionalInput = std::optional<Input>;
using OptionalOutput = std::optional<Output>;

template <typename T>
const T* as_or_null(const OptionalInput& array, const char* name, int64_t size = Input::kAnySize) {
  return array ? array->as<const T>(name, size) : nullptr;
}

// DLPack's C interface for tensors of one framework (struct DLPackExchangeAPI of dlpack.h, version 1.3). Torch publishes
// it as Tensor.__dlpack_c_exchange_api__. It takes 0.1 us per tensor; Tensor.__dlpack__, a Python function, takes 2.3.
struct ExchangeApi {
  uint32_t major_version, minor_version;
  void *previous, *allocate, *to_managed, *from_managed;
  int (*to_tensor)(PyObject*, nb::dlpack::dltensor*);

  // Null, without an error, if objects of the type are no tensors.
  static const ExchangeApi* of(PyTypeObject* type) noexcept {
    static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    PyObject* capsule = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
    const ExchangeApi* found = nullptr;
    if (capsule != nullptr) {
      found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      Py_DECREF(capsule);  // the framework keeps what it points to
    }
    if (found == nullptr) PyErr_Clear();
    return found != nullptr && found->major_version == 1 ? found : nullptr;
  }
};

// Adds a function that runs without the GIL.
template <typename Function>
void add_function(nb::module_& m, const char* name, Function function) {
  m.def(name, function, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace recmill

namespace nanobind::detail {

template <typename Held>
struct type_caster<recmill::Array<Held>> {
  NB_TYPE_CASTER(recmill::Array<Held>, const_name("kernels.buffers.Array"))

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    if (PyObject_CheckBuffer(source.ptr())) {  // numpy and Arrow
      make_caster<Held> caster;
      if (!caster.from_python(source, flags, cleanup)) return false;
      static_cast<Held&>(value) = std::move(caster.value);
      return true;
    }
    const recmill::ExchangeApi* api = recmill::ExchangeApi::of(Py_TYPE(source.ptr()));
    dlpack::dltensor tensor;
    if (api == nullptr || api->to_tensor(source.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    static_cast<Held&>(value) =
        Held(static_cast<char*>(tensor.data) + tensor.byte_offset, tensor.ndim,
             reinterpret_cast<const size_t*>(tensor.shape), source, tensor.strides, tensor.dtype,
             tensor.device.device_type, tensor.device.device_id);
    return true;
  }
};

}  // namespace nanobind::detail

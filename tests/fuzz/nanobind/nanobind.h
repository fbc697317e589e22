// As much of nanobind's interface as kernels/arrays.h needs, without Python: the fuzzers call the kernels with arrays
// that they own. Everything that converts Python objects is declared and never called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct PyObject;
struct PyTypeObject;
inline PyObject* PyUnicode_InternFromString(const char*) { return nullptr; }
inline PyObject* PyObject_GetAttr(PyObject*, PyObject*) { return nullptr; }
inline void* PyCapsule_GetPointer(PyObject*, const char*) { return nullptr; }
inline bool PyObject_CheckBuffer(PyObject*) { return false; }
inline PyTypeObject* Py_TYPE(PyObject*) { return nullptr; }
inline void Py_DECREF(PyObject*) {}
inline void PyErr_Clear() {}

namespace nanobind {

struct handle {
  PyObject* ptr() const { return nullptr; }
};
struct gil_scoped_release {};
template <typename>
struct call_guard {};
struct module_ {
  template <typename... Rest>
  void def(Rest&&...) {}
};

template <typename...>
struct init {};
template <typename T>
struct class_ {
  class_(module_&, const char*) {}
  template <typename... Rest>
  class_& def(Rest&&...) { return *this; }
  template <typename... Rest>
  class_& def_ro(Rest&&...) { return *this; }
  template <typename... Rest>
  class_& def_prop_ro(Rest&&...) { return *this; }
};

namespace detail {
struct cleanup_list;
template <typename T>
struct type_caster;
template <typename T>
using make_caster = type_caster<T>;
}  // namespace detail

#define NB_TYPE_CASTER(Type, name) Type value;

}  // namespace nanobind

#include "python/bindings/bulk.h"

#include <cstring>
#include <string>
#include <string_view>

namespace py = pybind11;

namespace reft {
namespace {

// The memory of an array or bytearray, while it is looked at.
class Memory {
 public:
  explicit Memory(const py::handle& owner) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      throw py::error_already_set();
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { PyBuffer_Release(&view_); }

  std::string_view bytes() const {
    return {static_cast<const char*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

bool holdsBytes(const py::handle& owner, const py::bytes& before) {
  return Memory(owner).bytes() == static_cast<std::string_view>(before);
}

// Of an array of objects: its memory is their addresses.
bool holdsObjects(const py::handle& array, const py::list& before) {
  const std::string_view there = Memory(array).bytes();
  const std::string_view items{
      reinterpret_cast<const char*>(PySequence_Fast_ITEMS(before.ptr())),  // NOLINT
      static_cast<size_t>(PyList_GET_SIZE(before.ptr())) * sizeof(PyObject*)};
  return there == items;
}

// Of a dict: keys and values, in its order. An OrderedDict has another one.
bool holdsPairs(const py::handle& dict, const py::list& keys, const py::list& values) {
  if (!PyDict_Check(dict.ptr())) {
    throw py::type_error("value is " + std::string(Py_TYPE(dict.ptr())->tp_name) +
                         "; allowed: dict");
  }
  Py_ssize_t at = 0;
  Py_ssize_t count = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(dict.ptr(), &at, &key, &value) != 0) {
    if (count >= PyList_GET_SIZE(keys.ptr()) || count >= PyList_GET_SIZE(values.ptr()) ||
        PyList_GET_ITEM(keys.ptr(), count) != key ||
        PyList_GET_ITEM(values.ptr(), count) != value) {
      return false;
    }
    ++count;
  }
  return count == PyList_GET_SIZE(keys.ptr());
}

}  // namespace

void bindBulk(py::module_& module) {
  module.def("holds_bytes", &holdsBytes, py::arg("owner"), py::arg("before"));
  module.def("holds_objects", &holdsObjects, py::arg("array"), py::arg("before"));
  module.def("holds_pairs", &holdsPairs, py::arg("dict"), py::arg("keys"), py::arg("values"));
}

}  // namespace reft

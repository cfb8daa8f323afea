// The interpreter's own headers give the layout, so a changed struct is a compile error rather than a wrong read.
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#endif
#include <Python.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define REFT_FRAME_LAYOUT_KNOWN 1
#include <internal/pycore_frame.h>
#else
#define REFT_FRAME_LAYOUT_KNOWN 0
#endif

#include "python/bindings/frames.h"

#include <string>

namespace py = pybind11;

namespace reft {
namespace {

#if REFT_FRAME_LAYOUT_KNOWN

struct Slots {
  PyObject** first;
  int localsplus;
  int capacity;  // locals and the largest value stack
  int storedDepth;
};

Slots slotsOf(const py::handle& object) {
  if (!PyFrame_Check(object.ptr())) {
    throw py::type_error("frame is " + std::string(Py_TYPE(object.ptr())->tp_name) + "; allowed: frame");
  }
  auto* frame = reinterpret_cast<PyFrameObject*>(object.ptr());
  _PyInterpreterFrame* inner = frame->f_frame;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const int localsplus = code->co_nlocalsplus;
  const int capacity = localsplus + code->co_stacksize;
  Py_DECREF(code);
  return Slots{inner->localsplus, localsplus, capacity, inner->stacktop};
}

py::list frameSlots(const py::handle& frame, int count, const py::object& unbound) {
  const Slots slots = slotsOf(frame);
  if (count < 0 || count > slots.capacity) {
    throw py::index_error("count is " + std::to_string(count) + "; allowed: 0 to " + std::to_string(slots.capacity));
  }
  py::list result(count);
  for (int i = 0; i < count; ++i) {
    PyObject* value = slots.first[i];
    result[i] = value == nullptr ? unbound : py::reinterpret_borrow<py::object>(value);
  }
  return result;
}

void frameSetSlot(const py::handle& frame, int index, const py::object& value, const py::object& unbound) {
  const Slots slots = slotsOf(frame);
  if (index < 0 || index >= slots.capacity) {
    throw py::index_error("index is " + std::to_string(index) + "; allowed: below " + std::to_string(slots.capacity));
  }
  PyObject* old = slots.first[index];
  slots.first[index] = value.is(unbound) ? nullptr : py::object(value).release().ptr();
  // Last: a destructor may run any code, this slot's owner included.
  Py_XDECREF(old);
}

int frameStackDepth(const py::handle& frame) {
  const Slots slots = slotsOf(frame);
  return slots.storedDepth < slots.localsplus ? -1 : slots.storedDepth - slots.localsplus;
}

int frameLocalsplus(const py::handle& frame) {
  return slotsOf(frame).localsplus;
}

#else

[[noreturn]] void unknownLayout() {
  throw std::runtime_error("frame layout of this Python is not known; allowed: CPython 3.11 to 3.13 with a GIL");
}

py::list frameSlots(const py::handle&, int, const py::object&) {
  unknownLayout();
}

void frameSetSlot(const py::handle&, int, const py::object&, const py::object&) {
  unknownLayout();
}

int frameStackDepth(const py::handle&) {
  unknownLayout();
}

int frameLocalsplus(const py::handle&) {
  unknownLayout();
}

#endif

}  // namespace

void bindFrames(py::module_& module) {
  module.attr("frames_supported") = static_cast<bool>(REFT_FRAME_LAYOUT_KNOWN);
  module.def("frame_slots", &frameSlots, py::arg("frame"), py::arg("count"), py::arg("unbound"));
  module.def("frame_set_slot", &frameSetSlot, py::arg("frame"), py::arg("index"), py::arg("value"), py::arg("unbound"));
  module.def("frame_stack_depth", &frameStackDepth, py::arg("frame"));
  module.def("frame_localsplus", &frameLocalsplus, py::arg("frame"));
}

}  // namespace reft

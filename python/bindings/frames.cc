// The interpreter's own headers give the layout, so a changed struct is a compile error rather than
// a wrong read.
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
  int capacity;  // locals and the largest value stack
};

Slots slotsOf(const py::handle& object) {
  if (!PyFrame_Check(object.ptr())) {
    throw py::type_error("frame is " + std::string(Py_TYPE(object.ptr())->tp_name) +
                         "; allowed: frame");
  }
  auto* frame = reinterpret_cast<PyFrameObject*>(object.ptr());
  _PyInterpreterFrame* inner = frame->f_frame;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const int capacity = code->co_nlocalsplus + code->co_stacksize;
  Py_DECREF(code);
  return Slots{inner->localsplus, capacity};
}

py::list frameSlots(const py::handle& frame, int count, const py::object& unbound) {
  const Slots slots = slotsOf(frame);
  if (count < 0 || count > slots.capacity) {
    throw py::index_error("count is " + std::to_string(count) + "; allowed: 0 to " +
                          std::to_string(slots.capacity));
  }
  py::list result(count);
  for (int i = 0; i < count; ++i) {
    PyObject* value = slots.first[i];
    result[i] = value == nullptr ? unbound : py::reinterpret_borrow<py::object>(value);
  }
  return result;
}

void frameSetSlot(const py::handle& frame, int index, const py::object& value,
                  const py::object& unbound) {
  const Slots slots = slotsOf(frame);
  if (index < 0 || index >= slots.capacity) {
    throw py::index_error("index is " + std::to_string(index) + "; allowed: below " +
                          std::to_string(slots.capacity));
  }
  PyObject* old = slots.first[index];
  slots.first[index] = value.is(unbound) ? nullptr : py::object(value).release().ptr();
  // Last: a destructor may run any code, this slot's owner included.
  Py_XDECREF(old);
}

// Whether C code stands between a running frame and the Python code that called it: `list(map(f,
// …))` runs f that way, a plain call does not.
bool frameEnteredFromC(const py::handle& object) {
  slotsOf(object);  // refuses what is no frame
  _PyInterpreterFrame* inner = reinterpret_cast<PyFrameObject*>(object.ptr())->f_frame;
#if PY_VERSION_HEX >= 0x030C0000
  return inner->previous != nullptr && inner->previous->owner == FRAME_OWNED_BY_CSTACK;
#else
  return inner->is_entry;
#endif
}

PyGenObject* suspended(const py::handle& object) {
  if (!PyGen_CheckExact(object.ptr())) {
    throw py::type_error("generator is " + std::string(Py_TYPE(object.ptr())->tp_name) +
                         "; allowed: generator");
  }
  auto* generator = reinterpret_cast<PyGenObject*>(object.ptr());
  if (generator->gi_frame_state >= FRAME_EXECUTING) {
    throw py::value_error("generator is running or finished; allowed: one that is suspended");
  }
  return generator;
}

_PyInterpreterFrame* frameOf(PyGenObject* generator) {
  return reinterpret_cast<_PyInterpreterFrame*>(generator->gi_iframe);
}

PyCodeObject* codeOf(_PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
  return frame->f_code;
#endif
}

// Instruction in code units, as the interpreter keeps it, and the state byte.
py::tuple generatorPosition(const py::handle& object) {
  PyGenObject* generator = suspended(object);
  _PyInterpreterFrame* frame = frameOf(generator);
  return py::make_tuple(_PyInterpreterFrame_LASTI(frame),
                        static_cast<int>(generator->gi_frame_state));
}

void generatorSetPosition(const py::handle& object, int unit, int state, const py::list& stack) {
  PyGenObject* generator = suspended(object);
  _PyInterpreterFrame* frame = frameOf(generator);
  PyCodeObject* code = codeOf(frame);
  const int depth = static_cast<int>(stack.size());
  if (unit < -1 || unit >= static_cast<int>(Py_SIZE(code)) || state >= FRAME_EXECUTING ||
      depth > code->co_stacksize) {
    throw py::value_error("unit " + std::to_string(unit) + ", state " + std::to_string(state) +
                          ", depth " + std::to_string(depth) + ": not a place of this generator");
  }
  PyObject** first = frame->localsplus + code->co_nlocalsplus;
  py::list old;
  for (int i = 0; i < frame->stacktop - code->co_nlocalsplus; ++i) {
    if (first[i] != nullptr) {
      old.append(py::reinterpret_steal<py::object>(first[i]));
    }
    first[i] = nullptr;
  }
  for (int i = 0; i < depth; ++i) {
    first[i] = py::object(stack[i]).release().ptr();
  }
  frame->stacktop = code->co_nlocalsplus + depth;
#if PY_VERSION_HEX >= 0x030D0000
  frame->instr_ptr = _PyCode_CODE(code) + unit;
#else
  frame->prev_instr = _PyCode_CODE(code) + unit;
#endif
  generator->gi_frame_state = static_cast<int8_t>(state);
  // `old` goes last: a destructor may run any code.
}

#else

[[noreturn]] void unknownLayout() {
  throw std::runtime_error(
      "frame layout of this Python is not known; allowed: CPython 3.11 to 3.13 with a GIL");
}

py::list frameSlots(const py::handle&, int, const py::object&) {
  unknownLayout();
}

void frameSetSlot(const py::handle&, int, const py::object&, const py::object&) {
  unknownLayout();
}

bool frameEnteredFromC(const py::handle&) {
  unknownLayout();
}

py::tuple generatorPosition(const py::handle&) {
  unknownLayout();
}

void generatorSetPosition(const py::handle&, int, int, const py::list&) {
  unknownLayout();
}

#endif

}  // namespace

void bindFrames(py::module_& module) {
  module.def("frame_slots", &frameSlots, py::arg("frame"), py::arg("count"), py::arg("unbound"));
  module.def("frame_set_slot", &frameSetSlot, py::arg("frame"), py::arg("index"), py::arg("value"),
             py::arg("unbound"));
  module.def("frame_entered_from_c", &frameEnteredFromC, py::arg("frame"));
  module.def("generator_position", &generatorPosition, py::arg("generator"));
  module.def("generator_set_position", &generatorSetPosition, py::arg("generator"), py::arg("unit"),
             py::arg("state"), py::arg("stack"));
}

}  // namespace reft

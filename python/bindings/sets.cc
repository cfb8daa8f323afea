#include "python/bindings/sets.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace py = pybind11;

namespace reft {
namespace {

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
constexpr bool kKnown = true;
#else
constexpr bool kKnown = false;
#endif
constexpr size_t kMostSlots = size_t{1} << 24;

PySetObject* setOf(const py::handle& object) {
  if (!PyAnySet_Check(object.ptr())) {
    throw py::type_error("value is " + std::string(Py_TYPE(object.ptr())->tp_name) +
                         "; allowed: set, frozenset");
  }
  return reinterpret_cast<PySetObject*>(object.ptr());
}

// What the table holds where a member was removed. Such an entry keeps longer probes going.
PyObject* dummyKey() {
  static PyObject* const dummy = [] {
    py::set one;
    one.add(py::int_(0));
    PySet_Discard(one.ptr(), py::int_(0).ptr());
    return reinterpret_cast<PySetObject*>(one.ptr())->table[0].key;
  }();
  return dummy;
}

py::bytes packed(const std::vector<uint32_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint32_t)};
}

std::vector<uint32_t> unpacked(const std::string& bytes) {
  std::vector<uint32_t> values(bytes.size() / sizeof(uint32_t));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(uint32_t));
  return values;
}

// (slots - 1, where `pop` goes on, slot of each member in their order, slots of those that were
// removed); None if not known.
py::object setLayout(const py::handle& object) {
  const PySetObject* set = setOf(object);
  const auto slots = static_cast<size_t>(set->mask) + 1;
  if (!kKnown || slots > kMostSlots) {
    return py::none();
  }
  std::vector<uint32_t> members;
  std::vector<uint32_t> removed;
  for (size_t i = 0; i < slots; ++i) {
    const PyObject* key = set->table[i].key;
    if (key != nullptr) {
      (key == dummyKey() ? removed : members).push_back(static_cast<uint32_t>(i));
    }
  }
  return py::make_tuple(set->mask, set->finger, packed(members), packed(removed));
}

// Whether a set has these very members, in the order in which it is iterated.
bool setHolds(const py::handle& object, const py::list& before) {
  const PySetObject* set = setOf(object);
  const Py_ssize_t many = PyList_GET_SIZE(before.ptr());
  Py_ssize_t count = 0;
  for (Py_ssize_t i = 0; i <= set->mask; ++i) {
    const PyObject* key = set->table[i].key;
    if (key == nullptr || key == dummyKey()) {
      continue;
    }
    if (count == many || PyList_GET_ITEM(before.ptr(), count) != key) {
      return false;
    }
    ++count;
  }
  return count == many;
}

// Swaps the table of a set; the old one is in `entries` then.
void swapTable(PySetObject* set, std::vector<setentry>& entries) {
  std::vector<setentry> before(set->table, set->table + set->mask + 1);
  const size_t slots = entries.size();
  setentry* table = set->smalltable;
  if (slots != PySet_MINSIZE) {
    table = static_cast<setentry*>(PyMem_Malloc(slots * sizeof(setentry)));
    if (table == nullptr) {
      throw std::bad_alloc();
    }
  }
  if (set->table != set->smalltable) {
    PyMem_Free(set->table);
  }
  std::memcpy(table, entries.data(), slots * sizeof(setentry));
  set->table = table;
  set->mask = static_cast<Py_ssize_t>(slots) - 1;
  set->fill = set->used = 0;
  for (const setentry& entry : entries) {
    set->fill += entry.key != nullptr;
    set->used += entry.key != nullptr && entry.key != dummyKey();
  }
  set->hash = -1;
  entries.swap(before);
}

void release(const std::vector<setentry>& entries) {
  for (const setentry& entry : entries) {
    if (entry.key != nullptr && entry.key != dummyKey()) {
      Py_DECREF(entry.key);
    }
  }
}

// Gives a set these members, in this layout. False if they cannot be found there (their hashes are
// others in this process): the set is as it was then.
bool setPutLayout(const py::handle& object, const py::list& members, size_t mask, size_t finger,
                  const std::string& places, const std::string& removed) {
  PySetObject* set = setOf(object);
  const size_t slots = mask + 1;
  const std::vector<uint32_t> at = unpacked(places);
  const std::vector<uint32_t> gone = unpacked(removed);
  const bool power = slots >= PySet_MINSIZE && (slots & mask) == 0;
  if (!power || slots > kMostSlots || finger > slots || at.size() != members.size() ||
      at.size() + gone.size() >= slots) {
    throw py::value_error("no set has " + std::to_string(slots) + " slots for " +
                          std::to_string(members.size()) + " members");
  }
  if (!kKnown) {
    return false;
  }
  std::vector<setentry> entries(slots, setentry{nullptr, 0});
  for (const uint32_t slot : gone) {
    if (slot >= slots || entries[slot].key != nullptr) {
      throw py::value_error("slot " + std::to_string(slot) + " is taken twice, or there is none");
    }
    entries[slot] = {dummyKey(), -1};
  }
  for (size_t i = 0; i < at.size(); ++i) {
    if (at[i] >= slots || entries[at[i]].key != nullptr) {
      throw py::value_error("slot " + std::to_string(at[i]) + " is taken twice, or there is none");
    }
    PyObject* key = PyList_GET_ITEM(members.ptr(), static_cast<Py_ssize_t>(i));
    const Py_hash_t hash = PyObject_Hash(key);
    if (hash == -1) {
      throw py::error_already_set();
    }
    entries[at[i]] = {key, hash};
  }
  for (const setentry& entry : entries) {
    if (entry.key != dummyKey()) {
      Py_XINCREF(entry.key);
    }
  }
  const Py_ssize_t finger_before = set->finger;
  swapTable(set, entries);
  set->finger = static_cast<Py_ssize_t>(finger);
  for (const py::handle member : members) {
    if (PySet_Contains(object.ptr(), member.ptr()) != 1) {
      PyErr_Clear();
      swapTable(set, entries);
      set->finger = finger_before;
      release(entries);
      return false;
    }
  }
  release(entries);
  return true;
}

}  // namespace

void bindSets(py::module_& module) {
  module.def("set_layout", &setLayout, py::arg("set"));
  module.def("set_holds", &setHolds, py::arg("set"), py::arg("before"));
  module.def("set_put_layout", &setPutLayout, py::arg("set"), py::arg("members"), py::arg("mask"),
             py::arg("finger"), py::arg("places"), py::arg("removed"));
}

}  // namespace reft

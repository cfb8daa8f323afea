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

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "c10d_backend/call_site.h"
#include "intercept/base/hash.h"
#include "python/bindings/backend.h"

// Note [frames without the GIL]: torch releases the GIL before it calls a backend. The calling
// thread's own frames cannot change or go away while that thread is here, and what they refer to
// (code objects, their names) is immutable and kept alive by them, so reading needs no GIL as long
// as no reference count is touched and nothing is cached into an object.

namespace reft {
namespace {

#if REFT_FRAME_LAYOUT_KNOWN

constexpr int kDeepest = 48;  // frames looked at; deeper user code has no id

std::vector<std::string>& skipped() {
  static auto* skipped = new std::vector<std::string>;
  return *skipped;
}

PyCodeObject* codeOf(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  if (frame->owner == FRAME_OWNED_BY_CSTACK) {
    return nullptr;
  }
#endif
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
  return frame->f_code;
#endif
}

int instructionOf(const _PyInterpreterFrame* frame, PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030D0000
  const _Py_CODEUNIT* at = frame->instr_ptr;
#else
  const _Py_CODEUNIT* at = frame->prev_instr;
#endif
  return static_cast<int>(at - _PyCode_CODE(code));
}

bool usersFile(PyObject* filename) {
  if (!PyUnicode_IS_COMPACT_ASCII(filename)) {
    return true;  // none of the skipped folders, or an unusual installation
  }
  const auto* text = reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(filename));
  const auto length = static_cast<size_t>(PyUnicode_GET_LENGTH(filename));
  if (length > 0 && text[0] == '<' && length > 7 && std::memcmp(text, "<frozen", 7) == 0) {
    return false;
  }
  for (const std::string& prefix : skipped()) {
    if (length >= prefix.size() && std::memcmp(text, prefix.data(), prefix.size()) == 0) {
      return false;
    }
  }
  return true;
}

std::string utf8(PyObject* text) {
  std::string result;
  const Py_ssize_t length = PyUnicode_GET_LENGTH(text);
  for (Py_ssize_t i = 0; i < length; ++i) {
    const Py_UCS4 c = PyUnicode_READ_CHAR(text, i);
    if (c < 0x80) {
      result += static_cast<char>(c);
    } else if (c < 0x800) {
      result += static_cast<char>(0xC0 | (c >> 6));
      result += static_cast<char>(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
      result += static_cast<char>(0xE0 | (c >> 12));
      result += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
      result += static_cast<char>(0x80 | (c & 0x3F));
    } else {
      result += static_cast<char>(0xF0 | (c >> 18));
      result += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
      result += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
      result += static_cast<char>(0x80 | (c & 0x3F));
    }
  }
  return result;
}

uint32_t provide() noexcept {
  // The state of this thread, whether or not it holds the GIL; null in threads that never ran
  // Python.
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) {
    return 0;
  }
#if PY_VERSION_HEX >= 0x030D0000
  const _PyInterpreterFrame* frame = thread->current_frame;
#else
  const _PyInterpreterFrame* frame = thread->cframe->current_frame;
#endif
  for (int depth = 0; frame != nullptr && depth < kDeepest; ++depth, frame = frame->previous) {
    PyCodeObject* code = codeOf(frame);
    if (code == nullptr || !usersFile(code->co_filename)) {
      continue;
    }
    const int instruction = instructionOf(frame, code);
    const uint64_t place = (reinterpret_cast<uintptr_t>(code) >> 4) * kGoldenRatio;
    auto id = static_cast<uint32_t>(mixed(place + static_cast<uint64_t>(instruction)) >> 32);
    id = id == 0 ? 1 : id;
    if (!callSiteKnown(id)) {
      try {
        const int line =
            PyCode_Addr2Line(code, instruction * static_cast<int>(sizeof(_Py_CODEUNIT)));
        nameCallSite(id, utf8(code->co_filename) + ":" + std::to_string(line) + " " +
                             utf8(code->co_qualname));
      } catch (...) {  // no memory for a name
      }
    }
    return id;
  }
  return 0;
}

#endif

}  // namespace

void installCallSites(std::vector<std::string> skip) {
#if REFT_FRAME_LAYOUT_KNOWN
  skipped() = std::move(skip);
  setCallSiteProvider(&provide);
#else
  (void)skip;
#endif
}

}  // namespace reft

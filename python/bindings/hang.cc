#include "python/bindings/hang.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include "c10d_backend/call_site.h"
#include "c10d_backend/live_backends.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/rank/last_words.h"
#include "hang_detect/rank/stack_reply.h"
#include "hang_detect/rank/verdict_notice.h"
#include "hang_detect/report/report.h"
#include "hang_detect/stacks/python_layout.h"
#include "hang_detect/stacks/remote_stack.h"
#include "hang_detect/stacks/stack_dump.h"
#include "hang_detect/stacks/stacks.h"
#include "hang_detect/verdict/crash.h"
#include "hang_detect/verdict/verdict.h"
#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/unique_fd.h"
#include "intercept/record/device_ops.h"
#include "intercept/record/op_log.h"

namespace py = pybind11;

// Exported by CPython up to 3.12. Reads the interpreter's lists without locks, as faulthandler
// does.
extern "C" __attribute__((weak)) const char* _Py_DumpTracebackThreads(int fd,
                                                                      PyInterpreterState* interp,
                                                                      PyThreadState* current);
extern "C" __attribute__((weak)) struct pyruntimestate _PyRuntime;

// Note [stacks without the GIL]
// 1. Politely: a pending call asks the main thread to print all stacks between two bytecodes, with
//    the GIL held, so that nothing changes meanwhile. CPython up to 3.12 runs the pending call of
//    another thread when the main thread next takes the GIL, which a training loop does all the
//    time.
// 2. From memory, if the main thread does not run the call in time, because it is blocked or
//    computes in C, as in most hangs: with the reader that an agent uses from outside
//    (hang_detect/stacks/remote_stack.h). The other threads may run Python meanwhile and free what
//    is being read. CPython's own printer would then follow dangling pointers and kill a healthy
//    rank; a read through the kernel fails instead, and the thread is read again or marked.
// After 1, the main thread held the GIL. 2 names the holder and those who wait for it.

namespace reft {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPoliteWait{200};

bool rewind(int fd) {
  return ::ftruncate(fd, 0) == 0 && ::lseek(fd, 0, SEEK_SET) == 0;
}

// --- politely

enum class Ask : int { kOpen, kRunning, kPrinted, kFailed, kWithdrawn };

struct PoliteRequest {
  std::atomic<Ask> state{Ask::kOpen};
  UniqueFd fd;  // its own: it may be used after the asker has given up
};

bool printWithGil(int fd) {
  if (_Py_DumpTracebackThreads != nullptr) {
    return _Py_DumpTracebackThreads(fd, nullptr, PyThreadState_Get()) == nullptr;
  }
  try {
    py::module_::import("faulthandler").attr("dump_traceback")(fd, true);
    return true;
  } catch (const py::error_already_set&) {
    return false;
  }
}

int onPendingCall(void* argument) {
  const std::unique_ptr<std::shared_ptr<PoliteRequest>> holder(
      static_cast<std::shared_ptr<PoliteRequest>*>(argument));
  PoliteRequest& request = **holder;
  Ask expected = Ask::kOpen;
  if (request.state.compare_exchange_strong(expected, Ask::kRunning)) {
    request.state = printWithGil(request.fd.get()) ? Ask::kPrinted : Ask::kFailed;
  }
  return 0;
}

bool printPolitely(int fd, steady_clock::time_point deadline) {
  auto request = std::make_shared<PoliteRequest>();
  request->fd.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  auto* holder = new std::shared_ptr<PoliteRequest>(request);
  if (Py_AddPendingCall(&onPendingCall, holder) != 0) {
    delete holder;
    return false;
  }
  while (steady_clock::now() < deadline) {
    const Ask state = request->state;
    if (state == Ask::kPrinted || state == Ask::kFailed) {
      return state == Ask::kPrinted;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  Ask expected = Ask::kOpen;
  if (request->state.compare_exchange_strong(expected, Ask::kWithdrawn)) {
    return false;
  }
  // It is being printed right now: microseconds to milliseconds.
  const auto end = steady_clock::now() + kPoliteWait;
  while (request->state == Ask::kRunning && steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  return request->state == Ask::kPrinted;
}

// --- from memory

std::string printFromMemory(int fd) {
  Interpreter interpreter;
  interpreter.runtime = reinterpret_cast<uint64_t>(&_PyRuntime);
  interpreter.code_type = reinterpret_cast<uint64_t>(&PyCode_Type);
  interpreter.minor = PY_MINOR_VERSION;
  if (interpreter.runtime == 0) {
    return "the interpreter does not export _PyRuntime";
  }
  const RemoteStacks stacks = readOwnStacks(interpreter);
  const bool whole = ::write(fd, stacks.text.data(), stacks.text.size()) ==
                     static_cast<ssize_t>(stacks.text.size());
  return whole ? stacks.error : "the memory for stacks is full";
}

std::string printStacks(int fd, milliseconds timeout) {
  if (Py_IsInitialized() == 0) {
    return "the interpreter has ended";
  }
  if (printPolitely(fd, steady_clock::now() + std::min(kPoliteWait, timeout / 4))) {
    return "";
  }
  // Drop the partial text of a polite try that failed.
  if (!rewind(fd)) {
    return "cannot reset the memory for stacks";
  }
  return printFromMemory(fd);
}

}  // namespace

void bindHang(py::module_& module) {
  module.def(
      "install_stack_replies",
      [](AgentClient& client, int rank, bool device_marks) {
        processDeviceOps().use(device_marks);
        installStackReplies(client, rank, &printStacks);
      },
      py::arg("client"), py::arg("rank"), py::arg("device_marks"),
      "Lets `client` answer stack requests without the GIL, and streams say where ops stand on "
      "them. Call on the main thread, once per client.");
  module.def(
      "install_verdict_notices",
      [](AgentClient& client) { installVerdictNotices(client, &abortBackends); }, py::arg("client"),
      "Lets the agent print its verdict on standard error, and end this process if that is its "
      "action.");
  module.def(
      "install_fault_words",
      [](const std::shared_ptr<AgentClient>& client) { installFaultWords(client, &printStacks); },
      py::arg("client"),
      "Lets faults of native code tell the agent where Python stood. Call on the main thread.");
  module.def(
      "an_op_failed",
      [] {
        RankEvidence own;
        addOpLog(own, processOpLog().area(), processOpLog().areaBytes(),
                 SteadyClock::instance().nowNs());
        return aNewestOpFailed(own);
      },
      "Whether one of the newest ops of this process failed.");
  module.def(
      "dump_stacks",
      [](int64_t timeout_ms) {
        StackDump dump;
        {
          const py::gil_scoped_release release;
          StackDumper dumper(&printStacks);
          dump = dumper.dump(milliseconds(timeout_ms));
        }
        const py::str text = py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
            dump.text.data(), static_cast<Py_ssize_t>(dump.text.size()), "replace"));
        return py::make_tuple(text, dump.error);
      },
      py::arg("timeout_ms") = 1000,
      "(text, error) with the Python stacks of all threads of this process, for tests. On the main "
      "thread, which then runs no bytecode, from memory; else politely.");
  module.def(
      "parse_stacks",
      [](const std::string& text) {
        const auto decode = [](const std::string& bytes) {
          return py::reinterpret_steal<py::str>(
              PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
        };
        py::list threads;
        for (const ThreadStack& thread : parseStacks(text).threads) {
          py::list frames;
          for (const StackFrame& frame : thread.frames) {
            py::dict entry;
            entry["file"] = decode(frame.file);
            entry["line"] = frame.line;
            entry["function"] = decode(frame.function);
            frames.append(entry);
          }
          py::dict entry;
          entry["thread"] = decode(thread.thread);
          entry["name"] = decode(thread.name);
          entry["main"] = thread.main;
          entry["truncated"] = thread.truncated;
          entry["holds_gil"] = thread.holds_gil;
          entry["awaits_gil_of"] = decode(thread.awaits_gil_of);
          entry["frames"] = frames;
          threads.append(entry);
        }
        return threads;
      },
      py::arg("text"),
      "Threads of a faulthandler-style text, for tests: thread, name, main, truncated, holds_gil, "
      "awaits_gil_of, frames (newest first).");
  module.def(
      "python_layout",
      [](int minor) {
        py::dict fields;
        if (const PythonLayout* layout = minor == 13 ? &undescribedLayout() : pythonLayout(minor)) {
#define REFT_PYTHON_FIELD(name)                \
  if (layout->name != PythonLayout::kAbsent) { \
    fields[#name] = layout->name;              \
  }
          REFT_PYTHON_LAYOUT(REFT_PYTHON_FIELD)
#undef REFT_PYTHON_FIELD
        }
        return fields;
      },
      py::arg("minor"), "Offsets of fields of CPython 3.`minor` that the table has, for its test.");
  module.attr("verdict_version") = kVerdictVersion;
  module.def(
      "replay_verdict",
      [](const std::string& report) {
        std::string result;
        {
          const py::gil_scoped_release release;
          const auto evidence = evidenceFromJson(report);
          if (!evidence) {
            throw Corruption("not a hang report of version " + std::to_string(kVerdictVersion));
          }
          const bool crash = saysCrash(report);
          result = hangReportJson(*evidence, crash ? decideCrash(*evidence) : decide(*evidence));
        }
        return py::bytes(result);
      },
      py::arg("report"),
      "Recomputes a report on a hang or a crash (JSON) from its evidence. Raises Corruption if "
      "`report` is not a hang report of this version.");
}

}  // namespace reft

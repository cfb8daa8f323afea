#include "python/bindings/hang.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "c10d_backend/call_site.h"
#include "c10d_backend/live_backends.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/rank/stack_reply.h"
#include "hang_detect/rank/verdict_notice.h"
#include "hang_detect/report/report.h"
#include "hang_detect/stacks/gil_text.h"
#include "hang_detect/stacks/process_memory.h"
#include "hang_detect/stacks/python_memory.h"
#include "hang_detect/stacks/stack_dump.h"
#include "hang_detect/stacks/stacks.h"
#include "hang_detect/verdict/verdict.h"
#include "intercept/base/error.h"
#include "intercept/base/proc_stat.h"
#include "intercept/base/unique_fd.h"

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
// 2. Forcibly, if the main thread does not run the call in time. If it is on a CPU, a real-time
//    signal makes faulthandler print from its handler: the thread stands still while its frames are
//    read, and no system call is interrupted. If it is blocked in C, as in most hangs, its frames
//    stand still anyway, and CPython's own printer runs on the calling thread. 3.13 and newer do
//    not export that printer, so that there the signal is the only way.
// After 1, the main thread held the GIL. After 2, gilText() reads the holder from this process's
// memory. Each way prints at most 100 threads with 100 frames (CPython's limits). A forcible dump
// reads the frames of threads other than the main one while they may run.

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

// --- by signal

struct SignalPrinter {
  int number = 0;  // 0 = not set up
  UniqueFd memory;
  std::atomic<uint64_t> printed{0};  // signals whose text is complete
};

SignalPrinter& signalPrinter() {
  static auto* printer = new SignalPrinter;  // never destroyed: a late signal may still come
  return *printer;
}

// faulthandler prints first and then calls the handler that was there before: this one.
void onPrinted(int) {
  signalPrinter().printed.fetch_add(1);
}

// Makes faulthandler print into memory on a real-time signal that nobody uses. Needs the GIL and
// the main thread.
void setUpSignalPrinter() {
  SignalPrinter& printer = signalPrinter();
  if (printer.number != 0) {
    return;
  }
  UniqueFd memory(::memfd_create("reft-stack-signal", MFD_CLOEXEC));
  if (!memory) {
    throw SystemError("memfd_create");
  }
  for (int number = SIGRTMAX - 1; number > SIGRTMIN + 1; --number) {
    struct sigaction now {};
    if (::sigaction(number, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 ||
        now.sa_handler != SIG_DFL) {
      continue;
    }
    struct sigaction ours {};
    ours.sa_handler = &onPrinted;
    ours.sa_flags = SA_RESTART;
    ::sigemptyset(&ours.sa_mask);
    if (::sigaction(number, &ours, nullptr) != 0) {
      continue;
    }
    py::module_::import("faulthandler").attr("register")(number, memory.get(), true, true);
    printer.memory = std::move(memory);
    printer.number = number;
    return;
  }
  throw Unavailable("no real-time signal is free for stack dumps");
}

const char* printBySignal(int fd, steady_clock::time_point deadline) {
  SignalPrinter& printer = signalPrinter();
  if (printer.number == 0) {
    return "the main thread executes no Python and no stack signal is set up";
  }
  if (!rewind(printer.memory.get())) {
    return "stack signal: cannot reset its memory";
  }
  const uint64_t before = printer.printed;
  const auto pid = ::getpid();
  if (::syscall(SYS_tgkill, pid, pid, printer.number) != 0) {
    return "stack signal: tgkill failed";
  }
  while (printer.printed == before && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  char buffer[4096];
  off_t offset = 0;
  ssize_t got = 0;
  while ((got = ::pread(printer.memory.get(), buffer, sizeof(buffer), offset)) > 0) {
    if (::write(fd, buffer, static_cast<size_t>(got)) != got) {
      return "stack signal: short write";
    }
    offset += got;
  }
  return printer.printed == before ? "the main thread did not take the stack signal in time"
                                   : nullptr;
}

// 'R' while the main thread is on a CPU or wants one.
char mainThreadState() {
  const auto stat = threadStat(::getpid(), ::getpid());
  return stat ? stat->state : '?';
}

const char* printForcibly(int fd, steady_clock::time_point deadline) {
  if (_Py_DumpTracebackThreads == nullptr) {
    return printBySignal(fd, deadline);
  }
  if (mainThreadState() == 'R' && ::syscall(SYS_gettid) != ::getpid()) {
    const auto middle = steady_clock::now() + (deadline - steady_clock::now()) / 2;
    if (printBySignal(fd, middle) == nullptr) {
      return nullptr;
    }
    if (!rewind(fd)) {
      return "cannot reset the memory for stacks";
    }
  }
  return _Py_DumpTracebackThreads(fd, nullptr, nullptr);
}

std::string gilOfThisProcess() {
  const auto runtime = reinterpret_cast<uint64_t>(&_PyRuntime);
  std::string problem;
  ProcessMemory memory(::getpid());
  const ReadMemory read = [&memory](uint64_t address, void* into, size_t bytes) {
    return memory.read(address, into, bytes);
  };
  const auto layout =
      runtime == 0 ? std::nullopt : findPythonLayout(PY_MINOR_VERSION, read, runtime, problem);
  if (!layout) {
    return "";
  }
  PythonReader reader(read, *layout, runtime,
                      0);  // no frames are read, so no type of code is needed
  return gilText(::getpid(), reader, reader.all(false));
}

const char* printStacks(int fd, milliseconds timeout) {
  if (Py_IsInitialized() == 0) {
    return "the interpreter has ended";
  }
  const auto begin = steady_clock::now();
  if (printPolitely(fd, begin + std::min(kPoliteWait, timeout / 4))) {
    return nullptr;
  }
  // Drop the partial text of a polite try that failed.
  if (!rewind(fd)) {
    return "cannot reset the memory for stacks";
  }
  const char* problem = printForcibly(fd, begin + timeout);
  const std::string gil = gilOfThisProcess();
  return ::write(fd, gil.data(), gil.size()) == static_cast<ssize_t>(gil.size()) ||
                 problem != nullptr
             ? problem
             : "the memory for stacks is full";
}

const char* printBySignalOnly(int fd, milliseconds timeout) {
  return printBySignal(fd, steady_clock::now() + timeout);
}

}  // namespace

void bindHang(py::module_& module) {
  module.def(
      "install_stack_replies",
      [](AgentClient& client, int rank) {
        try {
          setUpSignalPrinter();
        } catch (const Error&) {
          if (_Py_DumpTracebackThreads == nullptr) {
            throw;
          }
        }
        installStackReplies(client, rank, &printStacks);
      },
      py::arg("client"), py::arg("rank"),
      "Lets `client` answer stack requests without the GIL. Call on the main thread, once per "
      "client.");
  module.def(
      "install_verdict_notices",
      [](AgentClient& client) { installVerdictNotices(client, &abortBackends); }, py::arg("client"),
      "Lets the agent print its verdict on standard error, and end this process if that is its "
      "action.");
  module.def(
      "dump_stacks",
      [](int64_t timeout_ms, bool by_signal) {
        if (by_signal) {
          setUpSignalPrinter();
        }
        StackDump dump;
        {
          const py::gil_scoped_release release;
          StackDumper dumper(by_signal ? &printBySignalOnly : &printStacks);
          dump = dumper.dump(milliseconds(timeout_ms));
        }
        const py::str text = py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
            dump.text.data(), static_cast<Py_ssize_t>(dump.text.size()), "replace"));
        return py::make_tuple(text, dump.error);
      },
      py::arg("timeout_ms") = 1000, py::arg("by_signal") = false,
      "(text, error) with the Python stacks of all threads of this process, for tests. "
      "`by_signal`: "
      "by that way only; call on the main thread.");
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
          result = hangReportJson(*evidence, decide(*evidence));
        }
        return py::bytes(result);
      },
      py::arg("report"),
      "Recomputes a hang report (JSON) from the evidence in `report` (JSON). Raises Corruption if "
      "`report` is not a hang report of this version.");
}

}  // namespace reft

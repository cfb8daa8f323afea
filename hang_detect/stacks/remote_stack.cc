#include "hang_detect/stacks/remote_stack.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "hang_detect/stacks/elf_symbols.h"
#include "hang_detect/stacks/gil_text.h"
#include "hang_detect/stacks/python_memory.h"
#include "hang_detect/stacks/stack_dump.h"
#include "hang_detect/stacks/stacks.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

struct Mapped {
  uint64_t address = 0;  // of the file's first byte
  std::string path;
};

// Files that may hold the interpreter: a shared libpython, then the program itself.
std::vector<Mapped> candidates(const std::vector<MappedRange>& maps, const std::string& program) {
  std::vector<Mapped> libraries, programs;
  for (const MappedRange& range : maps) {
    if (range.offset != 0) {
      continue;
    }
    const std::string name = range.path.substr(range.path.rfind('/') + 1);
    if (name.rfind("libpython3.", 0) == 0) {
      libraries.push_back({range.begin, range.path});
    } else if (!program.empty() && range.path == program) {
      programs.push_back({range.begin, range.path});
    }
  }
  libraries.insert(libraries.end(), programs.begin(), programs.end());
  return libraries;
}

std::optional<Interpreter> interpreterIn(int pid, const Mapped& mapped, const ReadMemory& memory) {
  const UniqueFd file = openMapped(pid, mapped.path);
  if (!file) {
    return std::nullopt;
  }
  const auto symbols = findElfSymbols(
      [&file](uint64_t offset, void* into, size_t bytes) {
        return offset <= INT64_MAX &&
               ::pread(file.get(), into, bytes, static_cast<off_t>(offset)) ==
                   static_cast<ssize_t>(bytes);
      },
      {"_PyRuntime", "PyCode_Type", "Py_Version", "_PyEval_EvalFrameDefault"});
  const auto address = [&](const char* name) -> uint64_t {
    const auto at = symbols->value.find(name);
    return at == symbols->value.end()
               ? 0
               : at->second + (symbols->moves ? mapped.address - symbols->first_address : 0);
  };
  if (!symbols || address("_PyRuntime") == 0 || address("PyCode_Type") == 0 ||
      address("Py_Version") == 0) {
    return std::nullopt;
  }
  // From its memory: the file may have been replaced since it was started.
  uint64_t version = 0;
  if (!memory(address("Py_Version"), &version, sizeof(version)) || version >> 24 != 3) {
    return std::nullopt;
  }
  return Interpreter{address("_PyRuntime"), address("PyCode_Type"),
                     address("_PyEval_EvalFrameDefault"), static_cast<int>(version >> 16 & 0xff)};
}

// "" in a container, too.
std::string nameOf(int pid, uint64_t tid) {
  int problem = 0;
  std::string name =
      readProcText(procPath(pid, "task/" + std::to_string(tid) + "/comm"), 64, problem);
  std::erase_if(name, [](unsigned char c) { return c < 0x20 || c > 0x7e || c == ']'; });
  return name;
}

void addThreads(int pid, const PythonThreads& found, RemoteStacks& result) {
  std::vector<const PythonThread*> threads;
  for (const PythonThread& thread : found.threads) {
    threads.push_back(&thread);
  }
  const auto isMain = [own = ownNumber(pid, pid)](const PythonThread* thread) {
    return thread->native_id == own;
  };
  std::stable_partition(threads.begin(), threads.end(), isMain);
  char line[96];
  for (const PythonThread* thread : threads) {
    const std::string name = nameOf(pid, thread->native_id);
    std::snprintf(line, sizeof(line),
                  "Thread 0x%016" PRIx64 "%s%.32s%s (most recent call first):\n", thread->id,
                  name.empty() ? "" : " [", name.c_str(), name.empty() ? "" : "]");
    result.text += line;
    for (const StackFrame& frame : thread->frames) {
      result.text += "  File \"" + frame.file + "\", line " +
                     (frame.line > 0 ? std::to_string(frame.line) : "???") + " in " +
                     frame.function + "\n";
    }
    if (thread->truncated) {
      result.text += "  ...\n";
    } else if (!thread->problem.empty()) {
      result.text += "  <" + thread->problem + ">\n";
    } else if (thread->frames.empty()) {
      result.text += "  <no Python frame>\n";
    }
    if (thread->moving) {
      result.text += "  <it went on while it was read: frames may be of different times>\n";
    }
  }
  const auto main = std::find_if(threads.begin(), threads.end(), isMain);
  if (main != threads.end()) {
    std::snprintf(line, sizeof(line), "Main thread 0x%016" PRIx64 "\n", (*main)->id);
    result.text += line;
  }
}

}  // namespace

uint64_t ownNumber(int pid, int tid) {
  const std::string numbers =
      statusField(procPath(pid, "task/" + std::to_string(tid) + "/status"), "NSpid");
  return numbers.empty()
             ? static_cast<uint64_t>(tid)
             : std::strtoull(numbers.c_str() + (numbers.find_last_of("\t ") + 1), nullptr, 10);
}

RemotePython::RemotePython(int pid) : memory_(pid) {
  int problem = 0;
  if (pid <= 0 || readProcText(procPath(pid, "stat"), 1024, problem).empty()) {
    stacks_.error = "there is no process " + std::to_string(pid);
    return;
  }
  readFrom(pid);
  stacks_.text += nativeThreads(pid);
}

RemotePython::RemotePython(int pid, const Interpreter& interpreter) : memory_(pid) {
  readThreads(pid, interpreter);
}

RemotePython::~RemotePython() = default;

void RemotePython::readFrom(int pid) {
  const std::string number = std::to_string(pid);
  int problem = 0;
  const auto maps = mapsOf(pid, problem);
  char link[4096];
  const ssize_t length = ::readlink(procPath(pid, "exe").c_str(), link, sizeof(link));
  if (length < 0 && problem == 0) {
    problem = errno;  // the map may be open to whom the rest is closed
  }
  const std::string program(link, length > 0 ? static_cast<size_t>(length) : 0);
  const ReadMemory memory = [this](uint64_t address, void* into, size_t bytes) {
    return memory_.read(address, into, bytes);
  };
  std::optional<Interpreter> interpreter;
  const auto files = candidates(maps, program);
  for (size_t i = 0; i < files.size() && !interpreter; ++i) {
    interpreter = interpreterIn(pid, files[i], memory);
  }
  if (!interpreter) {
    if (problem == EACCES || problem == EPERM || memory_.forbidden()) {
      stacks_.error = noRightToRead(pid);
    } else if (maps.empty()) {
      stacks_.error =
          "process " + number + " has no memory: it has ended, or is one of the kernel's";
    } else {
      stacks_.error =
          "process " + number + " is no CPython 3.11, 3.12 or 3.13 whose symbols can be found";
    }
    return;
  }
  readThreads(pid, *interpreter);
}

void RemotePython::readThreads(int pid, const Interpreter& interpreter) {
  const ReadMemory memory = [this](uint64_t address, void* into, size_t bytes) {
    return memory_.read(address, into, bytes);
  };
  stacks_.version = "3." + std::to_string(interpreter.minor);
  eval_function_ = interpreter.eval_function;
  if (const auto layout =
          findPythonLayout(interpreter.minor, memory, interpreter.runtime, stacks_.error)) {
    reader_ =
        std::make_unique<PythonReader>(memory, *layout, interpreter.runtime, interpreter.code_type);
    const PythonThreads threads = reader_->all();
    addThreads(pid, threads, stacks_);
    stacks_.text += gilText(pid, *reader_, threads);
    stacks_.error = threads.problem;
  }
}

std::optional<PythonThread> RemotePython::thread(uint64_t native_id) {
  return reader_ == nullptr ? std::nullopt : reader_->one(native_id);
}

RemoteStacks readRemoteStacks(int pid) {
  return RemotePython(pid).stacks();
}

RemoteStacks readOwnStacks(const Interpreter& interpreter) {
  return RemotePython(::getpid(), interpreter).stacks();
}

}  // namespace reft

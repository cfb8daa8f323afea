#include "hang_detect/remote_stack.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "hang_detect/elf_symbols.h"
#include "hang_detect/python_memory.h"
#include "hang_detect/stack_dump.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

constexpr size_t kMaxMaps = 16u << 20;  // bytes of text

std::string procPath(int pid, const std::string& name) {
  return "/proc/" + std::to_string(pid) + "/" + name;
}

std::string readText(const std::string& path, size_t limit, int& problem) {
  std::string text;
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  problem = file ? 0 : errno;
  while (file && text.size() < limit) {
    char chunk[16384];
    const ssize_t got = ::read(file.get(), chunk, sizeof(chunk));
    if (got <= 0) {
      problem = got < 0 ? errno : 0;
      break;
    }
    text.append(chunk, static_cast<size_t>(got));
  }
  return text;
}

// The memory of a process, by whichever of the two ways the kernel allows.
class ProcessMemory {
 public:
  explicit ProcessMemory(int pid) : pid_(pid) {}

  bool read(uint64_t address, void* into, size_t bytes) {
    if (!file_) {
      iovec local{into, bytes};
      iovec remote{reinterpret_cast<void*>(address), bytes};  // NOLINT(performance-no-int-to-ptr): of another process
      const ssize_t got = ::process_vm_readv(pid_, &local, 1, &remote, 1, 0);
      if (got == static_cast<ssize_t>(bytes)) {
        return true;
      }
      if (got >= 0 || (errno != EPERM && errno != ENOSYS && errno != EACCES)) {
        problem_ = got >= 0 ? EFAULT : errno;
        return false;
      }
      problem_ = errno;  // a container may forbid this call, and not the file
      file_.reset(::open(procPath(pid_, "mem").c_str(), O_RDONLY | O_CLOEXEC));
      if (!file_) {
        return false;
      }
    }
    if (address > INT64_MAX) {
      return false;
    }
    const ssize_t got = ::pread(file_.get(), into, bytes, static_cast<off_t>(address));
    problem_ = got < 0 ? errno : 0;
    return got == static_cast<ssize_t>(bytes);
  }
  bool forbidden() const { return problem_ == EPERM || problem_ == EACCES || problem_ == ENOSYS; }

 private:
  int pid_;
  UniqueFd file_;
  int problem_ = 0;
};

std::string noRight(int pid) {
  int problem = 0;
  std::string text =
      "no right to read the memory of process " + std::to_string(pid) + ": be its user, or have CAP_SYS_PTRACE";
  const std::string scope = readText("/proc/sys/kernel/yama/ptrace_scope", 8, problem);
  if (!scope.empty() && scope[0] != '0') {
    text += "; kernel.yama.ptrace_scope is " + scope.substr(0, 1) + ", which allows it to " +
            (scope[0] == '1'   ? "its parents only"
             : scope[0] == '2' ? "administrators only"
                               : "nobody");
  }
  return text;
}

struct Mapped {
  uint64_t address = 0;  // of the file's first byte
  std::string path;
};

// Files that may hold the interpreter: a shared libpython, then the program itself.
std::vector<Mapped> candidates(const std::string& maps, const std::string& program) {
  std::vector<Mapped> libraries, programs;
  for (size_t at = 0; at < maps.size();) {
    const size_t end = std::min(maps.find('\n', at), maps.size());
    const std::string line = maps.substr(at, end - at);
    at = end + 1;
    uint64_t from = 0, offset = 0;
    int path_at = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%*x %*s %" SCNx64 " %*s %*s %n", &from, &offset, &path_at) != 2 ||
        path_at <= 0 || offset != 0 || static_cast<size_t>(path_at) >= line.size()) {
      continue;
    }
    const std::string path = line.substr(static_cast<size_t>(path_at));
    const std::string name = path.substr(path.rfind('/') + 1);
    if (name.rfind("libpython3.", 0) == 0) {
      libraries.push_back({from, path});
    } else if (path == program) {
      programs.push_back({from, path});
    }
  }
  libraries.insert(libraries.end(), programs.begin(), programs.end());
  return libraries;
}

struct Interpreter {
  uint64_t runtime = 0, code_type = 0;
  int minor = 0;
};

std::optional<Interpreter> interpreterIn(int pid, const Mapped& mapped, const ReadMemory& memory) {
  // Through the process's own root, as it may have another one than this process.
  UniqueFd file(::open(procPath(pid, "root" + mapped.path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    file.reset(::open(mapped.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  }
  if (!file) {
    return std::nullopt;
  }
  const auto symbols = findElfSymbols(
      [&file](uint64_t offset, void* into, size_t bytes) {
        return offset <= INT64_MAX &&
               ::pread(file.get(), into, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
      },
      {"_PyRuntime", "PyCode_Type", "Py_Version"});
  if (!symbols || symbols->value.size() < 3) {
    return std::nullopt;
  }
  const auto address = [&](const char* name) {
    return symbols->value.at(name) + (symbols->moves ? mapped.address - symbols->first_address : 0);
  };
  // From its memory: the file may have been replaced since it was started.
  uint64_t version = 0;
  if (!memory(address("Py_Version"), &version, sizeof(version)) || version >> 24 != 3) {
    return std::nullopt;
  }
  return Interpreter{address("_PyRuntime"), address("PyCode_Type"), static_cast<int>(version >> 16 & 0xff)};
}

// The number by which the process knows itself: in a container it is another one.
uint64_t ownNumber(int pid) {
  int problem = 0;
  const std::string status = readText(procPath(pid, "status"), 16384, problem);
  const size_t at = status.find("\nNSpid:");
  if (at == std::string::npos) {
    return static_cast<uint64_t>(pid);
  }
  const std::string line = status.substr(at + 1, status.find('\n', at + 1) - at - 1);
  return std::strtoull(line.c_str() + line.find_last_of("\t ") + 1, nullptr, 10);
}

// "" in a container, too.
std::string nameOf(int pid, uint64_t tid) {
  int problem = 0;
  std::string name = readText(procPath(pid, "task/" + std::to_string(tid) + "/comm"), 64, problem);
  std::erase_if(name, [](unsigned char c) { return c < 0x20 || c > 0x7e || c == ']'; });
  return name;
}

void addThreads(int pid, const PythonThreads& found, RemoteStacks& result) {
  std::vector<const PythonThread*> threads;
  for (const PythonThread& thread : found.threads) {
    threads.push_back(&thread);
  }
  const auto isMain = [own = ownNumber(pid)](const PythonThread* thread) { return thread->native_id == own; };
  std::stable_partition(threads.begin(), threads.end(), isMain);
  char line[96];
  for (const PythonThread* thread : threads) {
    const std::string name = nameOf(pid, thread->native_id);
    std::snprintf(line, sizeof(line), "Thread 0x%016" PRIx64 "%s%.32s%s (most recent call first):\n", thread->id,
                  name.empty() ? "" : " [", name.c_str(), name.empty() ? "" : "]");
    result.text += line;
    for (const StackFrame& frame : thread->frames) {
      result.text += "  File \"" + frame.file + "\", line " + (frame.line > 0 ? std::to_string(frame.line) : "???") +
                     " in " + frame.function + "\n";
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

RemoteStacks readRemoteStacks(int pid) {
  RemoteStacks result;
  const std::string number = std::to_string(pid);
  int problem = 0;
  const std::string state = pid > 0 ? readText(procPath(pid, "stat"), 1024, problem) : "";
  if (state.empty()) {
    result.error = "there is no process " + number;
    return result;
  }
  const std::string maps = readText(procPath(pid, "maps"), kMaxMaps, problem);
  char link[4096];
  const ssize_t length = ::readlink(procPath(pid, "exe").c_str(), link, sizeof(link));
  const std::string program(link, length > 0 ? static_cast<size_t>(length) : 0);
  ProcessMemory process(pid);
  const ReadMemory memory = [&process](uint64_t address, void* into, size_t bytes) {
    return process.read(address, into, bytes);
  };
  std::optional<Interpreter> interpreter;
  const auto files = candidates(maps, program);
  for (size_t i = 0; i < files.size() && !interpreter; ++i) {
    interpreter = interpreterIn(pid, files[i], memory);
  }
  if (!interpreter) {
    if (problem == EACCES || problem == EPERM || process.forbidden()) {
      result.error = noRight(pid);
    } else if (maps.empty()) {
      result.error = "process " + number + " has no memory: it has ended, or is one of the kernel's";
    } else {
      result.error = "process " + number + " is no CPython 3.11, 3.12 or 3.13 whose symbols can be found";
    }
  } else {
    result.version = "3." + std::to_string(interpreter->minor);
    std::optional<PythonLayout> layout;
    if (const PythonLayout* known = pythonLayout(interpreter->minor)) {
      layout = *known;
    } else if (interpreter->minor == 13) {
      layout = readPythonLayout(memory, interpreter->runtime, result.error);
    } else {
      result.error = "process " + number + " is CPython " + result.version + "; its memory is known for 3.11 to 3.13";
    }
    if (layout) {
      const PythonThreads threads = readPythonThreads(memory, *layout, interpreter->runtime, interpreter->code_type);
      addThreads(pid, threads, result);
      result.error = threads.problem;
    }
  }
  result.text += nativeThreads(pid);
  return result;
}

}  // namespace reft

#include "hang_detect/unwind/thread_copy.h"

#include <dirent.h>
#include <elf.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace reft {

namespace {

constexpr size_t kMaxTasks = 4096;
constexpr uint64_t kMaxStack = 1u << 20;
constexpr uint64_t kRedZone = 128;  // below the stack pointer, in use by leaf functions
constexpr std::chrono::microseconds kShortestSleep{20};
constexpr std::chrono::microseconds kLongestSleep{1000};

std::string taskPath(int pid, int tid, const char* name) {
  return procPath(pid, "task/" + std::to_string(tid) + "/" + name);
}

std::string tracerText(int pid, int tracer) {
  int problem = 0;
  std::string name = readProcText(procPath(tracer, "comm"), 64, problem);
  name.erase(std::find(name.begin(), name.end(), '\n'), name.end());
  return (name.empty() ? std::string("a debugger") : name) + " (process " + std::to_string(tracer) +
         ") is attached to process " + std::to_string(pid) +
         ", and only one can be: native frames are to be had there, or once it has left";
}

std::string whyNoSeize(int pid, int tid, int problem) {
  if (problem == EPERM || problem == EACCES) {
    const int tracer = std::atoi(statusField(taskPath(pid, tid, "status"), "TracerPid").c_str());
    return tracer != 0 ? tracerText(pid, tracer) : noRightToRead(pid);
  }
  return std::string("it cannot be held: ") + std::strerror(problem);
}

// Holds a thread. Its destructor releases the thread and delivers the signal that was due.
class Hold {
 public:
  Hold(int tid, std::chrono::steady_clock::time_point deadline) : tid_(tid) {
    if (::ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) != 0) {
      seize_problem_ = errno;
      return;
    }
    seized_ = true;
    ::ptrace(PTRACE_INTERRUPT, tid, nullptr,
             nullptr);  // fails if the thread has ended, which waitpid() then reports
    auto sleep = kShortestSleep;
    for (;;) {
      int status = 0;
      const pid_t got = ::waitpid(tid, &status, __WALL | WNOHANG);
      if (got == tid && WIFSTOPPED(status)) {
        held_ = true;
        // A stop for ptrace's own sake, or a group stop: no signal. Else it is one that is
        // delivered when it goes on.
        signal_ = status >> 16 == PTRACE_EVENT_STOP ? 0 : WSTOPSIG(status);
        return;
      }
      if (got == tid || (got < 0 && errno != EINTR)) {
        seized_ = false;
        gone_ = true;
        return;
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        return;
      }
      std::this_thread::sleep_for(sleep);
      sleep = std::min(sleep * 2, kLongestSleep);
    }
  }
  ~Hold() {
    // Only a stopped thread can be detached; the kernel detaches others when this thread ends.
    if (seized_ && held_) {
      ::ptrace(PTRACE_DETACH, tid_, nullptr, static_cast<long>(signal_));
    }
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  bool held() const { return held_; }
  bool gone() const { return gone_ || seize_problem_ == ESRCH; }
  int seizeProblem() const { return seize_problem_; }

 private:
  int tid_;
  int seize_problem_ = 0;
  int signal_ = 0;
  bool seized_ = false, held_ = false, gone_ = false;
};

void copyStack(ProcessMemory& memory, const std::vector<MappedRange>& maps, CopiedThread& thread) {
  const uint64_t pointer = thread.registers.rsp;
  const auto in = [pointer](const MappedRange& range) {
    return range.begin <= pointer && pointer < range.end;
  };
  const auto range = std::find_if(maps.begin(), maps.end(), in);
  const uint64_t begin =
      std::max(range == maps.end() ? pointer : range->begin, pointer - std::min(pointer, kRedZone));
  // A new thread's mapping may be newer than `maps`.
  const uint64_t end =
      range == maps.end() ? pointer + kMaxStack / 16 : std::min(range->end, pointer + kMaxStack);
  thread.stack.resize(end - begin);
  thread.stack_begin = begin;
  if (!memory.read(begin, thread.stack.data(), thread.stack.size())) {
    thread.stack.clear();  // read on demand
  }
}

}  // namespace

CopiedThread copyThread(int pid, int tid, ProcessMemory& memory,
                        const std::vector<MappedRange>& maps,
                        std::chrono::steady_clock::time_point deadline,
                        const std::function<void()>& while_held) {
  CopiedThread thread;
  thread.tid = tid;
  int problem = 0;
  thread.name = readProcText(taskPath(pid, tid, "comm"), 64, problem);
  thread.name.erase(std::find(thread.name.begin(), thread.name.end(), '\n'), thread.name.end());
  thread.state = statusField(taskPath(pid, tid, "status"), "State").substr(0, 1);
  if (thread.state.empty() || thread.state == "Z" || thread.state == "X") {
    thread.gone = true;
    thread.problem = "it has ended";
    return thread;
  }
  const Hold hold(tid, deadline);
  if (hold.gone()) {
    thread.gone = true;
    thread.problem = "it has ended";
  } else if (hold.seizeProblem() != 0) {
    thread.problem = whyNoSeize(pid, tid, hold.seizeProblem());
  } else if (!hold.held()) {
    std::string channel = readProcText(taskPath(pid, tid, "wchan"), 64, problem);
    if (channel == "0") {
      channel.clear();
    }
    thread.problem = "blocked in the kernel, where nothing interrupts it" +
                     (channel.empty() ? "" : " (" + channel + ")");
  } else {
    iovec registers{&thread.registers, sizeof(thread.registers)};
    if (::ptrace(PTRACE_GETREGSET, tid, reinterpret_cast<void*>(NT_PRSTATUS), &registers) != 0) {
      thread.gone = errno == ESRCH;
      thread.problem = thread.gone
                           ? "it has ended"
                           : std::string("its registers cannot be read: ") + std::strerror(errno);
    } else if (registers.iov_len != sizeof(thread.registers) || thread.registers.cs == 0x23) {
      thread.problem = "it runs code of 32 bits; only 64 bits can be unwound";
    } else {
      copyStack(memory, maps, thread);
      while_held();
    }
  }
  return thread;
}

std::vector<int> tasksOf(int pid) {
  std::vector<int> tasks;
  DIR* directory = ::opendir(procPath(pid, "task").c_str());
  if (directory == nullptr) {
    return tasks;
  }
  while (const dirent* entry = ::readdir(directory)) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) != 0 &&
        tasks.size() < kMaxTasks) {
      tasks.push_back(std::atoi(entry->d_name));
    }
  }
  ::closedir(directory);
  std::sort(tasks.begin(), tasks.end());
  std::stable_partition(tasks.begin(), tasks.end(), [pid](int tid) { return tid == pid; });
  return tasks;
}

}  // namespace reft

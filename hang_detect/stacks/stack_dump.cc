#include "hang_detect/stacks/stack_dump.h"

#include <algorithm>
#include <cctype>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <dirent.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "intercept/base/proc_stat.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

constexpr size_t kMaxNativeThreads = 4096;

std::string readAll(int fd, size_t limit) {
  std::string text;
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    return text;
  }
  text.resize(std::min(static_cast<size_t>(info.st_size), limit));
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t got =
        ::pread(fd, text.data() + have, text.size() - have, static_cast<off_t>(have));
    if (got <= 0) {
      break;
    }
    have += static_cast<size_t>(got);
  }
  text.resize(have);
  return text;
}

// "S comm", printable; "" if the thread is gone.
std::string describeTask(int pid, const char* tid) {
  const auto stat = threadStat(pid, std::atoi(tid));
  if (!stat) {
    return "";
  }
  std::string name(stat->name());
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return std::string(1, stat->state) + " " + name;
}

}  // namespace

std::string nativeThreads(int pid) {
  std::string text;
  DIR* directory = ::opendir(("/proc/" + std::to_string(pid) + "/task").c_str());
  if (directory == nullptr) {
    return text;
  }
  size_t count = 0;
  while (const dirent* entry = ::readdir(directory)) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) == 0 ||
        ++count > kMaxNativeThreads) {
      continue;
    }
    const std::string task = describeTask(pid, entry->d_name);
    if (!task.empty()) {
      text.append("Native thread ").append(entry->d_name).append(" ").append(task).append("\n");
    }
  }
  ::closedir(directory);
  return text;
}

StackDumper::StackDumper(StackPrinter printer) : printer_(printer) {
  if (::syscall(SYS_gettid) == ::getpid()) {
    main_thread_ = static_cast<unsigned long>(::pthread_self());
  }
}

StackDump StackDumper::dump(std::chrono::milliseconds timeout) {
  StackDump result;
  timeout = std::clamp(timeout, std::chrono::milliseconds(0), kMaxTimeout);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  {
    const MutexLock lock(mutex_);
    if (!idle_.wait_until(mutex_, deadline, [this]() REQUIRES(mutex_) { return !dumping_; })) {
      result.error = "another stack dump is still in progress";
      return result;
    }
    dumping_ = true;
  }
  // Declared after the result: the next dump starts once this result is complete.
  const std::unique_ptr<StackDumper, void (*)(StackDumper*)> turn(this, [](StackDumper* dumper) {
    {
      const MutexLock lock(dumper->mutex_);
      dumper->dumping_ = false;
    }
    dumper->idle_.notify_one();
  });
  UniqueFd memory(::memfd_create("reft-stacks", MFD_CLOEXEC));
  if (!memory) {
    result.error = std::string("memfd_create: ") + std::strerror(errno);
    return result;
  }
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  result.error = printer_ == nullptr
                     ? "no stack printer"
                     : printer_(memory.get(), std::max(left, std::chrono::milliseconds(0)));
  result.text = readAll(memory.get(), kMaxTextBytes);
  if (!result.text.empty() && result.text.back() != '\n') {
    result.text.push_back('\n');
  }
  if (main_thread_ != 0 && result.text.find("\nMain thread ") == std::string::npos) {
    char line[64];
    std::snprintf(line, sizeof(line), "Main thread 0x%016lx\n", main_thread_);
    result.text += line;
  }
  result.text += nativeThreads(::getpid());
  return result;
}

}  // namespace reft

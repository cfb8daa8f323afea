#include "agent/hang/native_readers.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include <nlohmann/json.hpp>

#include "intercept/base/error.h"
#include "intercept/base/unique_fd.h"

extern char** environ;

namespace reft::agent {

namespace {

using std::chrono::steady_clock;

constexpr size_t kMaxRunning = 16;
constexpr size_t kMaxText = 32u << 20;
constexpr std::chrono::milliseconds kEndWait{1000};

std::string failure(const std::string& why) {
  return nlohmann::json{{"error", why}}.dump(-1, ' ', false,
                                             nlohmann::json::error_handler_t::replace);
}

// Waits until it is dead. One that SIGKILL does not reach in time is left to the kernel.
void reap(pid_t child) {
  const auto deadline = steady_clock::now() + kEndWait;
  while (::waitpid(child, nullptr, WNOHANG) == 0 && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::string readWith(const std::string& program, int pid, std::chrono::milliseconds limit) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return failure(std::string("pipe2: ") + std::strerror(errno));
  }
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, to.get(), STDOUT_FILENO);
  std::string words[] = {program, std::to_string(pid)};
  char* arguments[] = {words[0].data(), words[1].data(), nullptr};
  pid_t child = 0;
  const int problem = ::posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  to.reset();
  if (problem != 0) {
    return failure("cannot start " + program + ": " + std::strerror(problem));
  }
  std::string text;
  const auto deadline = steady_clock::now() + limit;
  bool ended = false;
  while (!ended && text.size() < kMaxText) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now())
            .count();
    pollfd ready{from.get(), POLLIN, 0};
    const int count = left <= 0 ? 0 : ::poll(&ready, 1, static_cast<int>(left));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      break;
    }
    char chunk[16384];
    const ssize_t got = ::read(from.get(), chunk, sizeof(chunk));
    ended = got <= 0;
    text.append(chunk, static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
  ::kill(child, SIGKILL);  // harmless if it has ended: its number is kept for waitpid()
  reap(child);
  if (!ended) {
    return failure("process " + std::to_string(pid) + " cannot be read within " +
                   std::to_string(std::chrono::duration_cast<std::chrono::seconds>(limit).count()) +
                   " s");
  }
  return nlohmann::json::accept(text) ? text : failure("the reader of its stacks failed");
}

}  // namespace

std::string NativeReaders::besideThisProgram() {
  std::error_code unread;
  return std::filesystem::read_symlink("/proc/self/exe", unread).replace_filename("reft-unwind");
}

NativeReaders::NativeReaders(std::string program, std::chrono::milliseconds limit)
    : program_(std::move(program)), limit_(limit) {}

void NativeReaders::start(uint64_t requester, int pid) {
  {
    const MutexLock lock(shared_->mutex);
    if (shared_->running >= kMaxRunning) {
      throw InvalidArgument("native", "the " + std::to_string(kMaxRunning + 1) + "th at a time",
                            "fewer");
    }
    ++shared_->running;
  }
  const auto finish = [shared = shared_, requester](std::string answer) {
    const MutexLock lock(shared->mutex);
    --shared->running;
    shared->finished.emplace_back(requester, std::move(answer));
  };
  try {
    std::thread thread([finish, program = program_, limit = limit_, pid] {
      std::string answer;
      try {
        answer = readWith(program, pid, limit);
      } catch (...) {  // no memory left
        answer = R"({"error": "its memory cannot be read now"})";
      }
      finish(std::move(answer));
    });
    ::pthread_setname_np(thread.native_handle(), "agent-native");
    thread.detach();
  } catch (const std::system_error&) {
    finish(failure("no more threads can be started"));
  }
}

std::vector<std::pair<uint64_t, std::string>> NativeReaders::finished() {
  const MutexLock lock(shared_->mutex);
  return std::exchange(shared_->finished, {});
}

}  // namespace reft::agent

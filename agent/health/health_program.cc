#include "agent/health/health_program.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "hang_detect/evidence/hardware_sample.h"
#include "intercept/base/log.h"

extern char** environ;

namespace reft::agent {

namespace {

// Killed programs that the driver still holds. With so many, no other one is started.
constexpr size_t kMostHeld = 2;

// The agent's environment without what is for ranks: settings of reft, by which processes of the
// job are found, and libraries that are preloaded into them.
std::vector<char*> environment() {
  std::vector<char*> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (!text.starts_with("REFT_") && !text.starts_with("LD_PRELOAD=") &&
        !text.starts_with("LD_AUDIT=")) {
      kept.push_back(*entry);
    }
  }
  kept.push_back(nullptr);
  return kept;
}

}  // namespace

std::string HealthProgram::besideThisProgram() {
  std::error_code unread;
  return std::filesystem::read_symlink("/proc/self/exe", unread).replace_filename("reft-health");
}

HealthProgram::HealthProgram(std::string path, std::vector<std::string> arguments)
    : path_(std::move(path)), arguments_(std::move(arguments)) {}

HealthProgram::~HealthProgram() {
  kill();
}

bool HealthProgram::start() {
  reap();
  if (ended_.size() >= kMostHeld) {
    return false;
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return false;
  }
  UniqueFd ours(ends[0]);
  const UniqueFd theirs(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDOUT_FILENO);
  // The libraries that it loads may print; the agent's log is not theirs.
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::vector<char*> words{path_.data()};
  for (std::string& argument : arguments_) {
    words.push_back(argument.data());
  }
  words.push_back(nullptr);
  const int problem =
      ::posix_spawn(&child_, path_.c_str(), &actions, nullptr, words.data(), environment().data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (problem != 0) {
    child_ = 0;
    if (!std::exchange(reported_, true)) {
      logWarn("agent", "cannot start ", path_, ": ", std::strerror(problem),
              ": no hardware counters");
    }
    return false;
  }
  ::fcntl(ours.get(), F_SETFL, O_NONBLOCK);  // of this end only
  socket_ = std::move(ours);
  text_.clear();
  ++starts_;
  return true;
}

bool HealthProgram::ask() {
  if (!socket_ && !start()) {
    return false;
  }
  const char request = '\n';
  // A full buffer holds requests that it has not taken.
  if (::send(socket_.get(), &request, 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN) {
    kill();
    return false;
  }
  return true;
}

std::optional<std::string> HealthProgram::line() {
  while (socket_) {
    if (const size_t end = text_.find('\n'); end != text_.npos) {
      std::string line = text_.substr(0, end);
      text_.erase(0, end + 1);
      return line;
    }
    if (text_.size() > kMaxSampleBytes) {
      kill();
      break;
    }
    char chunk[65536];
    const ssize_t got = ::recv(socket_.get(), chunk, sizeof(chunk), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      break;
    }
    if (got <= 0) {
      kill();
      break;
    }
    text_.append(chunk, static_cast<size_t>(got));
  }
  reap();
  return std::nullopt;
}

void HealthProgram::kill() {
  socket_.reset();
  text_.clear();
  if (child_ > 0) {
    ::kill(child_, SIGKILL);
    ended_.push_back(std::exchange(child_, 0));
  }
  reap();
}

void HealthProgram::reap() {
  std::erase_if(ended_, [](pid_t child) {
    const pid_t got = ::waitpid(child, nullptr, WNOHANG);
    return got == child || (got < 0 && errno == ECHILD);
  });
}

}  // namespace reft::agent

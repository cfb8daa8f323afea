#include "intercept/link/agent_start.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/unique_fd.h"

namespace reft {

void startAgent(const std::vector<std::string>& argv, std::chrono::milliseconds timeout) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw SystemError("pipe2");
  }
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  std::vector<char*> arguments;
  arguments.reserve(argv.size() + 1);
  for (const std::string& argument : argv) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  // Signals that a launcher blocked or ignores must not be inherited by a daemon.
  sigset_t none;
  sigset_t all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t child = -1;
  const int failed =
      ::posix_spawn(&child, argv.at(0).c_str(), &actions, &attributes, arguments.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) {
    throw Unavailable("cannot start the agent " + argv[0] + ": " + std::strerror(failed) +
                      "; set REFT_AGENT_PATH, or reinstall reft");
  }
  write_end.reset();
  const int64_t deadline =
      SteadyClock::instance().nowNs() + std::chrono::nanoseconds(timeout).count();
  std::string line;
  while (line.find('\n') == std::string::npos) {
    const int64_t left_ms = (deadline - SteadyClock::instance().nowNs()) / 1'000'000;
    pollfd waiting{read_end.get(), POLLIN, 0};
    const int ready = left_ms <= 0 ? 0 : ::poll(&waiting, 1, static_cast<int>(left_ms));
    if (ready < 0 && errno == EINTR) {
      continue;
    }
    if (ready == 0) {
      throw Timeout("the agent " + argv[0] + " did not listen in time");
    }
    char buffer[256];
    const ssize_t got = ::read(read_end.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      break;
    }
    line.append(buffer, static_cast<size_t>(got));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const bool clean = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (clean) {
    return;
  }
  if (line.starts_with(kAgentFailed)) {
    throw Unavailable("the agent cannot start: " +
                      line.substr(kAgentFailed.size(), line.find('\n') - kAgentFailed.size()));
  }
  throw Unavailable("the agent " + argv[0] +
                    " ended before it listened; its log is agent.log in the run directory");
}

}  // namespace reft

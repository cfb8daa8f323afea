#include "agent/daemon.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "intercept/base/error.h"
#include "intercept/base/safe_files.h"

namespace reft::agent {

namespace {

void ownDirectory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw SystemError("mkdir " + path);
  }
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    throw SystemError("lstat " + path);
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0) {
    throw Unavailable(
        path + " must be a directory of this user with mode 0700; remove it, or set REFT_RUN_DIR");
  }
}

void closeRange(unsigned first, unsigned last) {
  if (first > last) {
    return;
  }
#ifdef SYS_close_range
  if (::syscall(SYS_close_range, first, last, 0) == 0) {
    return;
  }
#endif
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const auto end = static_cast<unsigned>(std::min<rlim_t>(limit.rlim_cur, 1u << 20));
  for (unsigned fd = first; fd <= last && fd < end; ++fd) {
    ::close(static_cast<int>(fd));
  }
}

}  // namespace

void makeDirectories(const std::string& run_dir, const std::string& job, int node) {
  // Parents of the run directory are the user's business, but have to exist: create what is
  // missing, as mkdir -p.
  for (size_t slash = run_dir.find('/', 1); slash != std::string::npos;
       slash = run_dir.find('/', slash + 1)) {
    ::mkdir(run_dir.substr(0, slash).c_str(), 0700);
  }
  ownDirectory(run_dir);
  if (const auto problem = chainProblem(run_dir); !problem.empty()) {
    throw Unavailable("run directory " + run_dir + " is not safe: " + problem +
                      "; mend that, or set REFT_RUN_DIR");
  }
  ownDirectory(run_dir + "/" + job);
  ownDirectory(run_dir + "/" + job + "/node-" + std::to_string(node));
}

UniqueFd daemonise(const std::string& log_path) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw SystemError("pipe2");
  }
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  const pid_t first = ::fork();
  if (first < 0) {
    throw SystemError("fork");
  }
  if (first > 0) {
    write_end.reset();
    // Not before the child in between is gone: it must not stay as a zombie of the starter.
    while (::waitpid(first, nullptr, 0) < 0 && errno == EINTR) {
    }
    unsigned char status = 1;  // the daemon died before it said anything
    ssize_t got;
    do {
      got = ::read(read_end.get(), &status, 1);
    } while (got < 0 && errno == EINTR);
    ::_exit(got == 1 ? status : 1);
  }
  ::setsid();
  const pid_t second = ::fork();
  if (second != 0) {
    ::_exit(second < 0 ? 1 : 0);
  }
  if (::chdir("/") != 0) {
    throw SystemError("chdir /");
  }
  ::umask(077);
  UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  UniqueFd log(::open(log_path.c_str(),
                      O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
  ::dup2(nothing.get(), STDIN_FILENO);
  ::dup2(log ? log.get() : nothing.get(), STDERR_FILENO);
  nothing.reset();
  log.reset();
  read_end.reset();
  const auto keep = static_cast<unsigned>(write_end.get());
  closeRange(3, keep - 1);
  closeRange(keep + 1, ~0u);
  return write_end;
}

void ready(UniqueFd parent, int status, const std::string& line) {
  if (!line.empty()) {
    const auto text = line + "\n";
    [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, text.data(), text.size());
  }
  if (parent) {
    UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
    ::dup2(nothing.get(), STDOUT_FILENO);
    const auto byte = static_cast<unsigned char>(status);
    [[maybe_unused]] const auto written = ::write(parent.get(), &byte, 1);
  }
}

}  // namespace reft::agent

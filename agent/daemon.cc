#include "agent/daemon.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "intercept/base/error.h"

namespace reft::agent {

namespace {

constexpr int kBacklog = 1024;

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

// A path of any length as a socket address: long ones go through the open directory.
sockaddr_un address(const std::string& directory, const UniqueFd& handle) {
  sockaddr_un result{};
  result.sun_family = AF_UNIX;
  std::string path = directory + "/agent.sock";
  if (path.size() >= sizeof(result.sun_path)) {
    path = "/proc/self/fd/" + std::to_string(handle.get()) + "/agent.sock";
  }
  std::memcpy(result.sun_path, path.c_str(), path.size() + 1);
  return result;
}

UniqueFd openDirectory(const std::string& directory) {
  UniqueFd handle(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!handle) {
    throw SystemError("open " + directory);
  }
  return handle;
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
  UniqueFd log(
      ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600));
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

UniqueFd lockDirectory(const std::string& directory) {
  const auto path = directory + "/agent.lock";
  for (int i = 0; i < 100; ++i) {
    UniqueFd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!lock) {
      throw SystemError("open " + path);
    }
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK || errno == EINTR) {
        return UniqueFd();
      }
      throw SystemError("flock " + path);
    }
    // An agent that ended in between removed the file: the lock is worth something only on the one
    // that is there.
    struct stat ours {};
    struct stat there {};
    if (::fstat(lock.get(), &ours) == 0 && ::stat(path.c_str(), &there) == 0 &&
        ours.st_ino == there.st_ino && ours.st_dev == there.st_dev) {
      return lock;
    }
  }
  throw Unavailable(path + " keeps changing; is the directory shared between hosts?");
}

UniqueFd listenOn(const std::string& directory) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw SystemError("socket");
  }
  const auto handle = openDirectory(directory);
  const auto where = address(directory, handle);
  ::unlink((directory + "/agent.sock").c_str());
  const mode_t before = ::umask(0177);
  const int bound = ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where));
  const int code = errno;
  ::umask(before);
  if (bound != 0) {
    throw SystemError("bind " + directory + "/agent.sock", code);
  }
  if (::listen(socket.get(), kBacklog) != 0) {
    throw SystemError("listen");
  }
  return socket;
}

bool answers(const std::string& directory) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const UniqueFd handle(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!socket || !handle) {
    return false;
  }
  const auto where = address(directory, handle);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0 ||
         errno == EAGAIN;
}

}  // namespace reft::agent

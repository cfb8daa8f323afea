#include "agent/run_place.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "agent/daemon.h"
#include "agent/hang/investigation_runner.h"
#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/hash.h"
#include "intercept/base/log.h"
#include "intercept/base/safe_files.h"

namespace reft::agent {

namespace {

constexpr int kBacklog = 1024;
constexpr int kKnocks = 16;  // that wait, and that are answered at a time
constexpr char kSocket[] = "agent.sock";
constexpr char kLock[] = "agent.lock";

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * kSecond + time.tv_nsec;
}

// The socket in the directory `at`, for paths of any length.
UnixAddress socketIn(const UniqueFd& at) {
  UnixAddress result;
  result.name.sun_family = AF_UNIX;
  std::snprintf(result.name.sun_path, sizeof(result.name.sun_path), "/proc/self/fd/%d/%s", at.get(),
                kSocket);
  return result;
}

// In the abstract namespace, which needs no file: one name for each user, job, node and place.
// Containers that share a network may each have such a place of their own.
UnixAddress claimOf(const AgentOptions& options) {
  const std::string place = options.fallback_run_dir.empty() ? options.run_dir : "default";
  uint64_t one = 1;
  uint64_t two = 2;
  char mounts[64] = "";
  [[maybe_unused]] const auto got = ::readlink("/proc/self/ns/mnt", mounts, sizeof(mounts) - 1);
  for (const char byte :
       place + "\n" + options.job + "\n" + std::to_string(options.node) + mounts) {
    one = hashCombine(one, static_cast<unsigned char>(byte));
    two = mixed(two ^ static_cast<unsigned char>(byte)) + kGoldenRatio;
  }
  char name[64];
  std::snprintf(name, sizeof(name), "reft-agent-%u-%016llx%016llx", ::geteuid(),
                static_cast<unsigned long long>(one), static_cast<unsigned long long>(two));
  return abstractAddress(name);
}

// Whether an agent of this user listens in `directory`.
bool answers(const std::string& directory) {
  const UniqueFd handle(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!handle) {
    return false;
  }
  const auto peer = listenerAt(socketIn(handle));
  return peer ? peer->pid > 0 && peer->uid == ::geteuid() : errno == EAGAIN;
}

// True if an agent answers within a second: one that has just taken the place needs a moment to
// listen, and one that was knocked on to come back.
bool waitForOther(const std::string& directory) {
  for (int i = 0; i < 100; ++i) {
    if (answers(directory)) {
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

std::string contents(int fd) {
  char text[256];
  const ssize_t got = ::pread(fd, text, sizeof(text), 0);
  std::string line(text, static_cast<size_t>(std::max<ssize_t>(got, 0)));
  line.resize(std::min(line.find('\n'), line.size()));
  const bool plain =
      std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c < 127; });
  return plain ? line : "";
}

// "fence <number> pid <pid> boot <boot id>".
uint64_t fenceIn(const std::string& line) {
  constexpr std::string_view kKey = "fence ";
  uint64_t number = 0;
  if (line.starts_with(kKey)) {
    std::from_chars(line.data() + kKey.size(), line.data() + line.size(), number);
  }
  return number;
}

}  // namespace

RunPlace::RunPlace(AgentOptions& options, Owner (*ask)(const UnixAddress&))
    : options_(options), wanted_run_dir_(options.run_dir), ask_(ask) {}

RunPlace::Taken RunPlace::take(std::string& other) {
  for (int i = 0; i < 5; ++i) {
    makeDirectories(options_.run_dir, options_.job,
                    options_.node);  // an ending agent may have removed them
    // An agent that is just starting has bound its claim and listens in a moment.
    const bool patient = i == 0;
    if (takeClaim(patient, other) && settle(options_.run_dir, other)) {
      return Taken::kOurs;
    }
    if (waitForOther(path())) {
      return Taken::kServed;
    }
  }
  return Taken::kSilent;
}

// False: another agent of this user has the claim, and looks at its place now, or, if `patient`,
// one may have it.
bool RunPlace::takeClaim(bool patient, std::string& other) {
  auto owner = Owner::kNobody;
  // kNobody: the process that had it has ended in between.
  for (int i = 0; i < 3 && owner == Owner::kNobody; ++i) {
    if (claim_ || bindClaim()) {
      return true;
    }
    if (errno != EADDRINUSE) {
      throw SystemError("bind the claim of the agent");
    }
    const auto holder = holderOf(claimOf(options_), ask_);
    owner = holder.owner;
    other = (owner == Owner::kThisUser ? "another agent of this job" : "an unknown process") +
            (holder.pid > 0 ? " (pid " + std::to_string(holder.pid) + ")" : "") +
            (owner == Owner::kThisUser ? " runs on this host" : " holds the claim of this job");
  }
  if (owner == Owner::kThisUser || (owner != Owner::kAnotherUser && patient)) {
    return false;
  }
  logWarn("agent", owner == Owner::kAnotherUser ? "another user" : "an unknown process",
          " holds this job's claim; it is ignored");
  return true;
}

// False and errno: another process has it, or it cannot be had.
bool RunPlace::bindClaim() {
  const auto address = claimOf(options_);
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || ::bind(socket.get(), address.get(), address.bytes) != 0 ||
      ::listen(socket.get(), kKnocks) != 0) {
    return false;
  }
  claim_ = std::move(socket);
  return true;
}

// Takes the directory under `run_dir`; false: another agent has it, which `other` is about.
bool RunPlace::settle(std::string run_dir, std::string& other) {
  makeDirectories(run_dir, options_.job, options_.node);
  const auto before = std::exchange(options_.run_dir, run_dir);
  UniqueFd handle(::open(path().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!handle) {
    options_.run_dir = before;
    throw SystemError("open " + run_dir);
  }
  std::swap(directory_, handle);
  const auto inode_before = socket_inode_;
  try {
    if (lock(path(), other)) {
      listen(path());
      if (handle && before != run_dir) {  // moved: nothing of this agent stays there
        clear(handle.get(), before, inode_before);
      }
      return true;
    }
  } catch (...) {
    std::swap(directory_, handle);
    options_.run_dir = before;
    throw;
  }
  std::swap(directory_, handle);
  options_.run_dir = before;
  return false;
}

bool RunPlace::lock(const std::string& path, std::string& other) {
  if (lock_ && isAt(lock_.get(), path + "/" + kLock)) {
    return true;
  }
  for (int i = 0; i < 100; ++i) {
    UniqueFd file = openBeneath(directory_.get(), kLock, O_RDWR | O_CREAT, 0600);
    if (!file) {
      throw SystemError("open " + path + "/" + kLock);
    }
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK || errno == EINTR) {
        other = "another process holds " + path + "/" + kLock + " (" + contents(file.get()) + ")";
        return false;
      }
      throw SystemError("flock " + path + "/" + kLock);
    }
    // An agent that ended in between removed the file: the lock is worth something only on the one
    // that is there.
    if (!isAt(file.get(), path + "/" + kLock)) {
      continue;
    }
    if (const auto problem = ownFileProblem(file.get()); !problem.empty()) {
      throw Unavailable(path + "/" + kLock + " " + problem + "; remove it");
    }
    fence_ = std::max(fence_, fenceIn(contents(file.get()))) + 1;
    const auto line = "fence " + std::to_string(fence_) + " pid " + std::to_string(::getpid()) +
                      " boot " + bootId() + "\n";
    if (::ftruncate(file.get(), 0) != 0 ||
        ::pwrite(file.get(), line.data(), line.size(), 0) != static_cast<ssize_t>(line.size())) {
      logWarn("agent", "cannot write ", path, "/", kLock, ": ", std::strerror(errno));
    }
    lock_ = std::move(file);
    return true;
  }
  throw Unavailable(path + "/" + kLock + " keeps changing; is the directory shared between hosts?");
}

// With the lock held: replaces what a dead agent left.
void RunPlace::listen(const std::string& path) {
  auto socket = streamSocket();
  const auto where = socketIn(directory_);
  ::unlinkat(directory_.get(), kSocket, 0);
  const mode_t before = ::umask(0177);
  const int bound = ::bind(socket.get(), where.get(), where.bytes);
  const int code = errno;
  ::umask(before);
  struct stat made {};
  if (bound != 0) {
    throw SystemError("bind " + path + "/" + kSocket, code);
  }
  if (::fstatat(directory_.get(), kSocket, &made, AT_SYMLINK_NOFOLLOW) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    throw SystemError("listen in " + path);
  }
  socket_inode_ = made.st_ino;
  listener_ = std::move(socket);
}

bool RunPlace::isThere() const {
  struct stat socket {};
  return isAt(directory_.get(), path()) && isAt(lock_.get(), path() + "/" + kLock) &&
         ::lstat((path() + "/" + kSocket).c_str(), &socket) == 0 &&
         socket.st_ino == socket_inode_ && S_ISSOCK(socket.st_mode);
}

RunPlace::Kept RunPlace::keep() {
  if (!claim_) {
    bindClaim();  // who held it when this agent started may have gone
  }
  const bool moved_away = options_.run_dir != wanted_run_dir_;
  const auto above = wanted_run_dir_.substr(0, wanted_run_dir_.rfind('/'));
  // Ranks look in the wanted place again as soon as it can be made.
  const bool may_return = moved_away && ::access(above.c_str(), W_OK | X_OK) == 0;
  if (isThere() && !may_return) {
    return Kept::kSame;
  }
  std::string problem;
  const bool elsewhere =
      !options_.fallback_run_dir.empty() && options_.fallback_run_dir != wanted_run_dir_;
  for (const auto& run_dir :
       {wanted_run_dir_, elsewhere ? options_.fallback_run_dir : wanted_run_dir_}) {
    if (moved_away && run_dir == options_.run_dir && isThere()) {
      return Kept::kSame;  // the wanted place cannot be had after all
    }
    try {
      if (settle(run_dir, problem)) {
        lost_ = false;
        return Kept::kMoved;
      }
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  if (!std::exchange(lost_, true)) {
    logWarn("agent", "the run directory ", path(), " is gone and cannot be recreated: ", problem,
            "; connected ranks go on, others find no agent until it can be");
  }
  return Kept::kLost;
}

void RunPlace::answerKnocks() {
  for (int i = 0; i < kKnocks; ++i) {
    if (!UniqueFd(::accept4(claim_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))) {
      return;
    }
  }
}

// Ranks touch the file before they come.
void RunPlace::usesSecret(const std::string& name) {
  struct timespec now {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  secrets_[name] = nanoseconds(now);
}

void RunPlace::removeTraces() {
  for (const auto& [name, used_ns] : secrets_) {
    const std::string file = options_.run_dir + "/secrets/" + name;
    struct stat info {};
    if (::lstat(file.c_str(), &info) == 0 && nanoseconds(info.st_mtim) <= used_ns) {
      ::unlink(file.c_str());
    }
  }
  ::rmdir((options_.run_dir + "/secrets").c_str());  // as long as another job has one, it stays
  clear(directory_.get(), options_.run_dir, socket_inode_);
}

// Removes what this agent has made in `at`, its directory under `run_dir`.
void RunPlace::clear(int at, const std::string& run_dir, uint64_t socket_inode) const {
  struct stat socket {};
  if (::fstatat(at, kSocket, &socket, AT_SYMLINK_NOFOLLOW) == 0 && socket.st_ino == socket_inode) {
    ::unlinkat(at, kSocket, 0);
  }
  if (::faccessat(at, "verdicts", F_OK, AT_SYMLINK_NOFOLLOW) != 0) {
    ::unlinkat(at, "agent.log", 0);
    ::unlinkat(at, "agent.log.1", 0);
  }
  // The lock goes last, so that the next agent starts with nothing of this one.
  ::unlinkat(at, kLock, 0);
  const auto job = run_dir + "/" + options_.job;
  const auto node = job + "/node-" + std::to_string(options_.node);
  if (isAt(at, node)) {
    ::rmdir(node.c_str());
    ::rmdir(job.c_str());
  }
}

}  // namespace reft::agent

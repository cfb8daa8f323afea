#include "hang_detect/rank/last_words.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <string_view>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "hang_detect/rank/thrown.h"
#include "intercept/base/clock.h"
#include "intercept/base/log.h"
#include "intercept/base/mutex.h"
#include "intercept/base/thread_annotations.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kMostWaitMs = 1500;
constexpr std::chrono::milliseconds kStacksWait{800};
constexpr std::chrono::milliseconds kFramesWait{500};  // in all, less than kMostWaitMs
constexpr size_t kStackBytes = 64u << 10;  // of the main thread's handler, if its own is full

// Lives until the process is gone: a handler may run at any time.
struct Faults {
  pid_t owner = 0;
  pthread_t main{};
  UniqueFd asked, answered;  // eventfds
  std::array<struct sigaction, kSignals.size()> before{};

  // Written by the first thread that faults, read by `reft-last-words` after `asked`.
  std::atomic<bool> claimed{false};
  int signal = 0, code = 0;
  uint64_t address = 0;
  int sender = 0;
  pthread_t thread{};
  pid_t tid = 0;
  int64_t at_ns = 0;

  std::string handler;     // file that it is in
  std::string error_file;  // of torchrun; "": none

  Mutex mutex;
  std::weak_ptr<AgentClient> client GUARDED_BY(mutex);
  std::unique_ptr<StackDumper> dumper;
};

std::atomic<Faults*> faults{nullptr};

void post(int eventfd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(eventfd, &one, sizeof(one));
}

// The process dies of the signal as it would have without reft.
void endAsBefore(const Faults& all, int signal, const siginfo_t* info) {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] == signal) {
      ::sigaction(signal, &all.before[i], nullptr);
    }
  }
  // A fault comes again by itself when its instruction runs again; a signal that was sent does not.
  if (info == nullptr || info->si_code <= 0) {
    ::raise(signal);
  }
}

void onFault(int signal, siginfo_t* info, void* /*context*/) {
  const int error = errno;
  Faults& all = *faults.load();
  if (::getpid() == all.owner && !all.claimed.exchange(true)) {
    all.signal = signal;
    all.code = info == nullptr ? 0 : info->si_code;
    const bool sent = info == nullptr || info->si_code <= 0;
    all.address = sent ? 0 : reinterpret_cast<uint64_t>(info->si_addr);
    all.sender = sent && info != nullptr && info->si_pid != all.owner ? info->si_pid : 0;
    all.thread = ::pthread_self();
    all.tid = static_cast<pid_t>(::syscall(SYS_gettid));
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    all.at_ns = static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
    post(all.asked.get());
    pollfd poller{all.answered.get(), POLLIN, 0};
    ::poll(&poller, 1, kMostWaitMs);
  }
  endAsBefore(all, signal, info);
  errno = error;
}

// Returns the native frames that the agent has read meanwhile; "": it could not, or not in time.
std::string sayAll(AgentClient& client, const FatalSignal& fault) {
  try {
    return client
        .request(wire::Type::kLastWords, faultWords(fault), wire::Type::kWordsHeard, kFramesWait)
        .payload;
  } catch (const std::exception& error) {
    logDebug("hang", "no native frames: ", error.what());
    return "";
  }
}

void speak(Faults& all) {
  uint64_t count = 0;
  while (::read(all.asked.get(), &count, sizeof(count)) != sizeof(count)) {
    if (errno != EINTR) {
      return;
    }
  }
  FatalSignal fault;
  fault.signal = all.signal;
  fault.code = all.code;
  fault.address = all.address;
  fault.sender = all.sender;
  fault.thread = static_cast<uint64_t>(all.thread);
  fault.main = ::pthread_equal(all.thread, all.main) != 0;
  fault.tid = all.tid;
  fault.handler = all.handler;
  if (fault.signal == SIGABRT) {
    Thrown found = thrown();
    fault.thrown = std::move(found.type);
    fault.message = std::move(found.message);
  }
  fault.at_ns = all.at_ns;
  const auto seconds = static_cast<int64_t>(::time(nullptr));
  std::shared_ptr<AgentClient> client;
  {
    const MutexLock lock(all.mutex);
    client = all.client.lock();
  }
  if (client != nullptr) {
    client->send(wire::Type::kLastWords, faultWords(fault));  // should the stacks take too long
  }
  fault.stacks = all.dumper->dump(kStacksWait).text;
  const std::string frames = client == nullptr ? "" : sayAll(*client, fault);
  const std::string what =
      signalName(fault.signal) + " in native code" +
      (fault.thrown.empty() ? "" : " (" + fault.thrown + ": " + fault.message + ")");
  writeErrorFile(
      all.error_file,
      frames.empty() ? what + "; Python's stacks:" : what + ":\n" + frames + "Python's stacks:",
      fault.stacks.text(), seconds);
  post(all.answered.get());
}

// Python's own handler lies in its program or its library, and passes the signal on.
bool isPythons(const struct sigaction& action) {
  Dl_info where{};
  if (::dladdr(reinterpret_cast<void*>(action.sa_sigaction), &where) == 0 ||
      where.dli_fname == nullptr) {
    return false;
  }
  const std::string_view path(where.dli_fname);
  return path.substr(path.rfind('/') + 1).find("python") != path.npos;
}

void giveMainThreadAStack() {
  stack_t now{};
  if (::sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE) != 0) {
    stack_t own{};
    own.ss_size = kStackBytes;
    own.ss_sp = std::malloc(kStackBytes);
    if (own.ss_sp != nullptr) {
      ::sigaltstack(&own, nullptr);
    }
  }
}

}  // namespace

std::string leavingWords(int64_t at_ns) {
  return nlohmann::json{{"kind", "leaving"}, {"at_ns", at_ns}}.dump();
}

std::string exitWords(int code, int64_t at_ns) {
  return nlohmann::json{{"kind", "exit"}, {"code", code}, {"at_ns", at_ns}}.dump();
}

std::string faultWords(const FatalSignal& fault) {
  Ending ending;
  ending.fault = fault;
  nlohmann::json fields = endingFields(ending)["fault"];
  fields["kind"] = "signal";
  return fields.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void writeErrorFile(const std::string& path, const std::string& what, const std::string& stacks,
                    int64_t seconds) {
  struct stat there {};
  if (path.empty() || (::stat(path.c_str(), &there) == 0 && there.st_size > 0)) {
    return;
  }
  const nlohmann::json extra = {{"py_callstack", what + (stacks.empty() ? "" : "\n") + stacks},
                                {"timestamp", std::to_string(seconds)}};
  const nlohmann::json fields = {{"message", {{"message", what}, {"extraInfo", extra}}}};
  const std::string text = fields.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::string temporary = path + ".reft-" + std::to_string(::getpid());
  const UniqueFd file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) {
    ::rename(temporary.c_str(), path.c_str());
  } else if (file) {
    ::unlink(temporary.c_str());
  }
}

void installFaultWords(const std::shared_ptr<AgentClient>& client, StackPrinter printer) {
  Faults* all = faults.load();
  if (all != nullptr && all->owner == ::getpid()) {
    const MutexLock lock(all->mutex);
    all->client = client;
    return;
  }
  const Faults* const parents = all;  // of the process that has forked this one
  all = new Faults;
  all->owner = ::getpid();
  all->main = ::pthread_self();
  all->asked.reset(::eventfd(0, EFD_CLOEXEC));
  all->answered.reset(::eventfd(0, EFD_CLOEXEC));
  if (!all->asked || !all->answered) {
    logDebug("hang", "no handlers of faults: no descriptors");
    delete all;
    return;
  }
  if (Dl_info where{};
      ::dladdr(reinterpret_cast<void*>(&onFault), &where) != 0 && where.dli_fname != nullptr) {
    all->handler = where.dli_fname;
  }
  if (const char* const file = std::getenv("TORCHELASTIC_ERROR_FILE")) {
    all->error_file = file;
  }
  all->dumper = std::make_unique<StackDumper>(printer);
  {
    const MutexLock lock(all->mutex);
    all->client = client;
  }
  faults.store(all);
  keepThrown();
  std::thread speaker([all] { speak(*all); });
  ::pthread_setname_np(speaker.native_handle(), "reft-last-words");
  speaker.detach();
  giveMainThreadAStack();
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction& before = all->before[i];
    if (::sigaction(kSignals[i], nullptr, &before) == 0 && parents != nullptr &&
        before.sa_sigaction == &onFault) {
      before = parents->before[i];
      continue;  // it is there already
    }
    if (::sigaction(kSignals[i], nullptr, &before) != 0 ||
        ((before.sa_flags & SA_SIGINFO) == 0 && before.sa_handler == SIG_IGN) ||
        (before.sa_handler != SIG_DFL && !isPythons(before))) {
      continue;  // that of another library: it may be no fault at all
    }
    struct sigaction action {};
    action.sa_sigaction = &onFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigfillset(&action.sa_mask);
    ::sigaction(kSignals[i], &action, nullptr);
  }
}

}  // namespace reft

#include "hang_detect/rank/verdict_notice.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "hang_detect/report/wrap.h"
#include "hang_detect/stacks/printable.h"
#include "intercept/base/json.h"

namespace reft {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kColumns = 80;
constexpr size_t kLines = 24;
constexpr milliseconds kPrintWait{1000};
constexpr milliseconds kEndWait{2000};
constexpr milliseconds kParkWait{200};

std::atomic<int> printing{0};
std::atomic<int> park_signal{0};  // 0: no real-time signal was free
std::atomic<bool> parked{false};

// Does not return: the process ends meanwhile.
void onPark(int) {
  parked = true;
  for (;;) {
    ::pause();
  }
}

// Leaves park_signal 0 if every real-time signal is in use.
void claimParkSignal() {
  for (int number = SIGRTMAX - 1; park_signal == 0 && number > SIGRTMIN + 1; --number) {
    struct sigaction now {};
    if (::sigaction(number, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 ||
        now.sa_handler != SIG_DFL) {
      continue;
    }
    struct sigaction ours {};
    ours.sa_handler = &onPark;
    ::sigfillset(&ours.sa_mask);
    if (::sigaction(number, &ours, nullptr) == 0) {
      park_signal = number;
    }
  }
}

std::vector<std::string> linesOf(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

// The text is shorter than PIPE_BUF, so a writable pipe takes it without blocking.
void print(const std::string& text) {
  pollfd poller{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&poller, 1, static_cast<int>(kPrintWait.count())) == 1 &&
      (poller.revents & POLLOUT) != 0) {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  }
}

// Starts a detached thread; false if the system refuses. The thread blocks all signals: it must not
// take the program's, and a closed or foreign terminal must not end or stop the process (SIGPIPE,
// SIGTTOU).
template <typename Body>
bool startDetached(const char* name, Body body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    std::thread thread(body);
    ::pthread_setname_np(thread.native_handle(), name);
    thread.detach();  // it may never return
  } catch (const std::system_error&) {
    started = false;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void waitUntil(const std::function<bool()>& done, milliseconds timeout) {
  const auto end = steady_clock::now() + timeout;
  while (!done() && steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(5));
  }
}

bool parkMainThread() {
  const pid_t pid = ::getpid();
  if (park_signal == 0 || ::syscall(SYS_tgkill, pid, pid, park_signal.load()) != 0) {
    return false;
  }
  waitUntil([] { return parked.load(); }, kParkWait);
  return parked;
}

void abortProcess(EndCommunicators end) {
  waitUntil([] { return printing == 0; }, kPrintWait);
  if (end != nullptr && parkMainThread()) {
    static std::atomic<bool> ended{false};
    const bool started = startDetached("reft-abort", [end] {
      end();
      ended = true;
    });
    if (started) {
      waitUntil([] { return ended.load(); }, kEndWait);
    }
  }
  ::_exit(kAbortExitCode);
}

}  // namespace

std::string terminalText(std::string_view screen, std::string_view report_path,
                         std::string_view action) {
  // The path stays in one piece, so that it can be copied; the terminal breaks it.
  const std::string path = printable(report_path, 4096);
  std::vector<std::string> tail;
  size_t tail_lines = 0;
  if (!path.empty() && path.size() + 8 <= kColumns) {
    tail.push_back("report: " + path);
    tail_lines = 1;
  } else if (!path.empty()) {
    tail = {"report:", path};
    tail_lines = 1 + (path.size() + kColumns - 1) / kColumns;
  }
  for (std::string& line : linesOf(wrapText(printable(action), 2, kColumns))) {
    tail.push_back(std::move(line));
    ++tail_lines;
  }
  auto lines = linesOf(screen);
  while (lines.size() + tail_lines > kLines && lines.size() > 1) {
    // Drop the last sentence of evidence or, without one, the line before "next:".
    auto last = std::find_if(lines.rbegin(), lines.rend(),
                             [](const std::string& line) { return line.rfind("- ", 0) == 0; });
    if (last == lines.rend()) {
      last = std::find_if(lines.rbegin(), lines.rend(),
                          [](const std::string& line) { return line.rfind("next:", 0) == 0; });
      last = last == lines.rend() || std::next(last) == lines.rend() ? lines.rbegin()
                                                                     : std::next(last);
      lines.erase(std::next(last).base());
      continue;
    }
    const auto begin = std::next(last).base();
    auto end = std::next(begin);
    while (end != lines.end() && end->rfind("    ", 0) == 0) {
      ++end;
    }
    lines.erase(begin, end);
  }
  lines.insert(lines.end(), tail.begin(), tail.end());
  std::string text;
  for (const std::string& line : lines) {
    text += line + "\n";
  }
  return text;
}

std::string verdictNoticeJson(std::string_view text) {
  return nlohmann::json{{"text", text}}.dump(-1, ' ', false,
                                             nlohmann::json::error_handler_t::replace);
}

std::string verdictNoticeText(std::string_view payload) {
  const auto notice = parseJson(payload);
  if (!notice.is_object() || !notice.contains("text") || !notice["text"].is_string()) {
    return "";
  }
  return notice["text"].get<std::string>().substr(0, 4096);
}

void installVerdictNotices(AgentClient& client, EndCommunicators end) {
  client.handle(wire::Type::kVerdict, [](const wire::Frame& frame) {
    ++printing;
    const bool started = startDetached("reft-verdict", [text = verdictNoticeText(frame.payload)] {
      print(text);
      --printing;
    });
    if (!started) {
      --printing;
    }
  });
  if (end != nullptr) {
    claimParkSignal();
  }
  client.handle(wire::Type::kAbort, [end](const wire::Frame&) { abortProcess(end); });
}

}  // namespace reft

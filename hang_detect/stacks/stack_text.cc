#include <algorithm>
#include <charconv>
#include <utility>

#include "hang_detect/stacks/printable.h"
#include "hang_detect/stacks/stacks.h"

namespace reft {

namespace {

constexpr size_t kMostThreadsOfText = 1024;
constexpr size_t kMostFramesOfText = 1024;
constexpr size_t kMaxLineBytes = 4096;
constexpr size_t kMaxGils = 64;  // of each interpreter, one for each thread that waits

bool dropPrefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) {
    return false;
  }
  text.remove_prefix(prefix.size());
  return true;
}

std::string_view word(std::string_view& text) {
  const size_t end = std::min(text.find(' '), text.size());
  const std::string_view first = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return first;
}

// `File "train.py", line 88 in load_batch`; file and line may be `???`.
bool parseFrame(std::string_view line, StackFrame& frame) {
  if (!dropPrefix(line, "File ")) {
    return false;
  }
  constexpr std::string_view kLine = ", line ";
  // A path may hold the separator, a function name may not.
  const size_t at = line.rfind(kLine);
  if (at == std::string_view::npos) {
    return false;
  }
  std::string_view file = line.substr(0, at);
  if (file.size() >= 2 && file.front() == '"' && file.back() == '"') {
    file = file.substr(1, file.size() - 2);
  }
  line.remove_prefix(at + kLine.size());
  const std::string_view number = word(line);
  int64_t value = 0;
  const auto [end, problem] = std::from_chars(number.data(), number.data() + number.size(), value);
  frame.line =
      problem == std::errc() && end == number.data() + number.size() && value > 0 ? value : 0;
  dropPrefix(line, "in ");
  frame.file = file;
  frame.function = line;
  return true;
}

// `[Current t|T]hread 0x… [name] (most recent call first):`
bool parseThread(std::string_view line, ThreadStack& thread) {
  thread.current = dropPrefix(line, "Current thread ");
  if (!thread.current && !dropPrefix(line, "Thread ")) {
    return false;
  }
  thread.thread = word(line);
  if (thread.thread.substr(0, 2) != "0x") {
    return false;
  }
  if (dropPrefix(line, "[")) {
    const size_t end = line.rfind(']');
    thread.name = line.substr(0, end == std::string_view::npos ? line.size() : end);
  }
  return true;
}

bool parseNative(std::string_view line, NativeThread& native) {
  if (!dropPrefix(line, "Native thread ")) {
    return false;
  }
  const std::string_view tid = word(line);
  const auto [end, problem] = std::from_chars(tid.data(), tid.data() + tid.size(), native.tid);
  if (problem != std::errc() || end != tid.data() + tid.size() || native.tid <= 0) {
    return false;
  }
  native.state = word(line);
  native.name = line;
  return true;
}

// `GIL held by 0x…[, awaited by 0x…]`
bool parseGil(std::string_view line, std::pair<std::string, std::string>& gil) {
  if (!dropPrefix(line, "GIL held by 0x")) {
    return false;
  }
  constexpr std::string_view kAwaited = ", awaited by ";
  const size_t end = std::min(line.find(kAwaited), line.size());
  gil.first = "0x" + std::string(line.substr(0, end));
  gil.second = end == line.size() ? "" : std::string(line.substr(end + kAwaited.size()));
  return true;
}

std::string placeOf(const StackFrame& frame) {
  return fileName(frame.file) + ":" + (frame.line > 0 ? std::to_string(frame.line) : "?") + " " +
         printable(frame.function, 60);
}

}  // namespace

Stacks parseStacks(std::string_view text) {
  Stacks stacks;
  std::string main_thread;
  std::vector<std::pair<std::string, std::string>> gils;  // holder, who waits for it
  bool in_thread = false;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, std::min(end, kMaxLineBytes));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && line.back() == '\r') {
      line.remove_suffix(1);
    }
    const bool indented = dropPrefix(line, "  ");
    ThreadStack thread;
    NativeThread native;
    StackFrame frame;
    std::pair<std::string, std::string> gil;
    if (indented && in_thread && parseFrame(line, frame)) {
      auto& frames = stacks.threads.back().frames;
      if (frames.size() < kMostFramesOfText) {
        frames.push_back(std::move(frame));
      } else {
        stacks.threads.back().truncated = stacks.truncated = true;
      }
    } else if (indented && in_thread && line == "...") {
      stacks.threads.back().truncated = stacks.truncated = true;
    } else if (!indented && line == "...") {
      stacks.truncated = true;
    } else if (!indented && parseThread(line, thread)) {
      in_thread = stacks.threads.size() < kMostThreadsOfText;
      if (in_thread) {
        stacks.threads.push_back(std::move(thread));
      } else {
        stacks.truncated = true;
      }
    } else if (!indented && dropPrefix(line, "Main thread ")) {
      main_thread = line;
    } else if (!indented && gils.size() < kMaxGils && parseGil(line, gil)) {
      gils.push_back(std::move(gil));
    } else if (!indented && parseNative(line, native)) {
      if (stacks.native.size() < kMostThreadsOfText) {
        stacks.native.push_back(std::move(native));
      } else {
        stacks.truncated = true;
      }
    }
  }
  for (ThreadStack& thread : stacks.threads) {
    thread.main = !main_thread.empty() && thread.thread == main_thread;
    for (const auto& [holder, waiter] : gils) {
      thread.holds_gil = thread.holds_gil || thread.thread == holder;
      if (thread.thread == waiter) {
        thread.awaits_gil_of = holder;
      }
    }
  }
  // The interpreter prints its newest thread first, so without better knowledge the last one is the
  // main thread, unless the printer stopped before it came there.
  if (main_thread.empty() && !stacks.threads.empty() && !stacks.truncated) {
    stacks.threads.back().main = true;
  }
  return stacks;
}

const ThreadStack* ProcessStacks::mainThread() const {
  for (const ThreadStack& thread : parsed_.threads) {
    if (thread.main && !thread.frames.empty()) {
      return &thread;
    }
  }
  return nullptr;
}

bool isLibraryFile(std::string_view file) {
  for (const std::string_view part :
       {"/site-packages/", "/dist-packages/", "/lib/python", "/python/reft", "<frozen"}) {
    if (file.find(part) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

const StackFrame& ownFrame(const ThreadStack& thread) {
  const auto own = std::find_if(thread.frames.begin(), thread.frames.end(),
                                [](const StackFrame& frame) { return !isLibraryFile(frame.file); });
  return own != thread.frames.end() ? *own : thread.frames.front();
}

std::string placeOf(const ThreadStack& thread) {
  if (thread.frames.empty()) {
    return "";
  }
  const StackFrame& top = thread.frames.front();
  const StackFrame& own = ownFrame(thread);
  return &own == &top ? placeOf(top) : placeOf(own) + " (inside " + placeOf(top) + ")";
}

}  // namespace reft

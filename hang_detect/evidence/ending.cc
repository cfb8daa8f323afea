#include "hang_detect/evidence/ending.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <cstring>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/json_fields.h"
#include "hang_detect/stacks/printable.h"
#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

using json_fields::number;
using json_fields::text;
using nlohmann::json;

constexpr size_t kMostMessage = 4096;
constexpr size_t kMostName = 512;
constexpr size_t kMostFrames = 64;
constexpr size_t kMostCauses = 8;
constexpr size_t kMostFramesOfHandler = 8;

Uncaught uncaughtOf(const json& fields) {
  Uncaught found;
  found.type = text(fields, "type", kMostName);
  found.message = text(fields, "message", kMostMessage);
  found.thread = text(fields, "thread", kMostName);
  found.error_number = number<int>(fields, "errno", 0);
  found.at_ns = number<int64_t>(fields, "at_ns", 0);
  if (const auto frames = fields.find("frames"); frames != fields.end() && frames->is_array()) {
    for (const json& frame : *frames) {
      if (frame.is_object() && found.frames.size() < kMostFrames) {
        found.frames.push_back({text(frame, "file", kMostMessage),
                                number<int64_t>(frame, "line", 0),
                                text(frame, "function", kMostName)});
      }
    }
  }
  if (const auto causes = fields.find("causes"); causes != fields.end() && causes->is_array()) {
    for (const json& cause : *causes) {
      if (cause.is_string() && found.causes.size() < kMostCauses) {
        found.causes.push_back(cause.get_ref<const std::string&>().substr(0, kMostName));
      }
    }
  }
  return found;
}

json uncaughtFields(const Uncaught& found) {
  json frames = json::array();
  for (const StackFrame& frame : found.frames) {
    frames.push_back({{"file", frame.file}, {"line", frame.line}, {"function", frame.function}});
  }
  return {{"type", found.type},     {"message", found.message},    {"thread", found.thread},
          {"causes", found.causes}, {"errno", found.error_number}, {"at_ns", found.at_ns},
          {"frames", frames}};
}

FatalSignal faultOf(const json& fields) {
  FatalSignal found;
  found.signal = number<int>(fields, "signal", 0);
  found.code = number<int>(fields, "code", 0);
  found.address = number<uint64_t>(fields, "address", 0);
  found.sender = number<int>(fields, "sender", 0);
  found.thread = number<uint64_t>(fields, "thread", 0);
  found.main = number<int>(fields, "main", 0) != 0;
  found.tid = number<int64_t>(fields, "tid", 0);
  found.handler = text(fields, "handler", kMostMessage);
  found.thrown = text(fields, "thrown", kMostName);
  found.message = text(fields, "message", kMostMessage);
  if (const auto frames = fields.find("frames"); frames != fields.end() && frames->is_array()) {
    for (const json& frame : *frames) {
      if (frame.is_object() && found.frames.size() < kMostFrames) {
        found.frames.push_back({text(frame, "function", kMostName),
                                text(frame, "object", kMostMessage),
                                text(frame, "place", kMostMessage)});
      }
    }
  }
  found.stacks = text(fields, "stacks_text", kMostLastWords);
  found.at_ns = number<int64_t>(fields, "at_ns", 0);
  return found;
}

json faultFields(const FatalSignal& found) {
  json frames = json::array();
  for (const FaultFrame& frame : found.frames) {
    frames.push_back(
        {{"function", frame.function}, {"object", frame.object}, {"place", frame.place}});
  }
  return {
      {"signal", found.signal},   {"code", found.code},       {"address", found.address},
      {"sender", found.sender},   {"thread", found.thread},   {"main", found.main ? 1 : 0},
      {"tid", found.tid},         {"handler", found.handler}, {"thrown", found.thrown},
      {"message", found.message}, {"frames", frames},         {"stacks_text", found.stacks.text()},
      {"at_ns", found.at_ns}};
}

std::optional<json> part(const json& fields, const char* key) {
  const auto at = fields.find(key);
  return at != fields.end() && at->is_object() ? std::optional<json>(*at) : std::nullopt;
}

}  // namespace

std::string FaultFrame::text() const {
  if (!isNative()) {
    return place + " " + function;
  }
  const std::string where = fileName(object) + "+" + place;
  return function.empty() ? where : function + " (" + where + ")";
}

void addNativeFrames(FatalSignal& fault, std::string_view answer) {
  const json read = json::parse(answer, nullptr, /*allow_exceptions=*/false);
  const json::json_pointer at("/native/threads");
  if (!read.is_object() || !read.contains(at) || !read[at].is_array()) {
    return;
  }
  for (const json& thread : read[at]) {
    if (!thread.is_object() || fault.tid == 0 || number<int64_t>(thread, "tid", 0) != fault.tid) {
      continue;
    }
    std::vector<FaultFrame> frames;
    size_t begin = 0;  // behind the handler, and behind what the kernel returns through
    const auto list = thread.find("frames");
    for (const json& frame : list != thread.end() && list->is_array() ? *list : json::array()) {
      if (!frame.is_object() || frames.size() >= kMostFrames) {
        continue;
      }
      FaultFrame& found = frames.emplace_back();
      found.function = text(frame, "function", kMostName);
      if (text(frame, "kind", kMostName) == "native") {
        found.object = text(frame, "object", kMostMessage);
        found.place = text(frame, "offset", kMostName);
        // The newest one: the same file has other code, which may have called what failed.
        if (begin == 0 && frames.size() <= kMostFramesOfHandler && !fault.handler.empty() &&
            fileName(found.object) == fileName(fault.handler)) {
          begin = frames.size() + 1;
        }
      } else {
        found.place = fileName(text(frame, "file", kMostMessage)) + ":" +
                      std::to_string(number<int64_t>(frame, "line", 0));
      }
    }
    fault.frames.assign(frames.begin() + static_cast<ptrdiff_t>(std::min(begin, frames.size())),
                        frames.end());
    return;
  }
}

std::string framesText(const FatalSignal& fault) {
  std::string lines;
  for (const FaultFrame& frame : fault.frames) {
    lines += "  " + printable(frame.text()) + "\n";
  }
  return lines;
}

ThreadStack Uncaught::stack() const {
  ThreadStack result;
  result.frames = frames;
  return result;
}

int64_t Ending::failedNs() const {
  return exception ? exception->at_ns : fault ? fault->at_ns : left_ns;
}

void addLastWords(Ending& ending, std::string_view payload) {
  const json fields = parseJson(payload, kMostLastWords);
  const std::string kind = fields.is_object() ? text(fields, "kind", kMostName) : "";
  if (kind == "exception") {
    ending.exception = uncaughtOf(fields);
  } else if (kind == "thread") {
    ending.in_thread = uncaughtOf(fields);
  } else if (kind == "signal") {
    FatalSignal found = faultOf(fields);
    if (ending.fault && ending.fault->at_ns == found.at_ns && found.frames.empty()) {
      found.frames = std::move(ending.fault->frames);  // the rank says it again, with its stacks
    }
    ending.fault = std::move(found);
  } else if (kind == "leaving") {
    ending.left_ns = number<int64_t>(fields, "at_ns", 0);
  } else if (kind == "exit") {
    ending.exit_code = number<int>(fields, "code", -1);
    ending.left_ns = number<int64_t>(fields, "at_ns", 0);
  } else {
    throw InvalidArgument("last words", std::to_string(payload.size()) + " bytes",
                          "an object of at most 1 MiB whose kind is exception, thread, signal, "
                          "leaving or exit");
  }
}

void addExitStatus(Ending& ending, int status) {
  if (status >= 0 && WIFEXITED(status)) {
    ending.exit_code = WEXITSTATUS(status);
  } else if (status >= 0 && WIFSIGNALED(status)) {
    ending.exit_code = -1;
    ending.signal = WTERMSIG(status);
  }
}

int exitStatusOf(int pid) noexcept {
  // The last of the 52 fields of /proc/<pid>/stat, of a process in state Z.
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", pid);
  const UniqueFd file(pid > 0 ? ::open(path.data(), O_RDONLY | O_CLOEXEC) : -1);
  std::array<char, 2048> line{};
  const ssize_t got = file ? ::read(file.get(), line.data(), line.size()) : -1;
  if (got <= 0) {
    return -1;
  }
  std::string_view rest(line.data(), static_cast<size_t>(got));
  const size_t name_end = rest.rfind(')');
  if (name_end == rest.npos || rest.substr(name_end).size() < 3 || rest[name_end + 2] != 'Z') {
    return -1;
  }
  while (!rest.empty() && (rest.back() == '\n' || rest.back() == ' ')) {
    rest.remove_suffix(1);
  }
  size_t fields = 2;  // pid and name
  for (size_t at = name_end; at < rest.size(); ++at) {
    fields += rest[at] == ' ' ? 1 : 0;
  }
  const std::string_view last = rest.substr(rest.rfind(' ') + 1);
  int status = -1;
  const auto [end, problem] = std::from_chars(last.data(), last.data() + last.size(), status);
  return fields >= 52 && problem == std::errc() && end == last.data() + last.size() ? status : -1;
}

std::string signalName(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name == nullptr ? "signal " + std::to_string(signal) : std::string("SIG") + name;
}

json endingFields(const Ending& ending) {
  json fields = {
      {"exit_code", ending.exit_code}, {"signal", ending.signal}, {"left_ns", ending.left_ns}};
  if (ending.exception) {
    fields["exception"] = uncaughtFields(*ending.exception);
  }
  if (ending.in_thread) {
    fields["in_thread"] = uncaughtFields(*ending.in_thread);
  }
  if (ending.fault) {
    fields["fault"] = faultFields(*ending.fault);
  }
  return fields;
}

Ending endingOf(const json& fields) {
  Ending ending;
  if (!fields.is_object()) {
    return ending;
  }
  ending.exit_code = number<int>(fields, "exit_code", -1);
  ending.signal = number<int>(fields, "signal", 0);
  ending.left_ns = number<int64_t>(fields, "left_ns", 0);
  if (const auto found = part(fields, "exception")) {
    ending.exception = uncaughtOf(*found);
  }
  if (const auto found = part(fields, "in_thread")) {
    ending.in_thread = uncaughtOf(*found);
  }
  if (const auto found = part(fields, "fault")) {
    ending.fault = faultOf(*found);
  }
  return ending;
}

}  // namespace reft

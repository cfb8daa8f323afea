// Diagnostic log lines, on stderr: one logger per folder, with a level each.
//
//   logDebug("snapshot", "slot ", slot, " sealed, step ", step);   →   reft.snapshot debug slot 1
//   sealed, step 7
//
// The first argument is the logger's name without `reft.`: intercept, snapshot, hang, agent,
// backend or python. Another name does not compile; to add a logger, add it to kLoggers. The rest
// is anything that a std::ostream takes, and is put together only if the level is on. Lower case,
// no period at the end, `rank 3` rather than `rank=3`.
//
// REFT_LOG selects: `<level>` for all, `reft.<logger>=<level>` for one, separated by commas, the
// last one of a kind wins: `info`, `reft.snapshot=debug`, `error,reft.agent=info`. Levels: trace
// (per operation), debug (per object), info (per job), warn (the default), error (cannot continue).
//
// A signal handler must not log. A disabled line costs one relaxed load.
//
// Threads: any. Errors: none; what cannot be written is lost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

namespace reft {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarn, kError };

inline constexpr std::array<std::string_view, 6> kLoggers{"intercept", "snapshot", "hang",
                                                          "agent",     "backend",  "python"};

// A name of kLoggers, looked up by the compiler.
class Logger {
 public:
  consteval Logger(const char* name) : index_(indexOf(name)) {}  // NOLINT: implicit by design
  constexpr size_t index() const { return index_; }

 private:
  static consteval uint8_t indexOf(std::string_view name) {
    for (size_t i = 0; i < kLoggers.size(); ++i) {
      if (kLoggers[i] == name) {
        return static_cast<uint8_t>(i);
      }
    }
    throw "no such logger";  // not a constant: the compiler stops here
  }
  uint8_t index_;
};

// Replaces the levels that REFT_LOG set. Skips a part that it does not understand, with a warning.
void configureLog(const std::string& spec) noexcept;

bool logEnabled(Logger logger, LogLevel level) noexcept;
void logWrite(Logger logger, LogLevel level, const std::string& message) noexcept;

template <typename... Args>
void logAt(Logger logger, LogLevel level, const Args&... args) noexcept {
  if (!logEnabled(logger, level)) {
    return;
  }
  try {
    std::ostringstream text;
    (text << ... << args);
    logWrite(logger, level, text.str());
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a line, which is then lost
  }
}

template <typename... Args>
void logTrace(Logger logger, const Args&... args) noexcept {
  logAt(logger, LogLevel::kTrace, args...);
}
template <typename... Args>
void logDebug(Logger logger, const Args&... args) noexcept {
  logAt(logger, LogLevel::kDebug, args...);
}
template <typename... Args>
void logInfo(Logger logger, const Args&... args) noexcept {
  logAt(logger, LogLevel::kInfo, args...);
}
template <typename... Args>
void logWarn(Logger logger, const Args&... args) noexcept {
  logAt(logger, LogLevel::kWarn, args...);
}
template <typename... Args>
void logError(Logger logger, const Args&... args) noexcept {
  logAt(logger, LogLevel::kError, args...);
}

}  // namespace reft

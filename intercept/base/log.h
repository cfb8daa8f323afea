// One logger per folder, on stderr: `reft <level> <message>`, as `logWarn("snapshot", "slot ", 1, "
// is torn")`. Levels come from REFT_LOG: `info`, `warn,reft.snapshot=debug`, ….
//
// Arguments are anything that a std::ostream takes; they are put together only if the level is on.
// Lower case, no period at the end, `rank 3` rather than `rank=3`. spdlog is behind it and stays
// inside libreft_intercept.so.
//
// Threads: any. Errors: none; what cannot be written is lost.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace reft {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarn, kError };

// Replaces the levels that REFT_LOG gave. A part that cannot be understood is warned about and
// skipped.
void configureLog(const std::string& spec) noexcept;

// `folder` is the logger's name without `reft.`: a string literal.
bool logEnabled(const char* folder, LogLevel level) noexcept;
void logWrite(const char* folder, LogLevel level, const std::string& message) noexcept;

template <typename... Args>
void logAt(const char* folder, LogLevel level, const Args&... args) noexcept {
  if (!logEnabled(folder, level)) {
    return;
  }
  try {
    std::ostringstream text;
    (text << ... << args);
    logWrite(folder, level, text.str());
  } catch (...) {
  }
}

template <typename... Args>
void logDebug(const char* folder, const Args&... args) noexcept {
  logAt(folder, LogLevel::kDebug, args...);
}
template <typename... Args>
void logInfo(const char* folder, const Args&... args) noexcept {
  logAt(folder, LogLevel::kInfo, args...);
}
template <typename... Args>
void logWarn(const char* folder, const Args&... args) noexcept {
  logAt(folder, LogLevel::kWarn, args...);
}
template <typename... Args>
void logError(const char* folder, const Args&... args) noexcept {
  logAt(folder, LogLevel::kError, args...);
}

}  // namespace reft

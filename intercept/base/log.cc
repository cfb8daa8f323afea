#include "intercept/base/log.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace reft {

namespace {

constexpr std::array<std::string_view, 5> kLevelNames{"trace", "debug", "info", "warn", "error"};
constexpr std::string_view kPrefix = "reft.";

template <size_t kSize>
std::optional<size_t> indexOf(const std::array<std::string_view, kSize>& names,
                              std::string_view name) {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? std::nullopt
                              : std::optional(static_cast<size_t>(found - names.begin()));
}

// `reft.snapshot` → its index.
std::optional<size_t> loggerOf(std::string_view name) {
  return name.starts_with(kPrefix) ? indexOf(kLoggers, name.substr(kPrefix.size())) : std::nullopt;
}

// Threads: levels are relaxed atomics; spdlog's sink has a lock of its own. Loggers are made by
// hand and kept out of spdlog's registry, so that the process's own spdlog is left alone.
class Log {
 public:
  Log() {
    const auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    for (size_t i = 0; i < kLoggers.size(); ++i) {
      const std::string name = std::string(kPrefix) + std::string(kLoggers[i]);
      loggers_[i] = std::make_unique<spdlog::logger>(name, sink);
      loggers_[i]->set_level(spdlog::level::trace);  // enabled() decides
      loggers_[i]->set_pattern("%v");
    }
    const char* spec = std::getenv("REFT_LOG");
    configure(spec == nullptr ? "" : spec);
  }

  void configure(std::string_view spec) {
    LogLevel all = LogLevel::kWarn;
    std::array<std::optional<LogLevel>, kLoggers.size()> one;
    std::string wrong;
    for (size_t begin = 0; begin <= spec.size();) {
      const size_t end = std::min(spec.find(',', begin), spec.size());
      const std::string_view part = spec.substr(begin, end - begin);
      begin = end + 1;
      if (part.empty()) {
        continue;
      }
      const size_t equals = part.find('=');
      const bool names_one = equals != std::string_view::npos;
      const auto level = indexOf(kLevelNames, names_one ? part.substr(equals + 1) : part);
      const auto logger = names_one ? loggerOf(part.substr(0, equals)) : std::nullopt;
      if (!level || (names_one && !logger)) {
        wrong.append(wrong.empty() ? "" : ",").append(part);
      } else if (names_one) {
        one[*logger] = static_cast<LogLevel>(*level);
      } else {
        all = static_cast<LogLevel>(*level);
      }
    }
    for (size_t i = 0; i < one.size(); ++i) {
      levels_[i].store(one[i].value_or(all), std::memory_order_relaxed);
    }
    if (!wrong.empty()) {
      write("intercept", LogLevel::kWarn, "REFT_LOG has '" + wrong + "'; allowed: " + allowed());
    }
  }

  bool enabled(Logger logger, LogLevel level) const {
    return level >= levels_[logger.index()].load(std::memory_order_relaxed);
  }

  void write(Logger logger, LogLevel level, const std::string& message) {
    spdlog::logger& target = *loggers_[logger.index()];
    const std::string line =
        target.name() + " " + std::string(kLevelNames[static_cast<size_t>(level)]) + " " + message;
    target.log(static_cast<spdlog::level::level_enum>(level), spdlog::string_view_t(line));
  }

 private:
  static std::string allowed() {
    std::string text = "<level> or reft.<logger>=<level>, separated by commas; levels:";
    for (const std::string_view name : kLevelNames) {
      text.append(" ").append(name);
    }
    text += "; loggers:";
    for (const std::string_view name : kLoggers) {
      text.append(" ").append(name);
    }
    return text;
  }

  std::array<std::unique_ptr<spdlog::logger>, kLoggers.size()> loggers_;
  std::array<std::atomic<LogLevel>, kLoggers.size()> levels_{};
};

// Never destroyed: threads may log after static destructors ran.
Log& log() {
  static auto* instance = new Log;
  return *instance;
}

}  // namespace

void configureLog(const std::string& spec) noexcept {
  try {
    log().configure(spec);
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory; the levels stay
  }
}

bool logEnabled(Logger logger, LogLevel level) noexcept {
  try {
    return log().enabled(logger, level);
  } catch (...) {  // no memory for the loggers
    return false;
  }
}

void logWrite(Logger logger, LogLevel level, const std::string& message) noexcept {
  try {
    log().write(logger, level, message);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the line is lost
  }
}

}  // namespace reft

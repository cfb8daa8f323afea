#include "intercept/base/log.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace reft {

namespace {

constexpr const char* kLevelNames[] = {"trace", "debug", "info", "warn", "error"};

std::optional<LogLevel> levelOf(const std::string& name) {
  for (size_t i = 0; i < std::size(kLevelNames); ++i) {
    if (name == kLevelNames[i]) {
      return static_cast<LogLevel>(i);
    }
  }
  return std::nullopt;
}

// Loggers are made by hand and kept out of spdlog's registry: nothing of the process's own spdlog
// is touched.
class Loggers {
 public:
  Loggers() : sink_(std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    const char* spec = std::getenv("REFT_LOG");
    configure(spec == nullptr ? "" : spec);
  }

  void configure(const std::string& spec) {
    std::string wrong;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      default_ = LogLevel::kWarn;
      levels_.clear();
      size_t begin = 0;
      while (begin <= spec.size()) {
        size_t end = std::min(spec.find(',', begin), spec.size());
        const std::string part = spec.substr(begin, end - begin);
        begin = end + 1;
        if (part.empty()) {
          continue;
        }
        const size_t equals = part.find('=');
        const auto level = levelOf(equals == std::string::npos ? part : part.substr(equals + 1));
        if (!level) {
          wrong += (wrong.empty() ? "" : ",") + part;
        } else if (equals == std::string::npos) {
          default_ = *level;
        } else {
          levels_[part.substr(0, equals)] = *level;
        }
      }
    }
    if (!wrong.empty()) {
      write("intercept", LogLevel::kWarn,
            "REFT_LOG has '" + wrong +
                "'; allowed: level[,logger=level…] with trace, debug, info, warn, error");
    }
  }

  bool enabled(const char* folder, LogLevel level) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = levels_.find(std::string("reft.") + folder);
    return level >= (found == levels_.end() ? default_ : found->second);
  }

  void write(const char* folder, LogLevel level, const std::string& message) {
    std::shared_ptr<spdlog::logger> logger;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& slot = loggers_[folder];
      if (!slot) {
        slot = std::make_shared<spdlog::logger>(std::string("reft.") + folder, sink_);
        slot->set_level(spdlog::level::trace);  // enabled() decides
        slot->set_pattern("%v");
      }
      logger = slot;
    }
    logger->log(static_cast<spdlog::level::level_enum>(level),
                spdlog::string_view_t(std::string("reft ") +
                                      kLevelNames[static_cast<size_t>(level)] + " " + message));
  }

 private:
  std::shared_ptr<spdlog::sinks::stderr_sink_mt> sink_;
  std::mutex mutex_;
  LogLevel default_ = LogLevel::kWarn;
  std::map<std::string, LogLevel> levels_;
  std::map<std::string, std::shared_ptr<spdlog::logger>> loggers_;
};

// Never destroyed: threads may log after static destructors ran.
Loggers& loggers() {
  static auto* instance = new Loggers;
  return *instance;
}

}  // namespace

void configureLog(const std::string& spec) noexcept {
  try {
    loggers().configure(spec);
  } catch (...) {
  }
}

bool logEnabled(const char* folder, LogLevel level) noexcept {
  try {
    return loggers().enabled(folder, level);
  } catch (...) {
    return false;
  }
}

void logWrite(const char* folder, LogLevel level, const std::string& message) noexcept {
  try {
    loggers().write(folder, level, message);
  } catch (...) {
  }
}

}  // namespace reft

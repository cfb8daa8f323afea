#include "intercept/base/voice.h"

#include <unistd.h>

#include <string>

namespace reft {

void say(std::string_view text) noexcept {
  try {
    const std::string line = "reft: " + std::string(text) + "\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a line, which is then lost
  }
}

void warn(std::string_view text) noexcept {
  try {
    say("warning: " + std::string(text));
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a line, which is then lost
  }
}

}  // namespace reft

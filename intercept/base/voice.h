// What users read on a rank's terminal, from threads that must not wait for the interpreter: lines
// `reft: <text>` on standard error. Python's lines go through python/reft/_voice.py; details for
// developers go to the log (log.h).
//
// Threads: any. Errors: none; a line that cannot be written is lost.
#pragma once

#include <string_view>

namespace reft {

// Writes one line, in one write so that lines of several ranks do not mix.
void say(std::string_view text) noexcept;
// The same, as a warning: `reft: warning: <text>`.
void warn(std::string_view text) noexcept;

}  // namespace reft

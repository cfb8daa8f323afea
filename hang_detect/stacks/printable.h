// Foreign text made fit for a terminal or a log.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace reft {

// At most `limit` bytes of `text`, with "?" for each byte that is not printable ASCII.
std::string printable(std::string_view text, size_t limit = 1000);

// The last part of a path, printable.
std::string fileName(std::string_view path);

}  // namespace reft

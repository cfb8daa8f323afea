// Line breaks for a terminal.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace reft {

// Breaks lines at blanks, and longer words at `columns`; keeps the line breaks of `text`. Lines
// after the first start with `indent` blanks.
std::string wrapText(std::string_view text, size_t indent, size_t columns = 80);

}  // namespace reft

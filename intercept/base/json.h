// Parses JSON that comes from outside: over a socket, out of the job's store, from a file. Python
// has python/reft/_link/bounded_json.py.
//
// nlohmann's parser needs no stack, but copies, comparisons and dump() of what it makes recurse as
// deep as the text is nested: 200,000 brackets end the process. So the depth is counted before
// anything is built, and the length too, because a value takes many times the memory of its text.
//
// Threads: re-entrant.
// Errors:  none from parseJson(): what is no JSON, too long or too deep is a discarded value, for
//          which is_discarded() is true and is_object(), is_array() ... are false.
#pragma once

#include <cstddef>
#include <string_view>

#include <nlohmann/json.hpp>

namespace reft {

constexpr int kDeepestJson = 32;
constexpr size_t kLongestJson = size_t{64} << 20;

// How deep the brackets of a text are nested, those inside strings left out. Text that is no JSON
// has some depth, too. Stops counting beyond `most`.
inline int depthOfJson(std::string_view text, int most = kDeepestJson) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size() && deepest <= most; ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = deepest < ++depth ? depth : deepest;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

inline nlohmann::json parseJson(std::string_view text, size_t longest = kLongestJson) {
  if (text.size() > longest || depthOfJson(text) > kDeepestJson) {
    return nlohmann::json::value_t::discarded;
  }
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace reft

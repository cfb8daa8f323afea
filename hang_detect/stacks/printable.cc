#include "hang_detect/stacks/printable.h"

#include <algorithm>

namespace reft {

std::string printable(std::string_view text, size_t limit) {
  std::string clean(text.substr(0, limit));
  std::replace_if(
      clean.begin(), clean.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return clean;
}

std::string fileName(std::string_view path) {
  const size_t slash = path.rfind('/');
  return printable(slash == std::string_view::npos ? path : path.substr(slash + 1), 60);
}

}  // namespace reft

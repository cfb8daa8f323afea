#include "hang_detect/report/wrap.h"

namespace reft {

namespace {

// Appends one line of text to `result`, whose current line has `column` characters.
void wrapLine(std::string& result, std::string_view text, size_t column, size_t indent,
              size_t columns) {
  bool first_word = true;
  while (!text.empty()) {
    const size_t blank = text.find(' ');
    std::string_view word = text.substr(0, blank);
    text.remove_prefix(blank == std::string_view::npos ? text.size() : blank + 1);
    if (!first_word && column + 1 + word.size() > columns) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
      first_word = true;
    }
    if (!first_word) {
      result += ' ';
      ++column;
    }
    first_word = false;
    while (column + word.size() > columns && columns > indent) {  // a word longer than a line
      const size_t room = columns - column;
      result.append(word.substr(0, room)).append("\n").append(indent, ' ');
      word.remove_prefix(room);
      column = indent;
    }
    result += word;
    column += word.size();
  }
}

}  // namespace

std::string wrapText(std::string_view text, size_t indent, size_t columns) {
  std::string result;
  size_t end = text.find('\n');
  wrapLine(result, text.substr(0, end), 0, indent, columns);
  while (end != std::string_view::npos) {
    text.remove_prefix(end + 1);
    end = text.find('\n');
    result += "\n" + std::string(indent, ' ');
    wrapLine(result, text.substr(0, end), indent, indent, columns);
  }
  return result;
}

}  // namespace reft

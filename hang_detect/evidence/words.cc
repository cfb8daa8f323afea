#include "hang_detect/evidence/words.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

namespace reft::words {

namespace {

std::string place(const StackFrame& frame) {
  return fileName(frame.file) + ":" + (frame.line > 0 ? std::to_string(frame.line) : "?") + " " +
         printable(frame.function, 60);
}

}  // namespace

bool isOfLibrary(std::string_view file) {
  for (const std::string_view part :
       {"/site-packages/", "/dist-packages/", "/lib/python", "/python/reft", "<frozen"}) {
    if (file.find(part) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

std::string printable(std::string_view text, size_t limit) {
  std::string clean(text.substr(0, limit));
  std::replace_if(
      clean.begin(), clean.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return clean;
}

std::string groupName(const OpGroup& group) {
  return printable(std::string_view(group.name, ::strnlen(group.name, OpGroup::kNameBytes)));
}

std::string groupName(const RankEvidence& rank, uint32_t group) {
  return group < rank.groups.size() ? groupName(rank.groups[group]) : "#" + std::to_string(group);
}

std::string dtypeName(uint8_t dtype) {
  // c10/core/ScalarType.h; numbers are only ever appended there.
  static constexpr std::array kNames{"uint8",           "int8",
                                     "int16",           "int32",
                                     "int64",           "float16",
                                     "float32",         "float64",
                                     "complex32",       "complex64",
                                     "complex128",      "bool",
                                     "qint8",           "quint8",
                                     "qint32",          "bfloat16",
                                     "quint4x2",        "quint2x4",
                                     "bits1x8",         "bits2x4",
                                     "bits4x2",         "bits8",
                                     "bits16",          "float8_e5m2",
                                     "float8_e4m3fn",   "float8_e5m2fnuz",
                                     "float8_e4m3fnuz", "uint16",
                                     "uint32",          "uint64"};
  return dtype < kNames.size() ? kNames[dtype]
         : dtype == 255        ? "no dtype"
                               : "dtype " + std::to_string(dtype);
}

std::string reduceOpName(uint8_t op) {
  // torch/csrc/distributed/c10d/Types.hpp
  static constexpr std::array kNames{"sum",  "avg", "product", "min",       "max",
                                     "band", "bor", "bxor",    "premul_sum"};
  return op < kNames.size() ? kNames[op]
         : op == 255        ? "no reduction"
                            : "reduction " + std::to_string(op);
}

bool isOpen(const OpEntry& op) {
  return op.begin_ns != 0 && op.done_ns == 0 && !op.failed;
}

bool isHeld(const OpEntry& op) {
  return isOpen(op) && (op.enqueued_ns == 0 || (op.wait_begin_ns != 0 && op.wait_end_ns == 0));
}

std::string opName(const OpEntry& op, const RankEvidence& rank) {
  std::string text = std::string(opKindName(op.kind)) + " seq " + std::to_string(op.seq) +
                     " of group " + groupName(rank, op.group);
  if (op.kind == OpKind::kSend) {
    text += " to " + std::to_string(op.peer);
  } else if (op.kind == OpKind::kRecv) {
    text += " from " + std::to_string(op.peer);
  }
  return text;
}

std::string rankList(const std::vector<int>& ranks) {
  if (ranks.empty()) {
    return "no rank";
  }
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    text += " " + std::to_string(ranks[i]);
    if (last - i == 1) {
      text += " " + std::to_string(ranks[last]);
    } else if (last > i) {
      text += "-" + std::to_string(ranks[last]);
    }
    i = last + 1;
  }
  return text;
}

std::string bytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string seconds(double seconds) {
  char text[64];
  if (seconds < 0.001) {
    std::snprintf(text, sizeof(text), "%.0f us", seconds * 1e6);
  } else if (seconds < 1) {
    std::snprintf(text, sizeof(text), "%.1f ms", seconds * 1e3);
  } else if (seconds < 120) {
    std::snprintf(text, sizeof(text), "%.1f s", seconds);
  } else if (seconds < 7200) {
    std::snprintf(text, sizeof(text), "%.0f min", seconds / 60);
  } else {
    std::snprintf(text, sizeof(text), "%.1f h", seconds / 3600);
  }
  return text;
}

std::string fileName(std::string_view path) {
  const size_t slash = path.rfind('/');
  return printable(slash == std::string_view::npos ? path : path.substr(slash + 1), 60);
}

std::string placeOf(const ThreadStack& thread) {
  if (thread.frames.empty()) {
    return "";
  }
  const StackFrame& top = thread.frames.front();
  if (isOfLibrary(top.file)) {
    const auto own = std::find_if(thread.frames.begin(), thread.frames.end(),
                                  [](const StackFrame& frame) { return !isOfLibrary(frame.file); });
    if (own != thread.frames.end()) {
      return place(*own) + " (inside " + place(top) + ")";
    }
  }
  return place(top);
}

std::string mainThreadPlace(const RankEvidence& rank) {
  for (const ThreadStack& thread : parseStacks(rank.stacks_text).threads) {
    if (thread.main && !thread.frames.empty()) {
      return placeOf(thread);
    }
  }
  return "";
}

std::string wrap(std::string_view text, size_t indent, size_t columns) {
  std::string result;
  size_t column = 0;
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
  return result;
}

}  // namespace reft::words

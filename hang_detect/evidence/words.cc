#include "hang_detect/evidence/words.h"

#include <array>
#include <cstdio>
#include <cstring>

#include "hang_detect/stacks/printable.h"

namespace reft::words {

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

std::string nodeList(const std::vector<int>& nodes) {
  std::string text = rankList(nodes);
  return text.replace(text.find("rank"), 4, "node");
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

}  // namespace reft::words

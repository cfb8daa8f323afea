#include "intercept/base/env.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "intercept/base/error.h"

namespace reft {

namespace {

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t from = 0;
  for (size_t at = text.find(separator); at != std::string::npos; at = text.find(separator, from)) {
    parts.push_back(text.substr(from, at - from));
    from = at + separator.size();
  }
  parts.push_back(text.substr(from));
  return parts;
}

[[noreturn]] void malformed(const EnvRow& row, const std::string& text) {
  throw InvalidArgument(row.name, "'" + text + "'", row.allowed);
}

// "4M" → 4194304. Binary suffixes; nullopt-like -1 for anything else.
int64_t parseBytes(const std::string& text) {
  size_t used = 0;
  double value = -1;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    return -1;
  }
  const std::string suffix = text.substr(used);
  int shift = 0;
  if (suffix == "K" || suffix == "KiB") {
    shift = 10;
  } else if (suffix == "M" || suffix == "MiB") {
    shift = 20;
  } else if (suffix == "G" || suffix == "GiB") {
    shift = 30;
  } else if (suffix == "T" || suffix == "TiB") {
    shift = 40;
  } else if (!suffix.empty() && suffix != "B") {
    return -1;
  }
  const double bytes = value * std::ldexp(1.0, shift);
  return std::isfinite(bytes) && bytes >= 0 && bytes < 9e18 ? static_cast<int64_t>(bytes) : -1;
}

// Bounds of "2..3" (with byte suffixes); no bounds: everything ≥ 0.
std::pair<double, double> bounds(const EnvRow& row) {
  const auto ends = split(row.allowed, "..");
  if (ends.size() != 2) {
    return {0, 9e18};
  }
  const auto value = [&](const std::string& text) {
    return row.kind == EnvRow::kBytes ? static_cast<double>(parseBytes(text)) : std::stod(text);
  };
  return {value(ends[0]), value(ends[1])};
}

size_t editDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

}  // namespace

const std::vector<EnvRow>& Env::table() {
  static const std::vector<EnvRow> rows = {
#define REFT_ENV_ROW(member, name, kind, default_text, allowed, sentence) \
  {#member, name, EnvRow::kind, default_text, allowed, sentence},
      REFT_ENV_TABLE(REFT_ENV_ROW)
#undef REFT_ENV_ROW
  };
  return rows;
}

Env Env::parse(const Lookup& lookup) {
  Env env;
  for (const EnvRow& row : table()) {
    const auto given = lookup(row.name);
    // An empty value is an unset one: launchers like to export empty strings.
    Value value{given && !given->empty() ? *given : row.default_text, 0, 0};
    const std::string& text = value.text;
    size_t used = 0;
    switch (row.kind) {
      case EnvRow::kFlag:
        if (text != "0" && text != "1") {
          malformed(row, text);
        }
        value.integer = text == "1" ? 1 : 0;
        break;
      case EnvRow::kInt:
        try {
          value.integer = std::stoll(text, &used);
        } catch (const std::exception&) {
          used = 0;
        }
        if (used == 0 || used != text.size() || static_cast<double>(value.integer) < bounds(row).first ||
            static_cast<double>(value.integer) > bounds(row).second) {
          malformed(row, text);
        }
        break;
      case EnvRow::kBytes:
        value.integer = parseBytes(text);
        if (value.integer < 0 || static_cast<double>(value.integer) < bounds(row).first ||
            static_cast<double>(value.integer) > bounds(row).second) {
          malformed(row, text);
        }
        break;
      case EnvRow::kSeconds:
        try {
          value.seconds = std::stod(text, &used);
        } catch (const std::exception&) {
          used = 0;
        }
        // Negated, so that NaN is malformed as well.
        if (used == 0 || used != text.size() ||
            !(value.seconds >= bounds(row).first && value.seconds <= bounds(row).second)) {
          malformed(row, text);
        }
        break;
      case EnvRow::kChoice: {
        const auto choices = split(row.allowed, "|");
        if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
          malformed(row, text);
        }
        break;
      }
      case EnvRow::kText: break;
    }
    env.values_.push_back(std::move(value));
  }
  return env;
}

Env Env::parse() {
  return parse([](const std::string& name) -> std::optional<std::string> {
    const char* text = std::getenv(name.c_str());
    return text == nullptr ? std::nullopt : std::optional<std::string>(text);
  });
}

std::vector<std::pair<std::string, std::string>> Env::unknown(const std::vector<std::string>& names) {
  constexpr size_t kNear = 4;
  std::vector<std::pair<std::string, std::string>> result;
  for (const std::string& name : names) {
    size_t nearest = kNear + 1;
    std::string suggestion;
    for (const EnvRow& row : table()) {
      const size_t distance = editDistance(name, row.name);
      if (distance < nearest) {
        nearest = distance;
        suggestion = row.name;
      }
    }
    if (name.rfind("REFT_", 0) == 0 && nearest > 0) {
      result.emplace_back(name, suggestion);
    }
  }
  return result;
}

const Env::Value& Env::value(std::string_view member, std::initializer_list<EnvRow::Kind> kinds) const {
  for (size_t i = 0; i < table().size(); ++i) {
    const EnvRow& row = table()[i];
    if (member == row.member && std::find(kinds.begin(), kinds.end(), row.kind) != kinds.end()) {
      return values_[i];
    }
  }
  throw InvalidArgument("setting", std::string(member), "a member of REFT_ENV_TABLE of this kind");
}

bool Env::flag(std::string_view member) const { return value(member, {EnvRow::kFlag}).integer != 0; }
int64_t Env::integer(std::string_view member) const { return value(member, {EnvRow::kInt, EnvRow::kBytes}).integer; }
double Env::seconds(std::string_view member) const { return value(member, {EnvRow::kSeconds}).seconds; }
const std::string& Env::text(std::string_view member) const {
  return value(member, {EnvRow::kFlag, EnvRow::kInt, EnvRow::kSeconds, EnvRow::kBytes, EnvRow::kChoice, EnvRow::kText}).text;
}

}  // namespace reft

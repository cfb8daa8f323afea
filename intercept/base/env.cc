#include "intercept/base/env.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "intercept/base/error.h"

namespace reft {

namespace {

// Binary suffixes; empty on anything that is not a whole non-negative number with at most one of
// them.
std::optional<int64_t> bytesOf(std::string_view text) {
  int shift = 0;
  if (!text.empty()) {
    constexpr std::string_view kSuffixes = "KMGT";
    const char upper =
        text.back() >= 'a' ? static_cast<char>(text.back() - 'a' + 'A') : text.back();
    if (const size_t at = kSuffixes.find(upper); at != std::string_view::npos) {
      shift = 10 * static_cast<int>(at + 1);
      text.remove_suffix(1);
    }
  }
  int64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || code != std::errc() || end != text.data() + text.size() || number < 0 ||
      number > (std::numeric_limits<int64_t>::max() >> shift)) {
    return std::nullopt;
  }
  return number << shift;
}

std::optional<int64_t> integerOf(std::string_view text) {
  int64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  return !text.empty() && code == std::errc() && end == text.data() + text.size()
             ? std::optional(number)
             : std::nullopt;
}

std::optional<double> secondsOf(std::string_view text) {
  double number = 0;
  const auto [end, code] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  return !text.empty() && code == std::errc() && end == text.data() + text.size()
             ? std::optional(number)
             : std::nullopt;
}

// "lo..hi" of the table; what has no range allows every value.
template <typename Number>
bool inRange(std::string_view allowed, std::optional<Number> (*parse)(std::string_view),
             Number number) {
  const size_t dots = allowed.find("..");
  if (dots == std::string_view::npos) {
    return true;
  }
  const auto low = parse(allowed.substr(0, dots));
  const auto high = parse(allowed.substr(dots + 2));
  return low && high && number >= *low && number <= *high;
}

bool isChoice(std::string_view allowed, std::string_view text) {
  for (size_t begin = 0; begin <= allowed.size();) {
    const size_t end = std::min(allowed.find('|', begin), allowed.size());
    if (allowed.substr(begin, end - begin) == text) {
      return true;
    }
    begin = end + 1;
  }
  return false;
}

// Edits of one character (Levenshtein).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j < row.size(); ++j) {
    row[j] = j;
  }
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

const std::vector<EnvRow>& Env::table() {
#define REFT_ENV_ROW(member, name, kind, default_text, allowed, sentence) \
  EnvRow{#member, name, EnvRow::kind, default_text, allowed, sentence},
  static const std::vector<EnvRow> rows = {REFT_ENV_TABLE(REFT_ENV_ROW)};
#undef REFT_ENV_ROW
  return rows;
}

Env Env::parse(const Lookup& lookup) {
  Env env;
  for (const EnvRow& row : table()) {
    const std::optional<std::string> given = lookup(row.name);
    // A variable that is set but empty counts as not set: that is how job files switch one off.
    Value value;
    value.text = given && !given->empty() ? *given : row.default_text;
    std::string allowed = row.allowed;
    bool good = true;
    switch (row.kind) {
      case EnvRow::kFlag:
      case EnvRow::kChoice: good = isChoice(row.allowed, value.text); break;
      case EnvRow::kInt: {
        const auto number = integerOf(value.text);
        good = number && inRange(row.allowed, integerOf, *number);
        allowed += number ? "" : ", whole numbers";
        value.integer = number.value_or(0);
        break;
      }
      case EnvRow::kBytes: {
        const auto number = bytesOf(value.text);
        good = number && inRange(row.allowed, bytesOf, *number);
        value.integer = number.value_or(0);
        break;
      }
      case EnvRow::kSeconds: {
        const auto number = secondsOf(value.text);
        good = number && inRange(row.allowed, secondsOf, *number);
        value.seconds = number.value_or(0);
        break;
      }
      case EnvRow::kText: break;
    }
    if (!good) {
      throw InvalidArgument(row.name, "'" + value.text + "'", allowed);
    }
    env.values_.push_back(std::move(value));
  }
  return env;
}

Env Env::parse() {
  return parse([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

std::vector<std::pair<std::string, std::string>> Env::unknown(
    const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, std::string>> result;
  for (const std::string& name : names) {
    if (name.compare(0, 5, "REFT_") != 0) {
      continue;
    }
    std::string nearest;
    size_t least = std::max<size_t>(2, name.size() / 4) + 1;
    for (const EnvRow& row : table()) {
      const size_t edits = distance(name, row.name);
      if (edits < least) {
        least = edits;
        nearest = row.name;
      }
    }
    if (least != 0) {
      result.emplace_back(name, nearest);
    }
  }
  return result;
}

const Env::Value& Env::value(std::string_view member,
                             std::initializer_list<EnvRow::Kind> kinds) const {
  const auto& rows = table();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (member == rows[i].member) {
      if (std::find(kinds.begin(), kinds.end(), rows[i].kind) == kinds.end()) {
        throw std::logic_error("environment member '" + std::string(member) +
                               "' is of another kind");
      }
      return values_.at(i);
    }
  }
  throw std::logic_error("environment has no member '" + std::string(member) + "'");
}

bool Env::flag(std::string_view member) const {
  return value(member, {EnvRow::kFlag}).text == "1";
}

int64_t Env::integer(std::string_view member) const {
  return value(member, {EnvRow::kInt, EnvRow::kBytes}).integer;
}

double Env::seconds(std::string_view member) const {
  return value(member, {EnvRow::kSeconds}).seconds;
}

const std::string& Env::text(std::string_view member) const {
  return value(member, {EnvRow::kFlag, EnvRow::kInt, EnvRow::kSeconds, EnvRow::kBytes,
                        EnvRow::kChoice, EnvRow::kText})
      .text;
}

}  // namespace reft

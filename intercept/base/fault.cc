#include "intercept/base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <sstream>
#include <vector>

#include "intercept/base/error.h"

namespace reft {

namespace fault_detail {

std::atomic<bool> armed{false};

namespace {

enum class Action : uint8_t { kKill, kStop, kExit, kAbort };

struct Rule {
  std::optional<int64_t> step;
  FaultPoint point;
  Action action;
};

// Written before `armed` is set, then only read.
std::vector<Rule>& rules() {
  static auto* list = new std::vector<Rule>;
  return *list;
}

}  // namespace

void hit(FaultPoint point, int64_t step) noexcept {
  for (const Rule& rule : rules()) {
    if (rule.point != point || (rule.step && *rule.step != step)) {
      continue;
    }
    switch (rule.action) {
      case Action::kKill: ::kill(::getpid(), SIGKILL); break;
      case Action::kStop: ::kill(::getpid(), SIGSTOP); break;
      case Action::kExit: ::_exit(17);
      case Action::kAbort: std::abort();
    }
  }
}

}  // namespace fault_detail

namespace {

constexpr const char* kForm = "rank:step:point:action[;…], rank and step may be *, action kill|stop|exit|abort";

int64_t number(const std::string& text, const std::string& spec) {
  size_t used = 0;
  int64_t value = -1;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) {
    throw InvalidArgument("REFT_FAULT", "'" + spec + "'", kForm);
  }
  return value;
}

int64_t fromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? 0 : std::strtoll(text, nullptr, 10);
}

}  // namespace

void configureFaults(const std::string& spec, int rank) {
  using fault_detail::Action;
  fault_detail::armed.store(false);
  std::vector<fault_detail::Rule> rules;
  std::istringstream parts(spec);
  for (std::string part; std::getline(parts, part, ';');) {
    if (part.empty()) {
      continue;
    }
    std::vector<std::string> fields;
    std::istringstream pieces(part);
    for (std::string field; std::getline(pieces, field, ':');) {
      fields.push_back(field);
    }
    if (fields.size() != 4) {
      throw InvalidArgument("REFT_FAULT", "'" + spec + "'", kForm);
    }
    fault_detail::Rule rule{};
    if (fields[1] != "*") {
      rule.step = number(fields[1], spec);
    }
    bool known = false;
#define REFT_FAULT_MATCH(name)       \
  if (fields[2] == #name) {          \
    rule.point = FaultPoint::name;   \
    known = true;                    \
  }
    REFT_FAULT_POINTS(REFT_FAULT_MATCH)
#undef REFT_FAULT_MATCH
    const std::string& action = fields[3];
    if (action == "kill") {
      rule.action = Action::kKill;
    } else if (action == "stop") {
      rule.action = Action::kStop;
    } else if (action == "exit") {
      rule.action = Action::kExit;
    } else if (action == "abort") {
      rule.action = Action::kAbort;
    } else {
      known = false;
    }
    if (!known) {
      throw InvalidArgument("REFT_FAULT", "'" + spec + "'", kForm);
    }
    if (fields[0] == "*" || number(fields[0], spec) == rank) {
      rules.push_back(rule);
    }
  }
  // A restarted rank must not die of the same rule again.
  if (fromEnvironment("REFT_FAULT_ATTEMPT") != fromEnvironment("TORCHELASTIC_RESTART_COUNT")) {
    rules.clear();
  }
  fault_detail::rules() = std::move(rules);
  fault_detail::armed.store(!fault_detail::rules().empty());
}

}  // namespace reft

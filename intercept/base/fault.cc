#include "intercept/base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft {

namespace {

constexpr const char* kPointNames[] = {
#define REFT_FAULT_NAME(name) #name,
    REFT_FAULT_POINTS(REFT_FAULT_NAME)
#undef REFT_FAULT_NAME
};
constexpr const char* kActionNames[] = {"kill", "stop", "exit", "abort"};
constexpr size_t kKill = 0, kStop = 1, kExit = 2;

struct Rule {
  std::optional<int64_t> step;  // empty: any
  FaultPoint point = FaultPoint::capture;
  size_t action = kKill;
  std::atomic<bool> spent{false};
};
using Rules = std::vector<std::unique_ptr<Rule>>;

// Replaced as a whole and never freed: another thread may stand in hit().
std::atomic<Rules*> rules{nullptr};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

template <size_t N>
size_t indexOf(const char* const (&names)[N], const std::string& name, const std::string& spec) {
  std::string allowed;
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) {
      return i;
    }
    allowed += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  throw InvalidArgument("REFT_FAULT", "'" + spec + "' with '" + name + "'", allowed);
}

std::optional<int64_t> numberOrAny(const std::string& text, const std::string& spec) {
  if (text == "*") {
    return std::nullopt;
  }
  if (text.empty() || text.size() > 18 ||
      text.find_first_not_of("0123456789") != std::string::npos) {
    throw InvalidArgument("REFT_FAULT", "'" + spec + "'",
                          "rank:step:point:action[;…] with rank and step a number or *");
  }
  return std::stoll(text);
}

// The fault fires in one attempt of torchrun, so that a restarted rank is not killed again.
bool thisAttempt() {
  const char* wanted = std::getenv("REFT_FAULT_ATTEMPT");
  const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return std::atoll(wanted == nullptr ? "0" : wanted) ==
         std::atoll(attempt == nullptr ? "0" : attempt);
}

}  // namespace

std::atomic<bool> fault_detail::armed{false};
std::atomic<int64_t> fault_detail::step{0};

void configureFaults(const std::string& spec, int rank) {
  auto parsed = std::make_unique<Rules>();
  for (const std::string& part : split(spec, ';')) {
    if (part.empty()) {
      continue;
    }
    const std::vector<std::string> fields = split(part, ':');
    if (fields.size() != 4) {
      throw InvalidArgument("REFT_FAULT", "'" + part + "'", "rank:step:point:action[;…]");
    }
    auto rule = std::make_unique<Rule>();
    const auto rule_rank = numberOrAny(fields[0], part);
    rule->step = numberOrAny(fields[1], part);
    rule->point = static_cast<FaultPoint>(indexOf(kPointNames, fields[2], part));
    rule->action = indexOf(kActionNames, fields[3], part);
    if (!rule_rank || *rule_rank == rank) {
      parsed->push_back(std::move(rule));
    }
  }
  const bool armed = !parsed->empty() && thisAttempt();
  fault_detail::armed.store(false);
  rules.store(parsed.release());
  fault_detail::armed.store(armed);
}

void fault_detail::hit(FaultPoint point, int64_t step) noexcept {
  const Rules* current = rules.load();
  if (current == nullptr) {
    return;
  }
  for (const auto& rule : *current) {
    if (rule->point != point || (rule->step && *rule->step != step) || rule->spent.exchange(true)) {
      continue;
    }
    logWarn("intercept", "fault point ", kPointNames[static_cast<size_t>(point)], " of step ", step,
            ": ", kActionNames[rule->action]);
    if (rule->action == kKill) {
      ::kill(::getpid(), SIGKILL);
    } else if (rule->action == kStop) {
      ::kill(::getpid(), SIGSTOP);
    } else if (rule->action == kExit) {
      ::_exit(17);
    } else {
      std::abort();
    }
  }
}

}  // namespace reft

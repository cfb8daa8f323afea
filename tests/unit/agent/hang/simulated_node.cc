#include "tests/unit/agent/hang/simulated_node.h"

#include <algorithm>
#include <deque>
#include <variant>

#include <nlohmann/json.hpp>

namespace reft::agent {

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kPollNs = 50 * kMs;      // until a rank that does not answer is tried again
constexpr int64_t kAnswerNs = 3500 * kMs;  // longer than a look waits for answers
constexpr int kFirstPid = 1000;            // as SimulatedRanks::evidence()

Investigation::Settings settingsOf(int64_t suspect_ns, int64_t tick_ns) {
  Investigation::Settings settings;
  settings.job = "soak";
  settings.suspect_sec = static_cast<double>(suspect_ns) * 1e-9;
  settings.tick_ns = tick_ns;
  return settings;
}

uint64_t connectionOf(int rank) {
  return static_cast<uint64_t>(rank) + 1;
}

}  // namespace

SimulatedNode::SimulatedNode(int64_t suspect_ns, SimulatedClock& clock, uint64_t seed)
    : clock_(clock),
      random_(seed),
      investigation_(settingsOf(suspect_ns, kTickNs)),
      next_tick_(clock.now_ns) {}

void SimulatedNode::join(SimulatedRanks* ranks) {
  ranks_ = ranks;
  ++incarnation_;
  ended_.clear();
}

int64_t SimulatedNode::nextNs() const {
  int64_t next = next_tick_;
  for (const auto& answer : answers_) {
    next = std::min(next, answer.at_ns);
  }
  return next;
}

void SimulatedNode::stoodStill(int64_t ns) {
  next_tick_ += ns;
  for (auto& answer : answers_) {
    answer.at_ns += ns;
  }
}

void SimulatedNode::wake() {
  const auto due = std::stable_partition(answers_.begin(), answers_.end(),
                                         [this](const auto& a) { return a.at_ns > clock_.now_ns; });
  const std::vector<Answer> now(due, answers_.end());
  answers_.erase(due, answers_.end());
  for (const auto& answer : now) {
    if (!ranks_->live(answer.rank)) {
      continue;
    }
    if (answer.outside) {
      investigation_.readOutside(answer.look, kFirstPid + answer.rank,
                                 {ranks_->stacks(answer.rank), "3.11", ""});
    } else if (ranks_->doing(answer.rank).answers) {
      investigation_.replied(
          answer.look, answer.rank,
          nlohmann::json{{"id", answer.look}, {"text", ranks_->stacks(answer.rank)}, {"error", ""}}
              .dump());
    } else if (clock_.now_ns < answer.until_ns) {
      answers_.push_back(answer);
      answers_.back().at_ns = clock_.now_ns + kPollNs;
    }
  }
  if (clock_.now_ns >= next_tick_) {
    next_tick_ += kTickNs;
    tick();
  }
  step();
}

void SimulatedNode::learn() {
  NodeFacts facts;
  facts.incarnation = incarnation_;
  facts.world = ranks_->layout().world();
  for (int r = 0; r < facts.world; ++r) {
    const bool alive = ranks_->alive(r);
    facts.ranks[r] = {r,     kFirstPid + r,     alive ? connectionOf(r) : 0, incarnation_,
                      alive, ranks_->saidBye(r)};
  }
  investigation_.know(std::move(facts));
}

void SimulatedNode::tick() {
  learn();
  std::deque<OpLogReader> readers;
  std::vector<Investigation::RankLog> logs;
  for (int r = 0; r < ranks_->layout().world(); ++r) {
    if (ranks_->live(r)) {
      const auto& log = readers.emplace_back(ranks_->log(r));
      logs.push_back({r, &log, true});
    } else if (ended_.insert(r).second) {
      investigation_.ended(r, false, ranks_->evidence(r), clock_.now_ns);
      execute();
    }
  }
  investigation_.tick(logs, false, clock_.now_ns);
  execute();
}

void SimulatedNode::step() {
  learn();
  investigation_.advance(clock_.now_ns);
  execute();
}

void SimulatedNode::execute() {
  for (auto actions = investigation_.takeActions(); !actions.empty();
       actions = investigation_.takeActions()) {
    for (const auto& action : actions) {
      std::visit([this](const auto& kind) { execute(kind); }, action);
    }
  }
}

// Time until a process has answered, or was read.
int64_t SimulatedNode::soon() {
  return clock_.now_ns + static_cast<int64_t>(1 + random_() % 60) * kMs;
}

void SimulatedNode::execute(const action::Sample& action) {
  looks_ += action.children ? 1 : 0;
  std::vector<ProcessSample> samples;
  for (const int rank : action.ranks) {
    const auto& state = ranks_->doing(rank).state;
    samples.push_back({rank, ranks_->used(rank), state == "T" || state == "t", {}});
  }
  investigation_.sampled(action.look, samples, clock_.now_ns);
}

void SimulatedNode::execute(const action::Count&) {
  std::map<int, ProcessCounters> counters;
  for (int r = 0; r < ranks_->layout().world(); ++r) {
    if (ranks_->live(r)) {
      counters[r] = ranks_->used(r);
    }
  }
  investigation_.counted(counters, clock_.now_ns);
}

void SimulatedNode::execute(const action::AskForStacks& action) {
  for (const auto connection : action.connections) {
    answers_.push_back(
        {soon(), action.look, static_cast<int>(connection) - 1, false, clock_.now_ns + kAnswerNs});
  }
}

void SimulatedNode::execute(const action::ReadOutside& action) {
  for (const int pid : action.pids) {
    answers_.push_back({soon(), action.look, pid - kFirstPid, true, 0});
  }
}

void SimulatedNode::execute(const action::Examine& action) {
  std::vector<RankEvidence> evidence;
  for (const int rank : action.ranks) {
    evidence.push_back(ranks_->evidence(rank));
  }
  investigation_.examined(action.look, std::move(evidence), clock_.now_ns);
}

void SimulatedNode::execute(const action::WriteReport& action) {
  if (!action.ends) {
    hangs_.push_back({clock_.now_ns, action.evidence, decide(action.evidence)});
  }
  investigation_.written(action, "/soak", true, clock_.now_ns);
}

}  // namespace reft::agent

#include "snapshot/commit/commit_ledger.h"

#include <algorithm>
#include <string>

#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/record/cut.h"

namespace reft {

CommitLedger::CommitLedger(HoldsSealed holds_sealed) : holds_sealed_(std::move(holds_sealed)) {}

CommitLedger::Incarnation& CommitLedger::incarnation(uint64_t id) {
  for (auto& known : incarnations_) {
    if (known.id == id) {
      return known;
    }
  }
  if (incarnations_.size() >= kIncarnations) {
    incarnations_.pop_front();
  }
  incarnations_.push_back({id, 0, false, {}});
  return incarnations_.back();
}

std::vector<CommitLedger::Action> CommitLedger::expect(uint64_t id, int local_world,
                                                       bool multi_node) {
  if (local_world < 1) {
    throw InvalidArgument("local_world", std::to_string(local_world), "1 or more");
  }
  auto& inc = incarnation(id);
  inc.local_world = local_world;
  inc.multi_node = multi_node;
  std::vector<Action> actions;
  for (auto& [step, ballots] : inc.steps) {
    decide(inc, step, actions);
  }
  return actions;
}

// A repeated answer carries the reason, too: a rank that lost the first one acts on it as others
// do.
CommitLedger::Action CommitLedger::tell(Action::Kind kind, const CommitKey& key,
                                        const Outcome& outcome, int rank) {
  return {kind,
          key,
          outcome.committed,
          rank,
          outcome.cut,
          outcome.proposal,
          outcome.replicas,
          outcome.plan_anew};
}

void CommitLedger::settle(Incarnation& inc, int64_t step, Ballots& ballots, const Outcome& outcome,
                          std::vector<Action>& actions) {
  const CommitKey key{step, inc.id};
  const bool committed = outcome.committed;
  ballots.outcome = committed ? Outcome{true, 0, outcome.proposal, 0, outcome.plan_anew}
                              : Outcome{false, outcome.cut, 0, outcome.replicas, outcome.plan_anew};
  ++(committed ? counters_.committed : counters_.aborted);
  counters_.inconsistent += !committed && outcome.cut != 0;
  counters_.parted += !committed && outcome.replicas != 0;
  if (committed && (!newest_committed_ || newest_committed_->incarnation != inc.id ||
                    newest_committed_->step < step)) {
    newest_committed_ = key;
  }
  logDebug("snapshot", "step ", step, " incarnation ", inc.id,
           committed ? " committed" : " aborted",
           committed || outcome.cut == 0 ? "" : ": inconsistent cut",
           committed || outcome.replicas == 0 ? "" : ": replicas do not agree");
  actions.push_back(tell(Action::kBroadcast, key, *ballots.outcome));
}

void CommitLedger::decide(Incarnation& inc, int64_t step, std::vector<Action>& actions) {
  auto& ballots = inc.steps.at(step);
  if (ballots.outcome || ballots.node_voted || inc.local_world == 0) {
    return;
  }
  const bool any_dropped = std::any_of(ballots.votes.begin(), ballots.votes.end(),
                                       [](const auto& vote) { return !vote.second.sealed; });
  if (!any_dropped && ballots.votes.size() < static_cast<size_t>(inc.local_world)) {
    return;
  }
  Held all{!any_dropped, 0, 0, 0, false};
  for (const auto& [rank, vote] : ballots.votes) {
    all.cut = CutCounter::combine(all.cut, vote.cut);
    all.replicas += vote.replicas;
    all.proposal = std::max(all.proposal, vote.proposal);
    all.plan_anew = all.plan_anew || vote.plan_anew;
  }
  if (inc.multi_node) {
    ballots.node_voted = true;
    logDebug("snapshot", "step ", step, " incarnation ", inc.id, " node votes ",
             any_dropped ? "dropped" : "sealed");
    actions.push_back({Action::kNodeVote,
                       {step, inc.id},
                       all.sealed,
                       -1,
                       all.cut,
                       all.proposal,
                       all.replicas,
                       all.plan_anew});
    return;
  }
  const bool inconsistent = !any_dropped && !CutCounter::consistent(all.cut);
  // At points that do not belong together, replicas differ for that reason.
  const bool parted = !any_dropped && !inconsistent && all.replicas != 0;
  settle(inc, step, ballots,
         {!any_dropped && !inconsistent && !parted, inconsistent ? all.cut : 0, all.proposal,
          parted ? all.replicas : 0, all.plan_anew || parted},
         actions);
}

void CommitLedger::record(Incarnation& inc, int rank, int64_t step, const Held& vote,
                          std::vector<Action>& actions) {
  auto& ballots = inc.steps[step];
  if (ballots.votes.emplace(rank, vote).second) {
    decide(inc, step, actions);
  }
}

std::vector<CommitLedger::Action> CommitLedger::vote(int rank, const CommitKey& key,
                                                     const Held& vote) {
  std::vector<Action> actions;
  auto& inc = incarnation(key.incarnation);
  auto& ballots = inc.steps[key.step];
  const bool repeated = ballots.votes.count(rank) != 0;
  counters_.repeated += repeated;
  if (ballots.outcome) {
    ballots.votes.emplace(rank, vote);
    actions.push_back(tell(Action::kAnswer, key, *ballots.outcome, rank));
  } else if (repeated && ballots.node_voted) {
    // The connection may have broken before local rank 0 got the node's vote.
    ballots.node_voted = false;
    decide(inc, key.step, actions);
  } else {
    record(inc, rank, key.step, vote, actions);
  }
  if (holds_sealed_) {
    for (auto& [step, earlier] : inc.steps) {
      if (step >= key.step) {
        break;
      }
      if (earlier.outcome || earlier.votes.count(rank) != 0) {
        continue;
      }
      if (const auto holds = holds_sealed_(rank, {step, inc.id})) {
        ++counters_.inferred;
        record(inc, rank, step, *holds, actions);
      }
    }
  }
  while (inc.steps.size() > kRemembered) {
    inc.steps.erase(inc.steps.begin());
  }
  return actions;
}

std::vector<CommitLedger::Action> CommitLedger::vaultHolds(
    int rank, const std::vector<std::pair<CommitKey, Held>>& sealed) {
  std::vector<Action> actions;
  for (const auto& [key, held] : sealed) {
    const auto known =
        std::find_if(incarnations_.begin(), incarnations_.end(),
                     [id = key.incarnation](const Incarnation& inc) { return inc.id == id; });
    if (known != incarnations_.end()) {
      record(*known, rank, key.step, held, actions);
      while (known->steps.size() > kRemembered) {
        known->steps.erase(known->steps.begin());
      }
    }
  }
  return actions;
}

bool CommitLedger::isDecided(const CommitKey& key) const {
  for (const auto& known : incarnations_) {
    if (known.id == key.incarnation) {
      const auto ballots = known.steps.find(key.step);
      return ballots != known.steps.end() && ballots->second.outcome.has_value();
    }
  }
  return false;
}

std::vector<CommitLedger::Vote> CommitLedger::takeBack(uint64_t incarnation,
                                                       const std::set<int>& ranks) {
  std::vector<Vote> taken;
  for (auto& known : incarnations_) {
    if (known.id != incarnation) {
      continue;
    }
    for (auto& [step, ballots] : known.steps) {
      if (ballots.node_voted || ballots.outcome) {
        continue;
      }
      for (const int rank : ranks) {
        const auto found = ballots.votes.find(rank);
        if (found != ballots.votes.end() && found->second.sealed) {
          taken.push_back({rank, {step, incarnation}, found->second});
          ballots.votes.erase(found);
        }
      }
    }
  }
  return taken;
}

std::vector<CommitLedger::Action> CommitLedger::jobOutcome(const CommitKey& key,
                                                           const Outcome& outcome) {
  std::vector<Action> actions;
  auto& inc = incarnation(key.incarnation);
  auto& ballots = inc.steps[key.step];
  if (!ballots.outcome) {
    settle(inc, key.step, ballots, outcome, actions);
  } else {
    actions.push_back(tell(Action::kBroadcast, key, *ballots.outcome));
  }
  while (inc.steps.size() > kRemembered) {
    inc.steps.erase(inc.steps.begin());
  }
  return actions;
}

std::vector<std::pair<CommitKey, size_t>> CommitLedger::open() const {
  std::vector<std::pair<CommitKey, size_t>> result;
  for (const auto& inc : incarnations_) {
    for (const auto& [step, ballots] : inc.steps) {
      if (!ballots.outcome) {
        result.emplace_back(CommitKey{step, inc.id}, ballots.votes.size());
      }
    }
  }
  return result;
}

}  // namespace reft

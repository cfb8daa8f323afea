#include "tests/unit/agent/hang/simulated_agent.h"

#include <algorithm>

namespace reft::agent {

namespace {
constexpr int64_t kMs = 1'000'000;
// As in agent.cc.
constexpr int64_t kStackWaitNs = 2 * kSec;
constexpr int64_t kDeathNs = 2 * kSec;
constexpr int64_t kAfterCrashNs = kSec / 5;
}  // namespace

void SimulatedAgent::join(SimulatedRanks* ranks) {
  ranks_ = ranks;
  early_.reset();
  collection_.reset();  // the ranks were started again while evidence was collected
  gone_ns_.clear();
  crash_again_ns_ = 0;
}

int64_t SimulatedAgent::nextNs() const {
  int64_t next = next_tick_;
  for (const auto* collection : {&collection_, &early_}) {
    if (*collection) {
      next = std::min(next, (*collection)->over_ns);
      for (const auto& [rank, at] : (*collection)->reply_ns) {
        next = std::min(next, at);
      }
    }
  }
  return crash_again_ns_ != 0 ? std::min(next, crash_again_ns_) : next;
}

void SimulatedAgent::stoodStill(int64_t ns) {
  next_tick_ += ns;
  crash_again_ns_ += crash_again_ns_ == 0 ? 0 : ns;
  for (auto* collection : {&collection_, &early_}) {
    if (*collection) {
      (*collection)->over_ns += ns;
      for (auto& [rank, at] : (*collection)->reply_ns) {
        at += ns;
      }
    }
  }
}

void SimulatedAgent::wake() {
  if (crash_again_ns_ != 0 && clock_.now_ns >= crash_again_ns_) {
    crash_again_ns_ = 0;
    collect(Why::kCrash);
  }
  replies(early_);
  replies(collection_);
  if (clock_.now_ns >= next_tick_) {
    next_tick_ += kTickNs;
    tick();
  }
}

void SimulatedAgent::tick() {
  const int64_t now = clock_.now_ns;
  std::map<int, Progress> live;
  for (int r = 0; r < ranks_->layout().world(); ++r) {
    if (ranks_->live(r)) {
      live[r] = ranks_->progress(r);
    } else if (gone_ns_.emplace(r, now).second && !ranks_->saidBye(r) && death_due_ns_ == 0) {
      death_due_ns_ = now + kDeathNs;
      crash_again_ns_ = now + kAfterCrashNs;
      collect(Why::kCrash);
    }
  }
  watch_.look(now);
  if (!collection_ && watch_.suspect(live, now)) {
    collect(Why::kSuspect);
  }
  if (watch_.halfway(now)) {
    note();
  }
  if (watch_.early(now)) {
    collect(Why::kEarly);
  }
  if (death_due_ns_ != 0 && now >= death_due_ns_) {
    death_due_ns_ = 0;
    if (!live.empty()) {
      collect(Why::kSuspect);
    }
  }
}

void SimulatedAgent::note() {
  noted_.clear();
  for (int r = 0; r < ranks_->layout().world(); ++r) {
    if (ranks_->live(r)) {
      noted_[r] = {clock_.now_ns, ranks_->used(r)};
    }
  }
}

void SimulatedAgent::collect(Why why) {
  looks_ += why == Why::kSuspect ? 1 : 0;
  Collection collection;
  collection.crash = why == Why::kCrash;
  collection.early = why == Why::kEarly;
  collection.over_ns =
      clock_.now_ns +
      (collection.early ? std::min(kStackWaitNs, watch_.earlyWaitNs()) : kStackWaitNs + 100 * kMs);
  for (int r = 0; r < ranks_->layout().world(); ++r) {
    collection.used[r] = {clock_.now_ns, ranks_->used(r)};
    if (collection.crash) {
      continue;
    }
    const Doing& doing = ranks_->doing(r);
    if (ranks_->live(r) && (doing.state == "T" || doing.state == "t")) {
      collection.texts[r] = ranks_->stacks(r);  // read from outside at once
    } else if (ranks_->live(r)) {
      const auto delay = static_cast<int64_t>(1 + random_() % 60) * kMs;
      collection.reply_ns[r] = doing.answers ? clock_.now_ns + delay : collection.over_ns;
    }
  }
  if (collection.crash || collection.reply_ns.empty()) {
    conclude(collection);
  } else {
    (collection.early ? early_ : collection_) = std::move(collection);
  }
}

void SimulatedAgent::replies(std::optional<Collection>& collection) {
  if (!collection) {
    return;
  }
  for (auto it = collection->reply_ns.begin(); it != collection->reply_ns.end();) {
    const int rank = it->first;
    if (ranks_->live(rank) && it->second > clock_.now_ns) {
      ++it;
      continue;
    }
    const bool answers = ranks_->live(rank) && ranks_->doing(rank).answers;
    if (answers || (ranks_->live(rank) && !collection->early)) {
      collection->texts[rank] = ranks_->stacks(rank);
    }
    if (answers) {
      collection->answered.insert(rank);
    }
    it = collection->reply_ns.erase(it);
  }
  if (collection->reply_ns.empty()) {
    const Collection whole = std::move(*collection);
    collection.reset();
    conclude(whole);
  }
}

// As nodeEvidence(), judge() and Agent::concluded().
void SimulatedAgent::conclude(const Collection& collection) {
  watch_.look(clock_.now_ns);
  const int64_t now = clock_.now_ns;
  HangEvidence evidence;
  evidence.job = "soak";
  evidence.world = ranks_->layout().world();
  evidence.now_ns = now;
  evidence.suspect_sec = collection.crash ? 0 : static_cast<double>(suspect_ns_) * 1e-9;
  evidence.away_sec = static_cast<double>(watch_.awayNs()) * 1e-9;
  for (int r = 0; r < ranks_->layout().world(); ++r) {
    if (ranks_->saidBye(r)) {
      continue;
    }
    RankEvidence rank = ranks_->evidence(r);
    if (const auto gone = gone_ns_.find(r); gone != gone_ns_.end()) {
      rank.gone_ns = gone->second;
    }
    const auto before = noted_.find(r);
    const auto used = collection.used.find(r);
    if (rank.alive && before != noted_.end() && used != collection.used.end()) {
      addUse(rank, before->second, used->second);
    }
    rank.answered = collection.answered.count(r) != 0;
    if (const auto text = collection.texts.find(r); text != collection.texts.end()) {
      rank.stacks = text->second;
    }
    evidence.ranks.push_back(std::move(rank));
  }
  if (collection.early) {
    watch_.lookedEarly(decide(evidence));
    return;
  }
  if (!collection.crash) {
    note();
  }
  const Report report = judge(evidence);
  const bool repeats =
      watch_.reportedStillNs(now) > 0 && report.confidence == Confidence::kUndecidable;
  last_look_ = std::move(evidence);
  if ((collection.crash && !report.disagreement) || !watch_.credible(report) || repeats) {
    return;
  }
  watch_.reported();
  hangs_.push_back({now, last_look_, decide(last_look_)});
}

}  // namespace reft::agent

#include "agent/mesh/copy_gate.h"

#include <algorithm>
#include <iterator>

namespace reft::agent {

std::set<int> CopyGate::expect(std::set<int> ranks, uint64_t incarnation) {
  if (incarnation != incarnation_) {
    waiting_.clear();
    ranks_.clear();
    behind_ = false;
    state_ = State::kFresh;
    uncopied_ = -1;
  }
  std::set<int> added;
  std::set_difference(ranks.begin(), ranks.end(), ranks_.begin(), ranks_.end(),
                      std::inserter(added, added.end()));
  ranks_ = std::move(ranks);
  incarnation_ = incarnation;
  if (ranks_.empty()) {
    behind_ = false;
    state_ = State::kFresh;
  }
  for (auto& [key, waiting] : waiting_) {
    waiting.is_ready = waiting.is_ready || !ranks_.contains(waiting.vote.rank);
  }
  return added;
}

bool CopyGate::take(const Vote& vote, int64_t now_ns) {
  if (vote.key.incarnation != incarnation_ || !ranks_.contains(vote.rank)) {
    return false;
  }
  if (behind_) {
    uncopied_ = vote.held.sealed ? std::max(uncopied_, vote.key.step) : uncopied_;
    return false;
  }
  if (!vote.held.sealed && waiting_.empty()) {
    return false;
  }
  waiting_.try_emplace({vote.key, vote.rank}, Waiting{vote, now_ns, !vote.held.sealed});
  if (state_ == State::kFresh && waiting_.begin()->first.first.step < vote.key.step) {
    state_ = State::kLate;
  }
  return true;
}

void CopyGate::copied(int rank, const CommitKey& key) {
  if (key.incarnation == incarnation_) {
    behind_ = false;
  }
  if (const auto found = waiting_.find({key, rank}); found != waiting_.end()) {
    found->second.is_ready = true;
  }
}

std::vector<CopyGate::Vote> CopyGate::ready() {
  std::vector<Vote> votes;
  while (!waiting_.empty() && waiting_.begin()->second.is_ready) {
    votes.push_back(waiting_.begin()->second.vote);
    waiting_.erase(waiting_.begin());
  }
  return votes;
}

std::vector<CopyGate::Vote> CopyGate::failed() {
  behind_ = !ranks_.empty();
  state_ = behind_ ? State::kMissing : State::kFresh;
  std::vector<Vote> votes;
  for (const auto& [key, waiting] : waiting_) {
    if (!waiting.is_ready) {
      uncopied_ = std::max(uncopied_, waiting.vote.key.step);
    }
    votes.push_back(waiting.vote);
  }
  waiting_.clear();
  return votes;
}

std::vector<CopyGate::Vote> CopyGate::tick(int64_t now_ns) {
  for (const auto& [key, waiting] : waiting_) {
    if (now_ns - std::max(waiting.since_ns, moved_ns_) >= patience_ns_ ||
        now_ns - waiting.since_ns >= longest_ns_) {
      return failed();
    }
  }
  return {};
}

void CopyGate::decided(const CommitKey& key, bool committed) {
  std::erase_if(waiting_, [&](const auto& entry) { return entry.first.first == key; });
  if (committed && key.incarnation == incarnation_ && !ranks_.empty() && key.step > uncopied_) {
    state_ = State::kThere;
  }
}

}  // namespace reft::agent

#include "agent/mesh/copy_gate.h"

namespace reft::agent {

void CopyGate::expect(std::set<int> ranks, uint64_t incarnation) {
  if (incarnation != incarnation_) {
    waiting_.clear();
    behind_ = false;
  }
  ranks_ = std::move(ranks);
  incarnation_ = incarnation;
  behind_ = behind_ && !ranks_.empty();
  for (auto& [key, waiting] : waiting_) {
    waiting.is_ready = waiting.is_ready || !ranks_.contains(waiting.vote.rank);
  }
}

bool CopyGate::take(const Vote& vote, int64_t now_ns) {
  if (behind_ || vote.key.incarnation != incarnation_ || !ranks_.contains(vote.rank) ||
      (!vote.held.sealed && waiting_.empty())) {
    return false;
  }
  waiting_.try_emplace({vote.key, vote.rank}, Waiting{vote, now_ns, !vote.held.sealed});
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
  behind_ = true;
  std::vector<Vote> votes;
  for (const auto& [key, waiting] : waiting_) {
    votes.push_back(waiting.vote);
  }
  waiting_.clear();
  return votes;
}

std::vector<CopyGate::Vote> CopyGate::tick(int64_t now_ns) {
  for (const auto& [key, waiting] : waiting_) {
    if (now_ns - waiting.since_ns >= patience_ns_) {
      return failed();
    }
  }
  return {};
}

void CopyGate::decided(const CommitKey& key) {
  std::erase_if(waiting_, [&](const auto& entry) { return entry.first.first == key; });
}

}  // namespace reft::agent

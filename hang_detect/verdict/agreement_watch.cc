#include "hang_detect/verdict/agreement_watch.h"

#include <algorithm>
#include <utility>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/words.h"

namespace reft {

size_t AgreementWatch::indexOf(int rank) {
  const auto at = std::find_if(ranks_.begin(), ranks_.end(),
                               [rank](const Rank& entry) { return entry.rank == rank; });
  if (at == ranks_.end() && ranks_.size() < kMaxRanks) {
    ranks_.emplace_back().rank = rank;
    return ranks_.size() - 1;
  }
  return static_cast<size_t>(at - ranks_.begin());
}

void AgreementWatch::learnGroups(size_t index, const OpLogReader& log) {
  Rank& rank = ranks_[index];
  const auto known = log.groups();
  for (size_t i = rank.groups.size(); i < known.size(); ++i) {
    auto name = rank.keys.next(words::groupName(known[i]));
    auto found = groups_.find(name);
    if (found == groups_.end() && groups_.size() < kMaxGroups) {
      found = groups_.emplace(std::move(name), std::make_unique<Group>()).first;
      found->second->known = known[i];
    }
    Group* group = found == groups_.end() ? nullptr : found->second.get();
    if (group != nullptr) {
      group->members |= uint64_t{1} << index;
      group->ambiguous = group->ambiguous || known[i].size != group->known.size ||
                         !group->group_ranks.insert(known[i].rank).second;
    }
    rank.groups.push_back(group);
    rank.group_ranks.push_back(known[i].rank);
  }
}

void AgreementWatch::read(int number, const OpLogReader& log, int64_t now_ns) {
  const size_t index = indexOf(number);
  if (index >= ranks_.size()) {
    return;
  }
  Rank& rank = ranks_[index];
  const uint64_t begun = log.opsBegun();
  learnCallSites(index, log);
  if (begun > rank.next || rank.groups.empty()) {
    learnGroups(index, log);
  }
  if (begun <= rank.next) {
    return;
  }
  for (const OpEntry& op :
       log.tail(static_cast<size_t>(std::min<uint64_t>(begun - rank.next, kMaxRead)))) {
    if (op.ticket > rank.next) {  // the log may have grown since opsBegun()
      compare(index, op, now_ns);
      rank.next = op.ticket;
    }
  }
  // Skips an op that is being written just now rather than wait for it.
  rank.next = std::max(rank.next, begun);
}

// Reads call sites of the ranks of a disagreement, once each.
void AgreementWatch::learnCallSites(size_t index, const OpLogReader& log) {
  for (Pending& pending : pending_) {
    const uint64_t self = uint64_t{1} << index;
    if (pending.ops.contains(index) && (pending.located & self) == 0) {
      pending.located |= self;
      ranks_[index].call_sites = log.callSites();
    }
  }
}

void AgreementWatch::compare(size_t index, const OpEntry& op, int64_t now_ns) {
  Group* group = op.group < ranks_[index].groups.size() ? ranks_[index].groups[op.group] : nullptr;
  if (group == nullptr || group->ambiguous || hasUnknownGroup(op) || !isCollective(op.kind) ||
      op.seq == 0) {
    return;
  }
  if (group->window.empty()) {
    group->window.resize(kWindow);
  }
  Seen& seen = group->window[op.seq % kWindow];
  const uint64_t self = uint64_t{1} << index;
  if (op.seq < seen.op.seq) {
    return;  // too far behind
  }
  if (op.seq > seen.op.seq) {
    seen = Seen{op, self, false};
    return;
  }
  if (contractOf(op) == contractOf(seen.op)) {
    seen.alike |= self;
  } else if (!seen.disagreed) {
    seen.disagreed = true;
    ++count_;
    if (!group->reported) {
      group->reported = true;
      Pending& pending = pending_.emplace_back(Pending{group, now_ns + kWaitNs, seen.alike, 0, {}});
      for (size_t i = 0; i < ranks_.size(); ++i) {
        if ((seen.alike >> i & 1) != 0) {
          pending.ops[i] = seen.op;
        }
      }
    }
  }
  for (Pending& pending : pending_) {
    if (pending.group == group && pending.ops.begin()->second.seq == op.seq) {
      pending.arrived |= self;
      pending.ops[index] = op;
    }
  }
}

std::optional<Disagreement> AgreementWatch::next(int64_t now_ns) {
  const auto due = std::find_if(pending_.begin(), pending_.end(), [now_ns](const Pending& pending) {
    return now_ns >= pending.due_ns ||
           (pending.arrived == pending.group->members && pending.located == pending.arrived);
  });
  if (due == pending_.end()) {
    return std::nullopt;
  }
  const Disagreement result = describe(*due);
  pending_.erase(due);
  return result;
}

// In the same words as a verdict, by evidence that holds this one op only.
Disagreement AgreementWatch::describe(const Pending& pending) const {
  HangEvidence evidence;
  for (const auto& [index, op] : pending.ops) {
    RankEvidence& entry = evidence.ranks.emplace_back();
    entry.rank = ranks_[index].rank;
    entry.alive = true;
    entry.ops_begun = 1;
    OpGroup group = pending.group->known;
    const auto at =
        std::find(ranks_[index].groups.begin(), ranks_[index].groups.end(), pending.group);
    group.rank = ranks_[index].group_ranks[static_cast<size_t>(at - ranks_[index].groups.begin())];
    entry.groups = {group};
    entry.tail = {op};
    entry.tail[0].group = 0;
    entry.call_sites = ranks_[index].call_sites;
  }
  std::vector<Disagreement> found = findDisagreements(JobView(evidence));
  return found.empty() ? Disagreement{} : std::move(found.front());
}

void AgreementWatch::reset() {
  ranks_.clear();
  groups_.clear();
  pending_.clear();
}

}  // namespace reft

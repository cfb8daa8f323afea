#include "hang_detect/verdict/agreement_watch.h"

#include <algorithm>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/words.h"

namespace reft {

size_t AgreementWatch::placeOf(int rank) {
  const auto at = std::find_if(ranks_.begin(), ranks_.end(),
                               [rank](const Rank& entry) { return entry.rank == rank; });
  if (at == ranks_.end() && ranks_.size() < kMaxRanks) {
    ranks_.emplace_back().rank = rank;
    return ranks_.size() - 1;
  }
  return static_cast<size_t>(at - ranks_.begin());
}

void AgreementWatch::learnGroups(size_t place, const OpLogReader& log) {
  Rank& rank = ranks_[place];
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
      group->members |= uint64_t{1} << place;
      group->doubtful = group->doubtful || known[i].size != group->known.size ||
                        !group->group_ranks.insert(known[i].rank).second;
    }
    rank.groups.push_back(group);
    rank.group_ranks.push_back(known[i].rank);
  }
}

void AgreementWatch::read(int number, const OpLogReader& log, int64_t now_ns) {
  const size_t place = placeOf(number);
  if (place >= ranks_.size()) {
    return;
  }
  Rank& rank = ranks_[place];
  const uint64_t begun = log.opsBegun();
  locate(place, log);
  if (begun > rank.next || rank.groups.empty()) {
    learnGroups(place, log);
  }
  if (begun <= rank.next) {
    return;
  }
  for (const OpEntry& op :
       log.tail(static_cast<size_t>(std::min<uint64_t>(begun - rank.next, kMaxRead)))) {
    if (op.ticket > rank.next) {  // the log may have grown meanwhile
      compare(place, op, now_ns);
      rank.next = op.ticket;
    }
  }
  // Whatever is being written just now is left out rather than waited for.
  rank.next = std::max(rank.next, begun);
}

// Reads where the ranks of a disagreement called their ops, of each once.
void AgreementWatch::locate(size_t place, const OpLogReader& log) {
  for (Open& open : open_) {
    const uint64_t self = uint64_t{1} << place;
    if (open.ops.contains(place) && (open.located & self) == 0) {
      open.located |= self;
      ranks_[place].call_sites = log.callSites();
    }
  }
}

void AgreementWatch::compare(size_t place, const OpEntry& op, int64_t now_ns) {
  Group* group = op.group < ranks_[place].groups.size() ? ranks_[place].groups[op.group] : nullptr;
  if (group == nullptr || group->doubtful || hasUnknownGroup(op) || !isCollective(op.kind) ||
      op.seq == 0) {
    return;
  }
  if (group->window.empty()) {
    group->window.resize(kWindow);
  }
  Seen& seen = group->window[op.seq % kWindow];
  const uint64_t self = uint64_t{1} << place;
  if (op.seq < seen.op.seq) {
    return;  // too far behind
  }
  if (op.seq > seen.op.seq) {
    seen = Seen{op, place, self, false};
    return;
  }
  if (contractOf(op) == contractOf(seen.op)) {
    seen.alike |= self;
  } else if (!seen.odd) {
    seen.odd = true;
    ++count_;
    if (!group->told) {
      group->told = true;
      Open& open = open_.emplace_back(Open{group, now_ns + kWaitNs, seen.alike, 0, {}});
      for (size_t i = 0; i < ranks_.size(); ++i) {
        if ((seen.alike >> i & 1) != 0) {
          open.ops[i] = seen.op;
        }
      }
    }
  }
  for (Open& open : open_) {
    if (open.group == group && open.ops.begin()->second.seq == op.seq) {
      open.come |= self;
      open.ops[place] = op;
    }
  }
}

std::optional<Disagreement> AgreementWatch::next(int64_t now_ns) {
  const auto due = std::find_if(open_.begin(), open_.end(), [now_ns](const Open& open) {
    return now_ns >= open.due_ns || (open.come == open.group->members && open.located == open.come);
  });
  if (due == open_.end()) {
    return std::nullopt;
  }
  const Disagreement result = describe(*due);
  open_.erase(due);
  return result;
}

// The verdict engine's own words, on evidence that holds this one op only.
Disagreement AgreementWatch::describe(const Open& open) const {
  HangEvidence evidence;
  for (const auto& [place, op] : open.ops) {
    RankEvidence& entry = evidence.ranks.emplace_back();
    entry.rank = ranks_[place].rank;
    entry.alive = true;
    entry.ops_begun = 1;
    OpGroup group = open.group->known;
    const auto at = std::find(ranks_[place].groups.begin(), ranks_[place].groups.end(), open.group);
    group.rank = ranks_[place].group_ranks[static_cast<size_t>(at - ranks_[place].groups.begin())];
    entry.groups = {group};
    entry.tail = {op};
    entry.tail[0].group = 0;
    entry.call_sites = ranks_[place].call_sites;
  }
  const Verdict verdict = decide(evidence);
  return verdict.disagreements.empty() ? Disagreement{} : verdict.disagreements.front();
}

void AgreementWatch::reset() {
  ranks_.clear();
  groups_.clear();
  open_.clear();
}

}  // namespace reft

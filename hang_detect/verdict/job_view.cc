#include "hang_detect/verdict/job_view.h"

#include <algorithm>
#include <utility>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/verdict/suspect.h"

namespace reft {

namespace {

std::vector<GroupLog> groupLogs(const std::vector<RankEvidence>& ranks) {
  std::vector<GroupLog> groups;
  std::unordered_map<std::string, size_t> by_key;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankEvidence& rank = ranks[r];
    std::vector<std::pair<size_t, size_t>> places;  // (group, member) of each group of the rank
    GroupKeys keys;
    for (const OpGroup& group : rank.groups) {
      const std::string name = words::groupName(group);
      const auto [at, added] = by_key.emplace(keys.next(name), groups.size());
      if (added) {
        groups.emplace_back().name = name;
      }
      GroupLog& log = groups[at->second];
      log.size = std::max<int64_t>(log.size, group.size);
      if (log.members.empty() || log.members.back().rank != r) {
        log.by_group_rank[group.rank] = log.members.size();
        Member& member = log.members.emplace_back();
        member.rank = r;
        member.group_rank = group.rank;
      }
      places.emplace_back(at->second, log.members.size() - 1);
    }
    for (const OpEntry& op : rank.tail) {
      if (op.group >= places.size() || hasUnknownGroup(op)) {
        continue;
      }
      Member& member = groups[places[op.group].first].members[places[op.group].second];
      if (isCollective(op.kind)) {
        member.newest = std::max(member.newest, op.seq);
        member.ops.push_back(&op);
      } else if (isPointToPoint(op.kind)) {
        member.p2p.push_back(&op);
      }
    }
    const bool whole_log = rank.ops_begun <= rank.tail.size();
    for (const auto& [group, place] : places) {
      Member& member = groups[group].members[place];
      member.reaches = whole_log || member.newest > 0;
      std::stable_sort(member.ops.begin(), member.ops.end(),
                       [](const OpEntry* a, const OpEntry* b) { return a->seq < b->seq; });
    }
  }
  return groups;
}

CallerPlace callerPlace(const RankEvidence& rank) {
  const Standing standing = standingOf(rank);
  if (standing.stack != nullptr) {
    const StackFrame& top = standing.stack->frames.front();
    // What backward() itself computes shows here, too, but not for long.
    if ((top.file.ends_with("torch/autograd/graph.py") && top.function == "_engine_run_backward") ||
        (top.file.ends_with("torch/futures/__init__.py") &&
         (top.function == "wait" || top.function == "value"))) {
      return CallerPlace::kFutures;
    }
  }
  const SuspectRule& rule = ruleFor(Suspect(rank));
  const bool waits_elsewhere =
      rule.reason != std::string_view("user_code") && rule.reason != std::string_view("busy");
  const bool sleeps = standing.wait_channel.find("nanosleep") != std::string_view::npos;
  return waits_elsewhere || sleeps ? CallerPlace::kElsewhere : CallerPlace::kUnknown;
}

}  // namespace

const OpEntry* Member::find(uint32_t seq) const {
  const auto at = from(seq);
  return at != ops.end() && (*at)->seq == seq ? *at : nullptr;
}

std::vector<const OpEntry*>::const_iterator Member::from(uint32_t seq) const {
  return std::lower_bound(ops.begin(), ops.end(), seq,
                          [](const OpEntry* op, uint32_t n) { return op->seq < n; });
}

JobView::JobView(const HangEvidence& evidence)
    : evidence_(evidence), groups_(groupLogs(evidence.ranks)), places_(evidence.ranks.size()) {}

bool JobView::isHeld(size_t rank, const OpEntry& op) const {
  return reft::isHeld(op) || isHeldOnDevice(op) ||
         (isUnwaited(op) && placeOf(rank) == CallerPlace::kFutures);
}

const OpEntry* JobView::newestHeld(size_t rank) const {
  const std::vector<OpEntry>& tail = ranks()[rank].tail;
  const auto op = std::find_if(tail.rbegin(), tail.rend(), [&](const OpEntry& entry) {
    return entry.kind != OpKind::kStep && isHeld(rank, entry);
  });
  return op == tail.rend() ? nullptr : &*op;
}

CallerPlace JobView::placeOf(size_t rank) const {
  std::optional<CallerPlace>& place = places_[rank];
  if (!place) {
    place = callerPlace(ranks()[rank]);
  }
  return *place;
}

std::vector<int> JobView::numbersOf(const std::vector<size_t>& indices) const {
  std::vector<int> numbers;
  numbers.reserve(indices.size());
  for (const size_t index : indices) {
    numbers.push_back(ranks()[index].rank);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::set<size_t> JobView::indicesOf(const std::vector<int>& numbers) const {
  const std::set<int> wanted(numbers.begin(), numbers.end());
  std::set<size_t> indices;
  for (size_t r = 0; r < ranks().size(); ++r) {
    if (wanted.contains(ranks()[r].rank)) {
      indices.insert(r);
    }
  }
  return indices;
}

double JobView::stillSec() const {
  const auto now = static_cast<uint64_t>(evidence_.now_ns);
  uint64_t newest = 0;
  for (const RankEvidence& rank : ranks()) {
    if (!rank.alive) {
      continue;
    }
    for (const OpEntry& op : rank.tail) {
      newest = std::max(
          {newest, op.begin_ns, op.enqueued_ns, op.wait_begin_ns, op.wait_end_ns, op.done_ns});
    }
    if (rank.heartbeat_age_ns > 0 && rank.heartbeat_age_ns < now) {
      newest = std::max(newest, now - rank.heartbeat_age_ns);
    }
  }
  const double still_sec =
      newest != 0 && newest < now ? static_cast<double>(now - newest) * 1e-9 : 0;
  return evidence_.away_sec > 0 ? std::max(0.0, still_sec - evidence_.away_sec) : still_sec;
}

}  // namespace reft

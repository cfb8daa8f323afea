#include "hang_detect/verdict/op_history.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/words.h"

namespace reft {

namespace {

constexpr double kMomentSec = 0.5;
constexpr double kStragglerSec = 1;  // a wait that a straggler may cause, if not the longest so far
constexpr size_t kMinCollectives = 8;
constexpr size_t kMinTimesLast = 4;
constexpr double kMinShareOfWaits = 0.7;
constexpr double kMinShareOfTime = 0.2;
constexpr ptrdiff_t kFamiliarTimes = 3;
constexpr double kFamiliarFactor = 4;
constexpr size_t kMaxPrograms = 16;  // stages of a pipeline differ by nature

double durationSec(const OpEntry& op) {
  return static_cast<double>(op.done_ns - op.begin_ns) * 1e-9;
}

// How long it took at most; 0 if that is unknown.
double longestSec(const OpEntry& op) {
  return op.done_ns > op.begin_ns ? durationSec(op) : op.passed_within_sec;
}

// A place of the program, as far as all ranks mean the same by it.
using Site = std::tuple<OpKind, uint32_t, uint64_t, int32_t>;

Site siteOf(const RankEvidence& rank, const OpEntry& op) {
  return {op.kind, op.call_site, op.bytes,
          op.group < rank.groups.size() ? rank.groups[op.group].size : 0};
}

// Ops in terms that mean the same on all ranks: the kind, and the size of the group.
using Program = std::vector<std::pair<OpKind, int64_t>>;

// What the rank did after collective `seq` of the group.
Program programSince(const RankEvidence& rank, const std::string& group, uint32_t seq) {
  Program program;
  bool after = false;
  for (const OpEntry& op : rank.tail) {
    if (op.group >= rank.groups.size() || op.kind == OpKind::kStep) {
      continue;
    }
    if (after) {
      program.emplace_back(op.kind, isPointToPoint(op.kind) ? 0 : rank.groups[op.group].size);
    }
    after = after || (isCollective(op.kind) && op.seq == seq &&
                      words::groupName(rank.groups[op.group]) == group);
  }
  return program;
}

bool isPrefix(const Program& a, const Program& b) {
  return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// The program that most ranks have executed, wholly or up to some point; nullptr unless two thirds
// of them have. If only one rank has executed it to its end, its order is one rank's word.
const Program* commonProgram(const std::map<Program, size_t>& times, size_t ranks) {
  const Program* best = nullptr;
  size_t best_count = 0;
  for (const auto& [program, own] : times) {
    size_t supporters = 0;
    for (const auto& [other, count] : times) {
      supporters += isPrefix(other, program) ? count : 0;
    }
    if (!program.empty() && supporters > best_count) {
      best_count = supporters;
      best = &program;
    }
  }
  return best != nullptr && best_count * 3 >= ranks * 2 && times.at(*best) >= 2 ? best : nullptr;
}

struct Lateness {
  size_t times = 0;
  double waited_sec = 0;  // by the others
};

struct Collectives {
  std::map<size_t, Lateness> late;  // by rank
  size_t seen = 0;
  double waited_sec = 0;
  double span_sec = 0;  // from the first to the last of them
};

void addGroup(Collectives& all, const GroupLog& group) {
  const auto& ops = group.members.front().ops;
  for (const OpEntry* op : ops) {
    std::vector<std::pair<double, size_t>> took;
    for (const Member& member : group.members) {
      const OpEntry* theirs = member.find(op->seq);
      if (theirs == nullptr || theirs->done_ns <= theirs->begin_ns || theirs->failed) {
        break;
      }
      took.emplace_back(durationSec(*theirs), member.rank);
    }
    if (took.size() != group.members.size()) {
      continue;
    }
    ++all.seen;
    std::sort(took.begin(), took.end());
    const auto& [shortest, last_rank] = took.front();
    const double waited = took[took.size() / 2].first - shortest;
    all.waited_sec += waited;
    if (waited > shortest) {
      Lateness& entry = all.late[last_rank];
      ++entry.times;
      entry.waited_sec += waited;
    }
  }
  if (!ops.empty() && ops.back()->begin_ns > ops.front()->begin_ns) {
    all.span_sec = std::max(
        all.span_sec, static_cast<double>(ops.back()->begin_ns - ops.front()->begin_ns) * 1e-9);
  }
}

}  // namespace

std::optional<Straggler> findStraggler(const JobView& view, double still_sec) {
  Collectives all;
  for (const GroupLog& group : view.groups()) {
    if (group.members.size() >= 2 && group.invisibleMembers() <= 0) {
      addGroup(all, group);
    }
  }
  if (all.span_sec <= 0 || all.seen < kMinCollectives) {
    return std::nullopt;
  }
  for (const auto& [rank, entry] : all.late) {
    const double usual_sec = entry.waited_sec / static_cast<double>(entry.times);
    const bool may_hang = still_sec > std::max(kStragglerSec, 4 * usual_sec);
    if (entry.times >= kMinTimesLast && entry.waited_sec >= kMinShareOfWaits * all.waited_sec &&
        entry.waited_sec >= kMinShareOfTime * all.span_sec && !may_hang) {
      return Straggler{rank, entry.times, all.seen, usual_sec,
                       std::min(1.0, entry.waited_sec / all.span_sec)};
    }
  }
  return std::nullopt;
}

bool allWaitsAreRecent(const JobView& view) {
  bool waits = false;
  for (size_t r = 0; r < view.ranks().size(); ++r) {
    for (const OpEntry& op : view.ranks()[r].tail) {
      if (op.kind == OpKind::kStep || !view.isHeld(r, op)) {
        continue;
      }
      waits = true;
      if (static_cast<double>(view.evidence().now_ns) - static_cast<double>(op.begin_ns) >
          kMomentSec * 1e9) {
        return false;
      }
    }
  }
  return waits;
}

bool waitsAtAFamiliarPlace(const JobView& view, const std::set<size_t>& waiting, double still_sec) {
  std::map<Site, double> longest_sec;
  for (const RankEvidence& rank : view.ranks()) {
    for (const OpEntry& op : rank.tail) {
      if (op.kind != OpKind::kStep && !op.failed && longestSec(op) > 0) {
        double& longest = longest_sec[siteOf(rank, op)];
        longest = std::max(longest, longestSec(op));
      }
    }
  }
  for (const size_t r : waiting) {
    const RankEvidence& rank = view.ranks()[r];
    for (const OpEntry& open : rank.tail) {
      if (open.kind == OpKind::kStep || !view.isHeld(r, open)) {
        continue;
      }
      const Site site = siteOf(rank, open);
      const auto times = std::count_if(rank.tail.begin(), rank.tail.end(), [&](const OpEntry& op) {
        // How long a stream waited is known only of ops that were seen to end.
        return siteOf(rank, op) == site && !view.isHeld(r, op) && !op.failed &&
               (longestSec(op) > 0 || !isHeldOnDevice(open));
      });
      const auto longest = longest_sec.find(site);
      const double longest_here = longest == longest_sec.end() ? 0 : longest->second;
      if (times >= kFamiliarTimes && longest_here * kFamiliarFactor < still_sec) {
        return true;
      }
    }
  }
  return false;
}

std::set<size_t> ranksOutOfOrder(const JobView& view, const std::set<size_t>& suspects) {
  const GroupLog* largest = nullptr;
  for (const GroupLog& group : view.groups()) {
    if (largest == nullptr || group.members.size() > largest->members.size()) {
      largest = &group;
    }
  }
  if (largest == nullptr || largest->members.size() < 3 ||
      (!view.evidence().silent_nodes.empty() && largest->invisibleMembers() > 0)) {
    return {};
  }
  uint32_t common_seq = UINT32_MAX;  // the newest op that all members have begun
  for (const Member& member : largest->members) {
    common_seq = std::min(common_seq, member.newest);
  }
  std::map<Program, size_t> times;
  std::map<size_t, Program> programs;
  for (const Member& member : largest->members) {
    Program& program = programs[member.rank];
    program = programSince(view.ranks()[member.rank], largest->name, common_seq);
    ++times[program];
  }
  if (common_seq == 0 || times.size() > kMaxPrograms) {
    return {};
  }
  const Program* common = commonProgram(times, largest->members.size());
  if (common == nullptr) {
    return {};
  }
  std::set<size_t> result;
  for (const auto& [rank, program] : programs) {
    if (isPrefix(program, *common)) {
      continue;
    }
    if (!suspects.contains(rank)) {
      return {};  // ranks that hold up nobody differ, too: the comparison means nothing
    }
    result.insert(rank);
  }
  return result.size() * 2 < suspects.size() + 1 ? result : std::set<size_t>{};
}

}  // namespace reft

#include "hang_detect/verdict/habit.h"

#include <algorithm>

#include "hang_detect/evidence/ops.h"

namespace reft {

namespace {

constexpr size_t kTimes = 4;  // fewer repetitions are no habit
constexpr size_t kMaxContext = 512;
constexpr size_t kUnsynced = 16;  // newest ops of a log that shows neither a meeting nor a step
constexpr size_t kMaxSuspects = 64;
constexpr size_t kMaxOthers = 64;

// `common[place]` is how many ops before `place` are those before `at - 1`; afterwards, before
// `at`.
void goOn(const std::vector<PastOp>& done, size_t at, std::vector<size_t>& common) {
  for (size_t place = at - 1; place > 0; --place) {
    common[place] =
        done[at - 1] == done[place - 1] ? std::min(common[place - 1] + 1, kMaxContext) : 0;
  }
}

// What has followed, each time, the longest run of ops before `at` that the log has kTimes times;
// nullopt if there is none, or if different ops have.
std::optional<size_t> usualAt(const std::vector<PastOp>& done, size_t at,
                              const std::vector<size_t>& common, size_t& times) {
  std::vector<std::pair<size_t, size_t>> before;  // length of the common past, place
  for (size_t place = 1; place < at; ++place) {
    if (common[place] > 0) {
      before.emplace_back(common[place], place);
    }
  }
  if (before.size() < kTimes) {
    return std::nullopt;
  }
  std::sort(before.rbegin(), before.rend());
  const size_t context = before[kTimes - 1].first;
  times = 0;
  for (const auto& [length, place] : before) {
    if (length < context) {
      break;
    }
    if (!(done[place] == done[before.front().second])) {
      return std::nullopt;
    }
    ++times;
  }
  return before.front().second;
}

// Ends for all members about the same time, unlike an op with a root.
bool isMeeting(const OpEntry& op) {
  return isCollective(op.kind) && !hasRoot(op.kind) && op.done_ns != 0 && !op.failed;
}

// The rank's newest op at which all of `suspects` have met; nullptr if its tail has none.
const OpEntry* newestMeeting(const JobView& view, size_t rank, const std::set<size_t>& suspects) {
  const OpEntry* newest = nullptr;
  for (const GroupLog& group : view.groups()) {
    size_t in = 0;
    const Member* own = nullptr;
    for (const Member& member : group.members) {
      in += suspects.contains(member.rank) ? 1 : 0;
      own = member.rank == rank ? &member : own;
    }
    if (own == nullptr || in < suspects.size()) {
      continue;
    }
    const auto met = std::find_if(own->ops.rbegin(), own->ops.rend(),
                                  [](const OpEntry* op) { return isMeeting(*op); });
    if (met != own->ops.rend() && (newest == nullptr || *met > newest)) {
      newest = *met;  // both point into the tail
    }
  }
  return newest;
}

Habit habitOfRank(const JobView& view, size_t rank, const std::set<size_t>& suspects,
                  Departure& left) {
  const RankEvidence& evidence = view.ranks()[rank];
  const OpEntry* meeting = newestMeeting(view, rank, suspects);
  std::vector<PastOp> done = evidence.past;
  std::optional<size_t> first;
  for (const OpEntry& op : evidence.tail) {
    if (op.kind == OpKind::kStep) {
      first = meeting == nullptr ? done.size() : first;
      continue;
    }
    done.push_back(pastOf(op));
    first = &op == meeting ? done.size() : first;
  }
  left.rank = rank;
  return habitOf(done, first.value_or(done.size() - std::min(done.size(), kUnsynced)), left);
}

}  // namespace

Habit habitOf(const std::vector<PastOp>& done, size_t first, Departure& left) {
  bool known = true;
  size_t kept = 0;  // in a row, up to now
  std::vector<size_t> common(done.size());
  for (size_t at = 1; at < done.size(); ++at) {
    goOn(done, at, common);
    if (at < first) {
      continue;
    }
    size_t times = 0;
    const auto usual = usualAt(done, at, common, times);
    const bool keeps = usual && done[*usual] == done[at];
    if (usual && !keeps && known) {
      const auto end = done.begin() + static_cast<ptrdiff_t>(at);
      if (static_cast<size_t>(std::count(done.begin(), end, done[at])) >= kTimes) {
        left.usual = done[*usual];
        left.times = times;
        left.instead = done[at];
        return Habit::kLeft;
      }
    }
    kept = keeps ? kept + 1 : 0;
    known = keeps && (known || kept >= kTimes);
  }
  return known && kept > 0 ? Habit::kKept : Habit::kUnknown;
}

std::optional<Departure> oddByHabit(const JobView& view, const std::set<size_t>& suspects) {
  if (suspects.size() < 2 || suspects.size() > kMaxSuspects) {
    return std::nullopt;
  }
  std::optional<Departure> odd;
  for (const size_t rank : suspects) {
    Departure left;
    const Habit habit = habitOfRank(view, rank, suspects, left);
    if (habit == Habit::kUnknown || (habit == Habit::kLeft && odd)) {
      return std::nullopt;
    }
    if (habit == Habit::kLeft) {
      odd = left;
    }
  }
  size_t asked = 0;
  for (size_t rank = 0; odd && rank < view.ranks().size() && asked < kMaxOthers; ++rank) {
    if (suspects.contains(rank)) {
      continue;
    }
    ++asked;
    Departure left;
    if (habitOfRank(view, rank, suspects, left) == Habit::kLeft) {
      return std::nullopt;
    }
  }
  return odd;
}

}  // namespace reft

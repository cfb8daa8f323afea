#include "agent/hang/look.h"

#include <algorithm>

namespace reft::agent {

namespace {

// Time to read the memory of the ranks that have not answered.
constexpr int64_t kOutsideNs = 1'000'000'000;

void addOutside(RankEvidence& rank, const std::optional<RemoteStacks>& read) {
  if (!read) {
    return;
  }
  rank.stacks = read->text;
  rank.error += read->version.empty() ? "; its memory cannot be read for them: "
                                      : "; they were read from its memory";
  if (!read->error.empty()) {
    rank.error += (read->version.empty() ? "" : ": ") + read->error;
  }
}

}  // namespace

bool NodeFacts::anyLive() const {
  return std::any_of(ranks.begin(), ranks.end(),
                     [](const auto& entry) { return entry.second.live(); });
}

void addUse(RankEvidence& rank, const Use& then, const Use& now) {
  if (then.at_ns >= now.at_ns) {
    return;
  }
  if (now.counters.cpu_ns >= 0 && then.counters.cpu_ns >= 0) {
    const auto elapsed = static_cast<double>(now.at_ns - then.at_ns);
    const int64_t own = now.counters.cpu_ns - then.counters.cpu_ns;
    const int64_t theirs = now.counters.descendants_cpu_ns - then.counters.descendants_cpu_ns;
    rank.cpu_share = static_cast<double>(own) / elapsed;
    // The time of a child that ended moves from theirs to its own, or is lost if nothing waited.
    rank.children_cpu_share = static_cast<double>(std::max<int64_t>(0, theirs)) / elapsed;
  }
  if (now.counters.io_bytes >= 0 && then.counters.io_bytes >= 0) {
    rank.io_bytes = now.counters.io_bytes - then.counters.io_bytes;
  }
}

Look::Look(Kind kind, uint64_t id, const NodeFacts& facts, const std::set<int>& only,
           int64_t now_ns, int64_t wait_ns)
    : kind_(kind), id_(id), incarnation_(facts.incarnation), deadline_ns_(now_ns + wait_ns) {
  for (const auto& [number, rank] : facts.ranks) {
    const bool wanted = only.empty() || only.count(number) != 0;
    // What a rank did in an earlier attempt is not comparable.
    const bool comparable = kind != Kind::kCrash || rank.incarnation == facts.incarnation;
    if (rank.pid > 0 && !rank.said_bye && wanted && comparable) {
      ranks_[number];
    }
  }
}

std::vector<int> Look::ranks() const {
  std::vector<int> numbers;
  for (const auto& [number, rank] : ranks_) {
    numbers.push_back(number);
  }
  return numbers;
}

bool Look::answered(int rank) const {
  const auto found = ranks_.find(rank);
  return found != ranks_.end() && found->second.reply;
}

void Look::sampled(const ProcessSample& sample, int64_t now_ns) {
  if (const auto rank = ranks_.find(sample.rank); rank != ranks_.end()) {
    rank->second.use = {now_ns, sample.counters};
  }
}

void Look::replied(int rank, std::string payload) {
  const auto found = ranks_.find(rank);
  if (found != ranks_.end() && !found->second.reply) {
    found->second.reply = std::move(payload);
  }
}

std::vector<int> Look::toRead(const std::vector<int>& pids) {
  std::vector<int> fresh;
  for (const int pid : pids) {
    if (outside_.emplace(pid, std::nullopt).second) {
      fresh.push_back(pid);
    }
  }
  return fresh;
}

void Look::read(int pid, RemoteStacks stacks) {
  if (const auto place = outside_.find(pid); place != outside_.end()) {
    place->second = std::move(stacks);
  }
}

std::optional<RemoteStacks> Look::outside(int pid) const {
  const auto place = outside_.find(pid);
  return place == outside_.end() ? std::nullopt : place->second;
}

bool Look::waitsFor(int number, const NodeFacts& facts) const {
  const auto rank = facts.ranks.find(number);
  if (rank == facts.ranks.end() || ranks_.at(number).reply) {
    return false;
  }
  if (rank->second.hidden) {
    return rank->second.connection != 0;
  }
  if (outside(rank->second.pid)) {
    return false;
  }
  // A rank that cannot answer keeps nobody waiting, unless its memory is being read.
  return rank->second.connection != 0 || outside_.count(rank->second.pid) != 0;
}

std::vector<int> Look::overdue(const NodeFacts& facts, int64_t now_ns) {
  std::vector<int> found;
  if (!thorough() || read_overdue_ || now_ns < deadline_ns_ ||
      std::none_of(ranks_.begin(), ranks_.end(),
                   [&](const auto& rank) { return waitsFor(rank.first, facts); })) {
    return found;
  }
  read_overdue_ = true;
  deadline_ns_ = now_ns + kOutsideNs;
  for (const auto& [number, rank] : ranks_) {
    const auto known = facts.ranks.find(number);
    if (!rank.reply && known != facts.ranks.end() && known->second.alive && !known->second.hidden) {
      found.push_back(number);
    }
  }
  return found;
}

bool Look::ready(const NodeFacts& facts, int64_t now_ns) const {
  // At a crash nobody is asked: only the op logs of the ranks that are left may change.
  const bool waits =
      kind_ == Kind::kCrash
          ? facts.anyLive()
          : std::any_of(ranks_.begin(), ranks_.end(),
                        [&](const auto& rank) { return waitsFor(rank.first, facts); }) ||
                (thorough() && facts.sampling) ||
                std::any_of(outside_.begin(), outside_.end(),
                            [](const auto& read) { return !read.second; });
  return (!waits || now_ns >= deadline_ns_) && !nodes.open(now_ns);
}

bool Look::againAfter(int64_t wait_ns, int64_t now_ns) {
  if (kind_ != Kind::kCrash || repeated_) {
    return false;
  }
  repeated_ = true;
  deadline_ns_ = now_ns + wait_ns;
  return true;
}

void Look::addTo(RankEvidence& entry, const RankFacts& facts,
                 const std::map<int, Use>& before) const {
  const auto& rank = ranks_.at(entry.rank);
  const auto then = before.find(entry.rank);
  if (entry.alive && then != before.end() && rank.use.at_ns != 0) {
    addUse(entry, then->second, rank.use);
  }
  if (rank.reply) {
    addStackReply(entry, *rank.reply);
  } else {
    const auto why = kind_ == Kind::kCrash   ? "was not asked for its stacks"
                     : facts.connection == 0 ? "is not connected"
                                             : "did not answer the request for its stacks";
    entry.error += (entry.error.empty() ? "" : "; ") + std::string(why);
    forgetDevice(entry);
    addOutside(entry, facts.hidden ? std::nullopt : outside(facts.pid));
  }
  for (ChildProcess& child : entry.children) {
    if (const auto read = outside(child.pid)) {
      child.stacks = read->text;
      child.error = read->error;
    }
  }
}

}  // namespace reft::agent

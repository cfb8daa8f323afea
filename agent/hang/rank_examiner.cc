#include "agent/hang/rank_examiner.h"

#include <unistd.h>

#include <array>
#include <atomic>

#include "hang_detect/evidence/process_state.h"
#include "intercept/base/error.h"

namespace reft::agent {

namespace {
constexpr size_t kTail = 64;  // ops of a rank in the evidence
}

NodeFacts factsOf(RankTable& ranks) {
  NodeFacts facts;
  facts.incarnation = ranks.incarnation();
  facts.world = ranks.world();
  facts.nodes = ranks.nodes();
  facts.restarts = ranks.mayComeBack();
  for (const auto& [number, rank] : ranks.all()) {
    facts.ranks[number] = {number,     rank.pid,      rank.connection, rank.hello.incarnation,
                           rank.alive, rank.said_bye, !rank.pid_is_own};
  }
  return facts;
}

std::optional<OpLogReader> opLogOf(RankState& rank) {
  const auto* vault = rank.readable();
  if (vault == nullptr) {
    return std::nullopt;
  }
  try {
    return OpLogReader(vault->opLogArea(), vault->opLogBytes());
  } catch (const Error&) {
    return std::nullopt;
  }
}

ProcessSample sampleOf(const RankState& rank, bool children) {
  ProcessSample sample;
  sample.rank = rank.hello.rank;
  const int pid = RankTable::readablePid(rank);
  sample.counters = processCounters(pid);
  sample.stopped = processIsStopped(pid);
  if (children && rank.alive) {
    sample.children = childrenOf(pid);
  }
  return sample;
}

RankEvidence examine(RankState& rank, int node, int64_t now_ns) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  RankEvidence entry;
  entry.rank = rank.hello.rank;
  entry.node = node;
  entry.host = host.data();
  entry.pid = rank.pid;
  entry.said_bye = rank.said_bye;
  if (const auto* vault = rank.readable()) {
    addOpLog(entry, vault->opLogArea(), vault->opLogBytes(), now_ns, kTail,
             static_cast<uint32_t>(rank.hello.pid));
    entry.committed_step =
        static_cast<int64_t>(vault->stats().committed_step.load(std::memory_order_relaxed));
  } else {
    entry.error = "no vault was handed over, so there is no op log";
  }
  entry.pid = RankTable::readablePid(rank);
  addProcessState(entry);
  if (entry.pid == 0) {
    entry.alive = rank.alive;  // of another PID namespace: nothing more is known
    entry.callers.clear();
  }
  entry.pid = rank.pid;
  if (!rank.alive) {
    entry.alive = false;  // the number may be another process's by now
    entry.oom_kills = rank.oomKillsSince();
    entry.ending = rank.ending;
    if (rank.ending.fault) {
      entry.stacks = rank.ending.fault->stacks;
    }
  }
  return entry;
}

}  // namespace reft::agent

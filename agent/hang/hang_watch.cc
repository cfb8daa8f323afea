#include "agent/hang/hang_watch.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"
#include "intercept/base/error.h"

namespace reft::agent {

namespace {
constexpr size_t kTail = 64;
}

Progress progressOf(const OpLogReader& log) {
  Progress progress{log.opsBegun(), log.heartbeatNs(), false};
  const auto tail = log.tail(kTail);
  for (const auto& op : tail) {
    progress.pending = progress.pending || (op.kind != OpKind::kStep && op.done_ns == 0);
  }
  // A rank that begins nothing after a failed op is on its way out, or stuck there.
  progress.pending = progress.pending || (!tail.empty() && tail.back().failed);
  return progress;
}

std::optional<Progress> readProgress(RankState& rank) {
  const auto* vault = rank.readable();
  if (vault == nullptr) {
    return std::nullopt;
  }
  try {
    return progressOf(OpLogReader(vault->opLogArea(), vault->opLogBytes()));
  } catch (const Error&) {
    return std::nullopt;
  }
}

void addUse(RankEvidence& rank, const Noted& then, const Noted& used) {
  if (then.at_ns >= used.at_ns) {
    return;
  }
  if (used.counters.cpu_ns >= 0 && then.counters.cpu_ns >= 0) {
    rank.cpu_share = static_cast<double>(used.counters.cpu_ns - then.counters.cpu_ns) /
                     static_cast<double>(used.at_ns - then.at_ns);
  }
  if (used.counters.io_bytes >= 0 && then.counters.io_bytes >= 0) {
    rank.io_bytes = used.counters.io_bytes - then.counters.io_bytes;
  }
}

void HangWatch::look(int64_t now_ns) {
  if (tick_ns_ > 0 && looked_ns_ != 0 && now_ns - looked_ns_ > 4 * tick_ns_) {
    unseen_ns_ = now_ns - looked_ns_;
    away_ns_ += unseen_ns_;
    back_ns_ = now_ns;
    next_ns_ += unseen_ns_;
  }
  looked_ns_ = now_ns;
}

bool HangWatch::suspect(const std::map<int, Progress>& live, int64_t now_ns) {
  uint64_t newest = 0;
  bool pending = false;
  for (const auto& [rank, progress] : live) {
    newest = std::max(newest, progress.heartbeat_ns);
    pending = pending || progress.pending;
  }
  pending_ = pending;
  if (newest != seen_ns_ || live.size() != seen_ranks_) {
    seen_ns_ = newest;
    seen_ranks_ = live.size();
    reported_ = noted_ = looked_early_ = at_work_ = false;
    looks_left_ = 0;
    const auto mark_ns = static_cast<int64_t>(newest);
    away_ns_ = mark_ns < back_ns_ ? unseen_ns_ : 0;
    next_ns_ = mark_ns + suspect_ns_ + away_ns_;
  }
  if ((reported_ && looks_left_ == 0) || newest == 0 || !pending || now_ns < next_ns_) {
    return false;
  }
  looks_left_ -= reported_ ? 1 : 0;
  next_ns_ = now_ns + suspect_ns_;
  return true;
}

bool HangWatch::credible(const Report& report) {
  const bool just_now = at_work_ && !report.excused && report.could_come;
  at_work_ = report.excused;
  return report.state == VerdictState::kHang && !just_now;
}

bool HangWatch::halfway(int64_t now_ns) {
  if (noted_ || seen_ns_ == 0 ||
      now_ns - static_cast<int64_t>(seen_ns_) - away_ns_ < suspect_ns_ / 2) {
    return false;
  }
  noted_ = true;
  return true;
}

bool HangWatch::early(int64_t now_ns) {
  if (looked_early_ || seen_ns_ == 0 || !pending_ ||
      now_ns - static_cast<int64_t>(seen_ns_) - away_ns_ < suspect_ns_ / 4 * 3) {
    return false;
  }
  looked_early_ = true;
  return true;
}

bool StackCollection::complete() const {
  return std::all_of(replies.begin(), replies.end(),
                     [](const auto& reply) { return reply.second.has_value(); });
}

namespace {

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

HangEvidence nodeEvidence(RankTable& ranks, const StackCollection& collection,
                          const std::string& job, int node, double suspect_sec, int64_t now_ns,
                          const std::map<int, Noted>& noted, const std::map<int, int64_t>& gone_ns,
                          int64_t away_ns) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  HangEvidence evidence;
  evidence.job = job;
  evidence.node = node;
  evidence.world = ranks.world();
  evidence.nodes = ranks.nodes();
  evidence.now_ns = now_ns;
  evidence.suspect_sec = suspect_sec;
  evidence.away_sec = static_cast<double>(away_ns) * 1e-9;
  for (const auto& [number, reply] : collection.replies) {
    auto* rank = ranks.find(number);
    RankEvidence entry;
    entry.rank = number;
    entry.node = node;
    entry.host = host.data();
    if (rank == nullptr) {
      entry.error = "not a rank of this node";
      evidence.ranks.push_back(std::move(entry));
      continue;
    }
    entry.pid = rank->pid;
    entry.said_bye = rank->said_bye;
    addProcessState(entry);
    if (!rank->alive) {
      entry.alive = false;  // the number may be another process's by now
      const auto gone = gone_ns.find(number);
      entry.gone_ns = gone == gone_ns.end() ? 0 : gone->second;
      entry.oom_kills = rank->oomKillsSince();
    }
    const auto before = noted.find(number);
    const auto asked = collection.used.find(number);
    if (entry.alive && before != noted.end() && asked != collection.used.end()) {
      addUse(entry, before->second, asked->second);
    }
    if (const auto* vault = rank->readable()) {
      addOpLog(entry, vault->opLogArea(), vault->opLogBytes(), now_ns, kTail,
               static_cast<uint32_t>(rank->hello.pid));
      entry.committed_step =
          static_cast<int64_t>(vault->stats().committed_step.load(std::memory_order_relaxed));
    } else {
      entry.error = "no vault was handed over, so there is no op log";
    }
    if (reply) {
      addStackReply(entry, *reply);
    } else {
      const auto why = collection.crash        ? "was not asked for its stacks"
                       : rank->connection == 0 ? "is not connected"
                                               : "did not answer the request for its stacks";
      entry.error += (entry.error.empty() ? "" : "; ") + std::string(why);
      addOutside(entry, collection.outside.of(rank->pid));
    }
    for (ChildProcess& child : entry.children) {
      if (const auto read = collection.outside.of(child.pid)) {
        child.stacks = read->text;
        child.error = read->error;
      }
    }
    evidence.ranks.push_back(std::move(entry));
  }
  return evidence;
}

Report judge(const HangEvidence& evidence) {
  const Verdict verdict = decide(evidence);
  Report report{verdict.state,
                verdict.confidence,
                hangReportJson(evidence, verdict),
                hangReportText(evidence, verdict),
                verdictText(evidence, verdict),
                verdict.what};
  for (const Culprit& culprit : verdict.culprits) {
    report.finding += " " + std::to_string(culprit.rank) + " " + culprit.reason;
    if (culprit.frame) {
      report.finding += " " + culprit.frame->file + ":" + std::to_string(culprit.frame->line);
    }
    const auto rank =
        std::find_if(evidence.ranks.begin(), evidence.ranks.end(),
                     [&](const RankEvidence& entry) { return entry.rank == culprit.rank; });
    report.at_work = report.at_work || (rank != evidence.ranks.end() && atWork(*rank, culprit));
  }
  report.disagreement =
      std::any_of(verdict.disagreements.begin(), verdict.disagreements.end(),
                  [&](const Disagreement& found) { return found.what == verdict.what; });
  report.prompt = std::any_of(evidence.ranks.begin(), evidence.ranks.end(), atDebuggerPrompt);
  report.somebody_died = std::any_of(
      evidence.ranks.begin(), evidence.ranks.end(),
      [](const RankEvidence& rank) { return !rank.alive && !rank.said_bye && rank.pid > 0; });
  report.traced =
      std::any_of(evidence.ranks.begin(), evidence.ranks.end(),
                  [](const RankEvidence& rank) { return rank.alive && rank.tracer_pid > 0; });
  report.nodes = evidence.nodes;
  report.silent = !evidence.silent_nodes.empty();
  report.excused = verdict.at_work;
  report.could_come = verdict.could_come;
  return report;
}

}  // namespace reft::agent

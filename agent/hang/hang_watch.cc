#include "agent/hang/hang_watch.h"

#include <algorithm>

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

void HangWatch::look(int64_t now_ns) {
  if (tick_ns_ > 0 && looked_ns_ != 0 && now_ns - looked_ns_ > 4 * tick_ns_) {
    absent_ns_ = now_ns - looked_ns_;
    away_ns_ += absent_ns_;
    back_ns_ = now_ns;
    next_ns_ += absent_ns_;
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
  if (newest != newest_mark_ns_ || live.size() != live_ranks_) {
    newest_mark_ns_ = newest;
    live_ranks_ = live.size();
    reported_ = noted_ = looked_early_ = at_work_ = false;
    looks_left_ = 0;
    const auto mark_ns = static_cast<int64_t>(newest);
    away_ns_ = mark_ns < back_ns_ ? absent_ns_ : 0;
    next_ns_ = mark_ns + suspect_ns_ + away_ns_;
  }
  if ((reported_ && looks_left_ == 0) || newest == 0 || !pending || now_ns < next_ns_) {
    return false;
  }
  looks_left_ -= reported_ ? 1 : 0;
  next_ns_ = now_ns + suspect_ns_;
  return true;
}

bool HangWatch::credible(const Finding& finding) {
  const bool just_now = at_work_ && !finding.excused && finding.could_come;
  at_work_ = finding.excused;
  return finding.state == VerdictState::kHang && !just_now;
}

bool HangWatch::halfway(int64_t now_ns) {
  if (noted_ || newest_mark_ns_ == 0 ||
      now_ns - static_cast<int64_t>(newest_mark_ns_) - away_ns_ < suspect_ns_ / 2) {
    return false;
  }
  noted_ = true;
  return true;
}

bool HangWatch::early(int64_t now_ns) {
  if (looked_early_ || newest_mark_ns_ == 0 || !pending_ ||
      now_ns - static_cast<int64_t>(newest_mark_ns_) - away_ns_ < suspect_ns_ / 4 * 3) {
    return false;
  }
  looked_early_ = true;
  return true;
}

}  // namespace reft::agent

#include "hang_detect/evidence/evidence.h"

#include <algorithm>
#include <cstdlib>
#include <exception>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/nccl_finding_json.h"
#include "intercept/base/json.h"

namespace reft {

namespace {

constexpr size_t kCallerOps = 1024;  // beyond the tail: a step may have hundreds
constexpr size_t kMaxCallers = 8;
// Older ops than the tail, in a short form.
constexpr size_t kPast = 448;

void addError(RankEvidence& rank, const char* what, const std::string& text) noexcept {
  try {
    rank.error += (rank.error.empty() ? "" : "; ") + std::string(what) + ": " + text;
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left for the sentence
  }
}

}  // namespace

bool endedUncleanly(const RankEvidence& rank) {
  return !rank.alive && !rank.said_bye && rank.pid > 0;
}

bool aNewestOpFailed(const RankEvidence& rank) {
  constexpr ptrdiff_t kNewestOps = 4;
  const auto end = rank.tail.rbegin() + std::min<ptrdiff_t>(kNewestOps, std::ssize(rank.tail));
  return std::any_of(rank.tail.rbegin(), end, [](const OpEntry& op) { return op.failed; });
}

int64_t lastStepOf(const RankEvidence& rank) {
  for (auto op = rank.tail.rbegin(); op != rank.tail.rend(); ++op) {
    if (op->kind == OpKind::kStep) {
      return op->seq;
    }
  }
  return -1;
}

std::vector<CallingThread> callersOf(const std::vector<OpEntry>& ops) {
  struct Calls {
    uint64_t thread = 0;
    size_t count = 0;
    bool newest_step = false;
  };
  std::vector<Calls> calls;  // newest first
  bool step_seen = false;
  for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
    if (op->thread == 0) {
      continue;
    }
    auto at = std::find_if(calls.begin(), calls.end(),
                           [&](const Calls& entry) { return entry.thread == op->thread; });
    if (at == calls.end()) {
      at = calls.insert(at, {op->thread});
    }
    ++at->count;
    at->newest_step = at->newest_step || (op->kind == OpKind::kStep && !step_seen);
    step_seen = step_seen || op->kind == OpKind::kStep;
  }
  std::stable_sort(calls.begin(), calls.end(), [](const Calls& a, const Calls& b) {
    return a.newest_step != b.newest_step ? a.newest_step : a.count > b.count;
  });
  std::vector<CallingThread> callers;
  for (const Calls& entry : calls) {
    if (callers.size() < kMaxCallers) {
      callers.push_back({entry.thread});
    }
  }
  return callers;
}

Standing standingOf(const RankEvidence& rank) {
  for (const CallingThread& caller : rank.callers) {
    for (const ThreadStack& stack : rank.stacks.parsed().threads) {
      if (!stack.frames.empty() &&
          std::strtoull(stack.thread.c_str(), nullptr, 16) == OpThread::handleOf(caller.thread)) {
        return stack.main ? Standing{&stack, rank.proc_state, rank.wait_channel}
                          : Standing{&stack, caller.state, caller.wait_channel};
      }
    }
  }
  return {rank.stacks.mainThread(), rank.proc_state, rank.wait_channel};
}

void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count,
              uint32_t writer) noexcept {
  try {
    const OpLogReader reader(area, bytes);
    if (writer != 0 && reader.writerPid() != writer) {
      addError(rank, "op log", "the process has not begun its own yet");
      return;
    }
    rank.groups = reader.groups();
    const std::vector<OpEntry> ops = reader.tail(std::max(kCallerOps, count + kPast));
    const size_t older = ops.size() - std::min(ops.size(), count);
    rank.tail.assign(ops.begin() + static_cast<ptrdiff_t>(older), ops.end());
    for (size_t i = older - std::min(older, kPast); i < older; ++i) {
      if (ops[i].kind != OpKind::kStep) {
        rank.past.push_back(pastOf(ops[i]));
      }
    }
    rank.call_sites = reader.callSites();
    rank.callers = callersOf(ops);
    rank.ops_begun = reader.opsBegun();
    const uint64_t heartbeat = reader.heartbeatNs();
    const auto now = static_cast<uint64_t>(now_ns);
    rank.heartbeat_age_ns = heartbeat != 0 && heartbeat < now ? now - heartbeat : 0;
  } catch (const std::exception& problem) {
    addError(rank, "op log", problem.what());
  }
}

void forgetDevice(RankEvidence& rank) {
  for (OpEntry& op : rank.tail) {
    op.reach_asked = op.reached = op.pass_asked = false;  // passed once is passed
  }
}

void addStackReply(RankEvidence& rank, std::string_view payload) noexcept {
  try {
    const auto reply = parseJson(payload);
    if (!reply.is_object() || !reply.contains("text") || !reply["text"].is_string()) {
      addError(rank, "stacks", "the reply is not one");
      return;
    }
    rank.answered = true;
    rank.stacks = reply["text"].get<std::string>();
    if (reply.contains("driver")) {
      rank.driver = driverUseFrom(reply["driver"]);
    }
    if (reply.contains("nccl")) {
      rank.nccl = ncclFindingsFrom(reply["nccl"]);
    }
    if (reply.contains("error") && reply["error"].is_string() &&
        !reply["error"].get<std::string>().empty()) {
      addError(rank, "stacks", reply["error"].get<std::string>());
    }
  } catch (const std::exception& problem) {
    addError(rank, "stacks", problem.what());
  }
}

}  // namespace reft

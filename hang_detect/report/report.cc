#include "hang_detect/report/report.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/report/verdict_text.h"
#include "hang_detect/report/wrap.h"
#include "hang_detect/stacks/printable.h"
#include "hang_detect/stacks/remote_stack.h"
#include "hang_detect/stacks/stacks.h"
#include "hang_detect/verdict/verdict.h"

namespace reft {

namespace {

using nlohmann::json;

constexpr size_t kTextOps = 8;
constexpr size_t kTextHeld = 8;
constexpr size_t kTextFrames = 24;
constexpr size_t kTextThreads = 16;
constexpr size_t kTextChildren = 4;
constexpr size_t kTextChildFrames = 8;

// Seconds since `begin_ns`; 0 if that is in the future.
double age(uint64_t begin_ns, int64_t now_ns) {
  const auto now = static_cast<uint64_t>(now_ns);
  return begin_ns != 0 && begin_ns < now ? static_cast<double>(now - begin_ns) * 1e-9 : 0;
}

const char* phaseOf(const OpEntry& op) {
  if (op.failed) {
    return "failed";
  }
  if (op.done_ns != 0) {
    return "done";
  }
  if (op.wait_end_ns != 0) {
    return "open, wait is over";
  }
  if (op.wait_begin_ns != 0) {
    return "waiting";
  }
  return op.enqueued_ns != 0 ? "enqueued" : "in the call";
}

std::string siteOf(const OpEntry& op, const RankEvidence& rank) {
  const auto site = rank.call_sites.find(op.call_site);
  return site == rank.call_sites.end() ? "" : site->second;
}

std::string stateOf(const RankEvidence& rank) {
  if (!rank.alive) {
    return rank.proc_state == "Z" ? "dead (not reaped)" : "dead";
  }
  switch (rank.proc_state.empty() ? '\0' : rank.proc_state[0]) {
    case 'R': return "alive, running";
    case 'S': return "alive, sleeping";
    case 'D': return "alive, in the kernel (D)";
    case 'T': return "stopped";
    case 't': return "stopped by a debugger";
    default: return "alive";
  }
}

json opJson(const OpEntry& op, const RankEvidence& rank, int64_t now_ns) {
  json result = evidenceFields(op);
  result["op"] = opKindName(op.kind);
  result["group"] = words::groupName(rank, op.group);
  result["phase"] = phaseOf(op);
  result["age_sec"] = age(op.begin_ns, now_ns);
  const std::string site = siteOf(op, rank);
  result["call_site"] = site.empty() ? json() : json(site);
  return result;
}

json stacksJson(const Stacks& stacks, json& native) {
  json threads = json::array();
  for (const ThreadStack& thread : stacks.threads) {
    json frames = json::array();
    for (const StackFrame& frame : thread.frames) {
      frames.push_back({{"file", frame.file}, {"line", frame.line}, {"function", frame.function}});
    }
    threads.push_back({{"thread", thread.thread},
                       {"name", thread.name},
                       {"main", thread.main},
                       {"truncated", thread.truncated},
                       {"holds_gil", thread.holds_gil},
                       {"awaits_gil_of", thread.awaits_gil_of},
                       {"frames", std::move(frames)}});
  }
  native = json::array();
  for (const NativeThread& thread : stacks.native) {
    native.push_back({{"tid", thread.tid}, {"state", thread.state}, {"name", thread.name}});
  }
  return threads;
}

json deadPathsJson(const HangEvidence& evidence, const Verdict& verdict) {
  json paths = json::array();
  for (const DeadPath& path : verdict.dead_paths) {
    paths.push_back({{"from", evidence.ranks[path.from].rank},
                     {"to", evidence.ranks[path.to].rank},
                     {"both", path.both},
                     {"unacknowledged", path.unacknowledged},
                     {"resent", path.resent}});
  }
  return paths;
}

json rankJson(const RankEvidence& rank, int64_t now_ns) {
  json pending = json::array();
  json tail = json::array();
  for (const OpEntry& op : rank.tail) {
    tail.push_back(opJson(op, rank, now_ns));
    if (isOpen(op)) {
      pending.push_back(tail.back());
    }
  }
  const Stacks& stacks = rank.stacks.parsed();
  json native;
  json threads = stacksJson(stacks, native);
  json result = evidenceFields(rank);
  result["step"] = lastStepOf(rank);
  result["heartbeat_age_sec"] = static_cast<double>(rank.heartbeat_age_ns) * 1e-9;
  result["pending"] = std::move(pending);
  result["tail"] = std::move(tail);
  result["threads"] = std::move(threads);
  result["native_threads"] = std::move(native);
  for (size_t i = 0; i < rank.children.size(); ++i) {
    json of_child;
    result["children"][i]["threads"] = stacksJson(rank.children[i].stacks.parsed(), of_child);
  }
  result["stacks_truncated"] = stacks.truncated;
  return result;
}

// Collects lines, none of them longer than 80 columns.
class Page {
 public:
  void line(const std::string& text = "", size_t indent = 2) {
    text_ += wrapText(text, indent);
    text_ += '\n';
  }
  // Without wrapping.
  void lines(const std::string& text) { text_ += text; }
  // Cuts a table row or a path instead of wrapping it.
  void row(const std::string& text) {
    text_ += text.substr(0, 80);
    text_.erase(text_.find_last_not_of(' ') + 1);
    text_ += '\n';
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

std::string shortened(const std::string& path, size_t room) {
  return path.size() <= room ? path : "..." + path.substr(path.size() - (room - 3));
}

void writeOps(Page& page, const RankEvidence& rank, int64_t now_ns) {
  size_t held = 0;
  for (const OpEntry& op : rank.tail) {
    if (op.kind == OpKind::kStep || !isHeld(op)) {
      continue;
    }
    if (++held > kTextHeld) {
      page.line("  more of them: see the JSON report");
      break;
    }
    std::string text =
        "  in: " + words::opName(op, rank) + ", " + words::bytes(op.bytes) + ", " + phaseOf(op);
    if (op.begin_ns != 0) {
      text += ", begun " + words::seconds(age(op.begin_ns, now_ns)) + " ago";
    }
    const std::string site = siteOf(op, rank);
    if (!site.empty()) {
      text += ", called at " + printable(site, 200);
    }
    page.line(text, 4);
  }
  if (rank.tail.empty()) {
    page.line("  its log has no ops");
    return;
  }
  page.row("  newest ops        begun    took     seq     bytes peer  phase, group");
  const size_t first = rank.tail.size() > kTextOps ? rank.tail.size() - kTextOps : 0;
  for (size_t i = first; i < rank.tail.size(); ++i) {
    const OpEntry& op = rank.tail[i];
    const double took = op.done_ns != 0 ? age(op.begin_ns, static_cast<int64_t>(op.done_ns)) : 0;
    const bool is_step = op.kind == OpKind::kStep;
    char head[256];
    std::snprintf(head, sizeof(head), "  %-15.15s %7s %7s %7u %9s %4s  ", opKindName(op.kind),
                  words::seconds(age(op.begin_ns, now_ns)).c_str(),
                  op.done_ns != 0 ? words::seconds(took).c_str() : "-", op.seq,
                  is_step ? "-" : words::bytes(op.bytes).c_str(),
                  op.peer >= 0 ? std::to_string(op.peer).c_str() : "-");
    page.row(head + (is_step ? "-" : phaseOf(op) + (", " + words::groupName(rank, op.group))));
  }
}

void writeFrames(Page& page, const ThreadStack& thread, size_t limit) {
  for (size_t i = 0; i < thread.frames.size() && i < limit; ++i) {
    const StackFrame& frame = thread.frames[i];
    const std::string tail = ":" + (frame.line > 0 ? std::to_string(frame.line) : "?") + " " +
                             printable(frame.function, 36);
    page.row("    " +
             shortened(printable(frame.file, 4096), 76 - std::min<size_t>(tail.size(), 60)) + tail);
  }
  if (thread.frames.empty()) {
    page.row("    (no Python frames)");
  } else if (thread.frames.size() > limit || thread.truncated) {
    page.row("    ...");
  }
}

// Main threads of the rank's children: data workers, checkpoint writers.
void writeChildren(Page& page, const RankEvidence& rank) {
  size_t written = 0;
  for (const ChildProcess& child : rank.children) {
    const ThreadStack* main = child.stacks.mainThread();
    if (main == nullptr) {
      continue;
    }
    if (++written > kTextChildren) {
      page.line("  more child processes: see the JSON report");
      break;
    }
    page.row("  child process " + std::to_string(child.pid) + " " + printable(child.name, 32) +
             " (" + printable(child.state, 2) + "), newest call first");
    writeFrames(page, *main, kTextChildFrames);
  }
}

void writeStacks(Page& page, const RankEvidence& rank) {
  const Stacks& stacks = rank.stacks.parsed();
  if (stacks.threads.empty()) {
    page.line(rank.answered ? "  its stacks are empty" : "  no stacks");
    return;
  }
  std::vector<const ThreadStack*> threads;
  for (const ThreadStack& thread : stacks.threads) {
    threads.push_back(&thread);
  }
  const ThreadStack* counts = standingOf(rank).stack;
  const auto first = std::stable_partition(threads.begin(), threads.end(),
                                           [&](const auto* thread) { return thread == counts; });
  const auto others =
      std::stable_partition(first, threads.end(), [](const auto* thread) { return thread->main; });
  std::stable_partition(others, threads.end(),
                        [](const auto* thread) { return thread->holds_gil; });
  size_t written = 0;
  for (const ThreadStack* thread : threads) {
    if (++written > kTextThreads) {
      page.line("  " + std::to_string(threads.size() - kTextThreads) +
                " more threads: see the JSON report");
      break;
    }
    page.row("  " + std::string(thread->main ? "main thread" : "thread") + " " +
             printable(thread->thread, 24) +
             (thread->name.empty() ? "" : " " + printable(thread->name, 32)) +
             (thread == counts && !thread->main ? ", which calls the ops" : "") +
             (thread->holds_gil                ? ", holds the GIL"
              : !thread->awaits_gil_of.empty() ? ", waits for the GIL"
                                               : "") +
             ", newest call first");
    writeFrames(page, *thread, kTextFrames);
  }
}

void writeUncaught(Page& page, const Uncaught& end, const std::string& what) {
  page.line("  " + what + printable(end.type, 80) + ": " + printable(end.message, 400), 4);
  for (const std::string& cause : end.causes) {
    page.line("    before it: " + printable(cause, 200), 6);
  }
  writeFrames(page, end.stack(), kTextFrames);
}

// What is known of the end of a dead rank.
void writeEnding(Page& page, const RankEvidence& rank) {
  const Ending& ending = rank.ending;
  if (rank.alive || ending.empty()) {
    return;
  }
  if (ending.signal != 0) {
    page.line("  ended by " + signalName(ending.signal));
  } else if (ending.exit_code >= 0) {
    page.line("  exit code " + std::to_string(ending.exit_code));
  }
  if (ending.exception) {
    writeUncaught(page, *ending.exception, "uncaught, newest call first: ");
  }
  if (ending.in_thread) {
    writeUncaught(page, *ending.in_thread,
                  "uncaught in " + printable(ending.in_thread->thread, 40) + ": ");
  }
  if (ending.fault) {
    char thread[32], address[32];
    std::snprintf(thread, sizeof(thread), "0x%016" PRIx64, ending.fault->thread);
    std::snprintf(address, sizeof(address), "0x%" PRIx64, ending.fault->address);
    page.line("  " + signalName(ending.fault->signal) + " in thread " + thread +
              (ending.fault->main ? " (main)" : "") +
              (ending.fault->sender > 0
                   ? ", sent by process " + std::to_string(ending.fault->sender)
                   : std::string(", address ") + address) +
              (ending.fault->frames.empty() ? "" : ", newest frame first"));
    for (const FaultFrame& frame : ending.fault->frames) {
      page.line("    " + printable(frame.text(), 160));
    }
  }
}

void writeRank(Page& page, const RankEvidence& rank, int64_t now_ns, bool many_nodes) {
  std::string head = "rank " + std::to_string(rank.rank) + ": " + stateOf(rank) + ", pid " +
                     std::to_string(rank.pid);
  if (!rank.host.empty()) {
    head += " on " + printable(rank.host, 64);
  }
  if (many_nodes) {
    head += ", node " + std::to_string(rank.node);
  }
  page.line();
  page.line(head);
  std::string place = ", " + std::to_string(rank.ops_begun) + " ops";
  if (const int64_t step = lastStepOf(rank); step >= 0) {
    place += ", " + std::to_string(step) + " steps done";
  }
  if (rank.committed_step >= 0) {
    place += ", step " + std::to_string(rank.committed_step) + " committed";
  }
  if (rank.heartbeat_age_ns != 0) {
    place += ", newest mark " + words::seconds(static_cast<double>(rank.heartbeat_age_ns) * 1e-9) +
             " ago";
  }
  page.line("  " + place.substr(2), 4);
  if (!rank.error.empty()) {
    page.line("  problem: " + printable(rank.error), 4);
  }
  writeEnding(page, rank);
  writeOps(page, rank, now_ns);
  writeStacks(page, rank);
  writeChildren(page, rank);
}

}  // namespace

std::string hangReportJson(const HangEvidence& evidence, const Verdict& verdict) {
  const auto culpritsJson = [](const std::vector<Culprit>& culprits) {
    json list = json::array();
    for (const Culprit& culprit : culprits) {
      json frame;
      if (culprit.frame) {
        frame = {{"file", culprit.frame->file},
                 {"line", culprit.frame->line},
                 {"function", culprit.frame->function}};
      }
      list.push_back({{"rank", culprit.rank},
                      {"host", culprit.host},
                      {"pid", culprit.pid},
                      {"thread", culprit.thread},
                      {"frame", std::move(frame)},
                      {"reason", culprit.reason},
                      {"text", culprit.text}});
    }
    return list;
  };
  json disagreements = json::array();
  for (const Disagreement& found : verdict.disagreements) {
    disagreements.push_back(disagreementFields(found));
  }
  json ranks = json::array();
  for (const RankEvidence& rank : evidence.ranks) {
    ranks.push_back(rankJson(rank, evidence.now_ns));
  }
  json report = evidenceFields(evidence);
  report.update({{"state", stateName(verdict.state)},
                 {"class", verdict.what},
                 {"pattern", verdict.pattern},
                 {"confidence", confidenceName(verdict.confidence)},
                 {"culprits", culpritsJson(verdict.culprits)},
                 {"candidates", culpritsJson(verdict.candidates)},
                 {"victims", verdict.victims},
                 {"group", verdict.group},
                 {"op", verdict.op},
                 {"seq", verdict.seq},
                 {"detected_after_sec", verdict.waited_sec},
                 {"disagreements", std::move(disagreements)},
                 {"dead_paths", deadPathsJson(evidence, verdict)},
                 {"evidence", verdict.evidence},
                 {"advice", verdict.advice},
                 {"remedy", remedyName(verdict.remedy)},
                 {"outside", verdict.outside},
                 {"step", verdict.step},
                 {"ranks", std::move(ranks)},
                 {"screen", verdictText(evidence, verdict)},
                 {"text", hangReportText(evidence, verdict)}});
  return report.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string remoteStacksJson(int pid, const RemoteStacks& stacks) {
  json native;
  const Stacks parsed = parseStacks(stacks.text);
  json threads = stacksJson(parsed, native);
  for (size_t i = 0; i < parsed.threads.size(); ++i) {
    threads[i]["place"] = placeOf(parsed.threads[i]);
  }
  const json result = {{"pid", pid},
                       {"python", stacks.version},
                       {"threads", std::move(threads)},
                       {"native_threads", std::move(native)},
                       {"error", stacks.error}};
  return result.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string hangReportText(const HangEvidence& evidence, const Verdict& verdict) {
  Page page;
  std::string head =
      "job " + printable(evidence.job, 128) + ", node " + std::to_string(evidence.node) + ": ";
  head += std::to_string(evidence.ranks.size());
  if (evidence.world > 0) {
    head += " of " + std::to_string(evidence.world);
  }
  head += evidence.world > 1 ? " ranks" : (evidence.ranks.size() == 1 ? " rank" : " ranks");
  head += verdict.state == VerdictState::kCrash ? ", of which some ended without a clean end"
          : evidence.suspect_sec > 0 ? ", no progress for " + words::seconds(evidence.suspect_sec)
                                     : ", on request (the job may be healthy)";
  page.line(head);
  page.line();
  page.lines(verdictText(evidence, verdict));
  for (const RankEvidence& rank : evidence.ranks) {
    writeRank(page, rank, evidence.now_ns, evidence.nodes > 1);
  }
  return page.take();
}

}  // namespace reft

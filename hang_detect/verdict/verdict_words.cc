#include "hang_detect/verdict/verdict_words.h"

#include <algorithm>
#include <set>
#include <utility>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"

namespace reft {

namespace {

constexpr size_t kMaxWaitSentences = 8;

std::string plural(size_t count, const char* one, const char* more) {
  return count == 1 ? one : more;
}

// The last two parts of the path that a call site begins with: they tell files of the same name
// apart, and leave the line and the function on the screen.
std::string_view shortSite(std::string_view site) {
  const size_t file = site.rfind('/');
  if (file == std::string_view::npos || file == 0) {
    return site;
  }
  const size_t folder = site.rfind('/', file - 1);
  return folder == std::string_view::npos ? site : site.substr(folder + 1);
}

// ", called at jobs/train.py:9 step"
std::string callSite(const RankEvidence& rank, const OpEntry& op, const char* before) {
  const auto site = rank.call_sites.find(op.call_site);
  return site == rank.call_sites.end() ? "" : before + printable(shortSite(site->second), 100);
}

// "all_reduce of group tp0 at jobs/train.py:9 step", "send to 2 at jobs/train.py:9 step"
std::string nameOf(const RankEvidence& rank, const PastOp& op) {
  OpEntry named;
  named.call_site = op.call_site;
  const std::string peer = op.kind == OpKind::kSend   ? " to " + std::to_string(op.peer)
                           : op.kind == OpKind::kRecv ? " from " + std::to_string(op.peer)
                                                      : "";
  const std::string tag = op.tag != 0 ? " with tag " + std::to_string(op.tag) : "";
  return opKindName(op.kind) +
         (peer.empty() ? " of group " + words::groupName(rank, op.group) : peer) + tag +
         callSite(rank, named, " at ");
}

// "broadcast (4.0 MiB, float32, root 0) at jobs/train.py:9 step"
std::string callOf(const RankEvidence& rank, const OpEntry& op, bool with_reduction) {
  const int32_t root = contractOf(op).root;
  return std::string(opKindName(op.kind)) + " (" + words::bytes(op.bytes) + ", " +
         words::dtypeName(op.dtype) +
         (with_reduction ? ", " + words::reduceOpName(op.reduce_op) : "") +
         (root >= 0 ? ", root " + std::to_string(root) : "") + ")" + callSite(rank, op, " at ");
}

std::string sentenceOf(const JobView& view, const CollectiveWait& wait) {
  std::string text = words::rankList(view.numbersOf(wait.waiting)) +
                     plural(wait.waiting.size(), " waits in ", " wait in ") + opOf(wait) + " seq " +
                     std::to_string(wait.seq) + " of group " + wait.group->name;
  if (!wait.missing.empty()) {
    text += "; not begun by " + words::rankList(view.numbersOf(wait.missing));
  } else if (wait.all_begun) {
    text += "; every member has begun it";
  }
  if (!wait.behind.empty()) {
    text += "; not reached by the " + plural(wait.behind.size(), "device", "devices") + " of " +
            words::rankList(view.numbersOf(wait.behind));
  }
  if (!wait.out_of_reach.empty()) {
    text += "; the log of " + words::rankList(view.numbersOf(wait.out_of_reach)) +
            " does not reach back to this group";
  }
  if (const int64_t invisible = wait.group->invisibleMembers(); invisible > 0) {
    text += "; " + std::to_string(invisible) +
            plural(static_cast<size_t>(invisible), " member is", " members are") +
            " not visible from this node";
  }
  return text;
}

std::string sentenceOf(const JobView& view, const MessageWait& wait) {
  const RankEvidence& rank = view.ranks()[wait.rank];
  std::string text =
      "rank " + std::to_string(rank.rank) + " waits in " + words::opName(*wait.op, rank);
  if (wait.peer == nullptr) {
    return text + (wait.op->kind == OpKind::kRecvAnysource ? ", from any rank"
                                                           : ", not visible from this node");
  }
  text += " (rank " + std::to_string(view.ranks()[wait.peer->rank].rank) + ")";
  if (wait.peer_behind) {
    text += ", whose device has not reached the matching op";
  } else if (wait.match != nullptr) {
    text += ", which is in the matching op";
    if (wait.match->signature != wait.op->signature) {
      text += " with another size or type (" + words::bytes(wait.op->bytes) + " and " +
              words::bytes(wait.match->bytes) + ")";
    }
  } else if (wait.peer_done) {
    text += ", which has done its part";
  } else if (wait.crossed != nullptr) {
    text += ", whose op with it has tag " + std::to_string(wait.crossed->tag) + ", not " +
            std::to_string(wait.op->tag);
  }
  return text;
}

std::string sentenceOf(const JobView& view, const CoalescedWait& wait) {
  return "rank " + std::to_string(view.ranks()[wait.rank].rank) +
         " waits in a coalesced op, whose members the log does not record";
}

size_t ranksIn(const Wait& wait) {
  const auto* collective = std::get_if<CollectiveWait>(&wait);
  return collective != nullptr ? collective->waiting.size() : 1;
}

std::string stackOfFirstCulprit(const Verdict& verdict) {
  return "reft stack --rank " +
         std::to_string(verdict.culprits.empty() ? 0 : verdict.culprits.front().rank);
}

std::string adviceIfUndecidable(const HangEvidence& evidence, const Verdict& verdict) {
  if (verdict.what == "all_in") {
    return "check the nodes and the network between the ranks of this group";
  }
  if (!verdict.candidates.empty()) {
    return "compare the code at the places named above: reft stack --rank N";
  }
  if (!evidence.silent_nodes.empty()) {
    return "check " + words::nodeList(evidence.silent_nodes) + ": no running rank, or " +
           plural(evidence.silent_nodes.size(), "its agent hangs", "their agents hang");
  }
  return evidence.nodes > 1 ? "read the reports of the other nodes, and the stacks: reft stack"
                            : "read the stacks: reft stack";
}

}  // namespace

std::string disagreementSentence(const JobView& view, const GroupLog& group, uint32_t seq,
                                 const std::vector<OpSide>& sides) {
  const bool reductions_differ = std::any_of(sides.begin(), sides.end(), [&](const OpSide& side) {
    return side.op->reduce_op != sides.front().op->reduce_op;
  });
  std::string text = "seq " + std::to_string(seq) + " of group " + group.name + ":";
  for (const OpSide& side : sides) {
    text += "\n" + words::rankList(view.numbersOf(side.ranks)) +
            plural(side.ranks.size(), " calls ", " call ") +
            callOf(view.ranks()[side.ranks.front()], *side.op, reductions_differ);
  }
  return text;
}

std::map<int, std::string> whatEachCalls(const JobView& view, const GroupLog& group, uint32_t seq) {
  std::map<int, std::string> calls;
  for (const Member& member : group.members) {
    if (const OpEntry* op = member.find(seq)) {
      const RankEvidence& rank = view.ranks()[member.rank];
      calls[rank.rank] = ": it calls " + callOf(rank, *op, false);
    }
  }
  return calls;
}

std::string opOf(const CollectiveWait& wait) {
  return wait.op == nullptr ? "an op" : opKindName(wait.op->kind);
}

std::vector<std::string> waitSentences(const JobView& view, const WaitGraph& graph) {
  std::vector<const Wait*> waits;
  for (const Wait& wait : graph.waits()) {
    waits.push_back(&wait);
  }
  std::stable_sort(waits.begin(), waits.end(),
                   [](const Wait* a, const Wait* b) { return ranksIn(*a) > ranksIn(*b); });
  std::vector<std::string> sentences;
  for (size_t i = 0; i < waits.size() && i < kMaxWaitSentences; ++i) {
    sentences.push_back(
        std::visit([&](const auto& wait) { return sentenceOf(view, wait); }, *waits[i]));
  }
  if (waits.size() > kMaxWaitSentences) {
    sentences.push_back("and " + std::to_string(waits.size() - kMaxWaitSentences) +
                        " more such waits");
  }
  return sentences;
}

std::string whereInOp(const JobView& view, int number) {
  for (const size_t r : view.indicesOf({number})) {
    const RankEvidence& rank = view.ranks()[r];
    if (const OpEntry* op = view.newestHeld(r)) {
      return ": it is in " + words::opName(*op, rank) + callSite(rank, *op, ", called at ");
    }
  }
  return "";
}

std::string behindText(const JobView& view, int number, const OpEntry& op) {
  for (const size_t r : view.indicesOf({number})) {
    const RankEvidence& rank = view.ranks()[r];
    return "the device of rank " + std::to_string(number) + " has not reached " +
           words::opName(op, rank) + callSite(rank, op, ", called at ") +
           ": something that was launched before does not end, or waits";
  }
  return "";
}

std::string departureText(const JobView& view, const Departure& departure) {
  const RankEvidence& rank = view.ranks()[departure.rank];
  return " departs from its habit: it calls " + nameOf(rank, departure.instead) +
         ", where it has called " + nameOf(rank, departure.usual) + " all " +
         std::to_string(departure.times) + " times before";
}

std::string silentNodesSentence(std::vector<int> nodes) {
  std::sort(nodes.begin(), nodes.end());
  return words::nodeList(nodes) + plural(nodes.size(),
                                         " does not answer: no evidence about its ranks",
                                         " do not answer: no evidence about their ranks");
}

std::string adviceFor(const HangEvidence& evidence, const Verdict& verdict) {
  if (verdict.state == VerdictState::kHealthy) {
    return "nothing";
  }
  if (verdict.confidence == Confidence::kUndecidable) {
    return adviceIfUndecidable(evidence, verdict);
  }
  const std::string& what = verdict.what;
  const bool oom_kill = std::any_of(evidence.ranks.begin(), evidence.ranks.end(),
                                    [](const RankEvidence& rank) { return rank.oom_kills > 0; });
  if (what == "dead" && oom_kill) {
    return "give the ranks of that node more host memory, or reduce what they need; dmesg names "
           "the "
           "killed process";
  }
  if (what == "dead") {
    return "read that rank's last lines in the launcher's log; dmesg shows OOM kills";
  }
  if (what == "straggler") {
    return "sample its stack a few times: " + stackOfFirstCulprit(verdict);
  }
  if (what == "stopped" && !verdict.culprits.empty()) {
    const Culprit& first = verdict.culprits.front();
    return "kill -CONT " + std::to_string(first.pid) +
           (evidence.nodes > 1 ? ", on " + first.host : "");
  }
  if (what == "network") {
    return "check the network between these hosts: links, switches, firewall rules";
  }
  if (what == "device_behind" || what == "waits_for_device") {
    return "see what that rank launches before this op; run it with CUDA_LAUNCH_BLOCKING=1 to stop "
           "at the kernel";
  }
  if (what == "data_loading") {
    return "check that rank's data workers and its storage";
  }
  if (verdict.pattern == "P2" || verdict.pattern == "P6") {
    return "compare the code at the places named above";
  }
  return "read all stacks of that rank: " + stackOfFirstCulprit(verdict);
}

}  // namespace reft

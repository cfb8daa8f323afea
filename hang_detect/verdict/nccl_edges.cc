#include "hang_detect/verdict/nccl_edges.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace reft {

namespace nccl_edges {

namespace {

using Kind = NcclAnswer::Kind;

bool isHop(const NcclFinding& finding) {
  return finding.p2p || finding.algo == "RING" || finding.algo == "TREE" ||
         finding.algo == "NVLS_TREE" || finding.algo == "PAT";
}

// The walk; see Note [following NCCL's waits].
class Walk {
 public:
  explicit Walk(const std::vector<NcclFinding>& findings) {
    for (const NcclFinding& finding : findings) {
      by_rank_[finding.rank] = &finding;
    }
  }

  void start(const NcclFinding& finding) {
    if (finding.proxy == NcclProxy::kStuck && !finding.edges.empty()) {
      proxies_.insert(finding.rank);
      return;
    }
    for (const NcclEdge& edge : finding.edges) {
      to_follow_.push_back({&finding, &edge});
    }
  }

  void run() {
    while (!to_follow_.empty()) {
      const auto [finding, edge] = to_follow_.back();
      to_follow_.pop_back();
      follow(*finding, *edge);
    }
  }

  NcclAnswer answer() const {
    NcclAnswer answer;
    std::set<int> candidates = doubtful_;
    candidates.insert(gpus_.begin(), gpus_.end());
    candidates.insert(proxies_.begin(), proxies_.end());
    const size_t kinds = (links_.empty() ? 0 : 1) + gpus_.size() + proxies_.size();
    if (!doubtful_.empty() || kinds > 1) {
      answer.kind = Kind::kUndecidable;
      answer.why = why_.empty() ? "several causes" : why_;
      for (const auto& [from, to] : links_) {
        candidates.insert({from, to});
      }
      answer.candidates.assign(candidates.begin(), candidates.end());
    } else if (!gpus_.empty()) {
      answer.kind = Kind::kGpu;
      answer.rank = *gpus_.begin();
    } else if (!proxies_.empty()) {
      answer.kind = Kind::kProxy;
      answer.rank = *proxies_.begin();
    } else if (!links_.empty()) {
      answer.kind = Kind::kNetwork;
      for (const auto& [from, to] : links_) {
        const bool both = links_.count({to, from}) != 0;
        if (!both || from < to) {
          answer.links.push_back({from, to, both});
        }
      }
    } else if (!gpu_waits_.empty()) {
      answer.kind = Kind::kUndecidable;  // each waits for the next, in a circle
      answer.why = "the waits form a circle";
      for (const auto& [rank, channel] : gpu_waits_) {
        candidates.insert(rank);
      }
      answer.candidates.assign(candidates.begin(), candidates.end());
    }
    return answer;
  }

 private:
  void doubt(int rank, const char* why) {
    doubtful_.insert(rank);
    if (why_.empty()) {
      why_ = why;
    }
  }

  // The finding of a rank that others wait for; nullptr if the walk ends there.
  const NcclFinding* next(int rank) {
    const auto found = by_rank_.find(rank);
    if (found == by_rank_.end()) {
      doubt(rank, "a rank without evidence");
      return nullptr;
    }
    if (found->second->proxy == NcclProxy::kStuck) {
      proxies_.insert(rank);
      return nullptr;
    }
    return found->second;
  }

  void follow(const NcclFinding& finding, const NcclEdge& edge) {
    switch (edge.cause) {
      case NcclCause::kOwnGpuFills:
      case NcclCause::kOwnGpuTakes: gpu(finding, edge.channel); return;
      case NcclCause::kDataComes: other(finding, edge, edge.peer, finding.rank); return;
      case NcclCause::kPeerPosts:
      case NcclCause::kNetworkSends: other(finding, edge, finding.rank, edge.peer); return;
      case NcclCause::kFlush:
      case NcclCause::kNetworkTakes:
      case NcclCause::kProxyBegins:
      case NcclCause::kUnknown: doubt(finding.rank, "a state that has several causes"); return;
    }
  }

  // `finding` waits in `edge` for its peer; data goes from `from` to `to`.
  void other(const NcclFinding& finding, const NcclEdge& edge, int from, int to) {
    const NcclFinding* const peer = next(edge.peer);
    if (peer == nullptr) {
      return;
    }
    const auto has = [&](const std::vector<NcclOpName>& ops) {
      return !finding.p2p && std::find(ops.begin(), ops.end(), finding.op) != ops.end();
    };
    const bool here =
        peer->in_op && peer->p2p == finding.p2p && (finding.p2p || peer->op == finding.op);
    if (!here) {
      if (has(peer->passed)) {
        link(finding, *peer, from, to);  // its part is done
      } else if (has(peer->queued) && !peer->edges.empty()) {
        if (walked_.insert(peer->rank).second) {
          start(*peer);  // it is held up in an earlier op
        }
      } else {
        doubt(peer->rank, "a rank that is not known to be in the op");
      }
      return;
    }
    if (peer->never_taken) {
      if (peer->proxy == NcclProxy::kRuns) {
        doubt(peer->rank, "a proxy thread that runs and takes nothing");
      } else {
        proxies_.insert(peer->rank);
      }
      return;
    }
    const auto match =
        std::find_if(peer->edges.begin(), peer->edges.end(), [&](const NcclEdge& theirs) {
          return theirs.peer == finding.rank && theirs.channel == edge.channel &&
                 theirs.send != edge.send;
        });
    if (match == peer->edges.end()) {
      const uint64_t done = edge.send ? peer->recvs_done : peer->sends_done;
      if (finding.algo == "RING" && (done >> edge.channel & 1) != 0) {
        link(finding, *peer, from, to);  // a ring has one peer a channel: that op has ended
      } else {
        doubt(peer->rank, "the other side of a transfer is not in its table");
      }
      return;
    }
    switch (match->cause) {
      case NcclCause::kOwnGpuFills:
      case NcclCause::kOwnGpuTakes: gpu(*peer, edge.channel); return;
      case NcclCause::kDataComes:
      case NcclCause::kPeerPosts:
      case NcclCause::kNetworkSends: link(finding, *peer, from, to); return;
      case NcclCause::kFlush:
      case NcclCause::kNetworkTakes:
      case NcclCause::kProxyBegins:
      case NcclCause::kUnknown: doubt(peer->rank, "a state that has several causes"); return;
    }
  }

  void link(const NcclFinding& one, const NcclFinding& other, int from, int to) {
    if (one.proxy == NcclProxy::kRuns && other.proxy == NcclProxy::kRuns) {
      links_.insert({from, to});
    } else {
      for (const int rank : {from, to}) {
        doubt(rank, "the network, or a proxy thread that is not known to run");
      }
    }
  }

  void gpu(const NcclFinding& finding, int channel) {
    if (!gpu_waits_.insert({finding.rank, channel}).second) {
      return;
    }
    bool waits = false;
    // Messages of a group do not depend on each other.
    for (const NcclEdge& edge : finding.edges) {
      const bool needs_data = edge.cause == NcclCause::kDataComes;
      const bool needs_room = !edge.room && (edge.cause == NcclCause::kPeerPosts ||
                                             edge.cause == NcclCause::kNetworkSends);
      if (!finding.p2p && edge.channel == channel && (needs_data || needs_room)) {
        waits = true;
        to_follow_.push_back({&finding, &edge});
      }
    }
    if (waits) {
      return;
    }
    const bool alone = finding.p2p || finding.nodes == finding.ranks;
    const bool not_begun = finding.kernels && (finding.kernels_begun >> channel & 1) == 0;
    if (finding.busy_elsewhere) {
      doubt(finding.rank, "its GPU may be in an op of another communicator");
    } else if (finding.busy_before) {
      doubt(finding.rank, "its GPU may be in an earlier op");
    } else if (alone || not_begun) {
      gpus_.insert(finding.rank);
    } else {
      doubt(finding.rank, "its GPU may wait for one of the same node");
    }
  }

  std::map<int, const NcclFinding*> by_rank_;
  std::vector<std::pair<const NcclFinding*, const NcclEdge*>> to_follow_;
  std::set<std::pair<int, int>> gpu_waits_;  // rank and channel
  std::set<int> walked_;
  std::set<std::pair<int, int>> links_;
  std::set<int> gpus_, proxies_, doubtful_;
  std::string why_;
};

}  // namespace

}  // namespace nccl_edges

NcclAnswer joinNccl(const std::vector<NcclFinding>& findings) {
  NcclAnswer answer;
  std::set<int> waiting;
  for (const NcclFinding& finding : findings) {
    if (finding.advancing) {
      answer.kind = NcclAnswer::Kind::kAdvancing;
      return answer;
    }
    if (!finding.edges.empty()) {
      waiting.insert(finding.rank);
    }
  }
  if (waiting.empty()) {
    return answer;
  }
  nccl_edges::Walk walk(findings);
  for (const NcclFinding& finding : findings) {
    const char* const why = !finding.complete ? "a table that lost events"
                            : !finding.edges.empty() && !nccl_edges::isHop(finding)
                                ? "an algorithm whose proxies work in another way"
                                : nullptr;
    if (why != nullptr) {
      answer.kind = NcclAnswer::Kind::kUndecidable;
      answer.why = why;
      answer.candidates.assign(waiting.begin(), waiting.end());
      return answer;
    }
    walk.start(finding);
  }
  walk.run();
  return walk.answer();
}

}  // namespace reft

#include "hang_detect/evidence/nccl_progress.h"

#include <algorithm>
#include <set>
#include <utility>

namespace reft {

namespace nccl_progress {

namespace {

NcclCause causeOf(const NcclProxyOp& op) {
  if (op.open.empty()) {
    return op.begun == 0 && op.progress_ns == 0 ? NcclCause::kProxyBegins : NcclCause::kUnknown;
  }
  switch (op.open.front().state) {
    case NcclStep::kNone: return NcclCause::kUnknown;
    case NcclStep::kPosted: return NcclCause::kNetworkTakes;
    case NcclStep::kSendGpuWait: return NcclCause::kOwnGpuFills;
    case NcclStep::kSendPeerWait: return NcclCause::kPeerPosts;
    case NcclStep::kSendWait: return NcclCause::kNetworkSends;
    case NcclStep::kRecvWait: return NcclCause::kDataComes;
    case NcclStep::kRecvFlushWait: return NcclCause::kFlush;
    case NcclStep::kRecvGpuWait: return NcclCause::kOwnGpuTakes;
  }
  return NcclCause::kUnknown;
}

NcclEdge edgeOf(const NcclProxyOp& op, int64_t now_ns) {
  NcclEdge edge;
  edge.peer = op.peer;
  edge.channel = op.channel;
  edge.send = op.send;
  edge.room = std::any_of(op.open.begin(), op.open.end(), [](const NcclOpenStep& step) {
    return step.state == NcclStep::kSendGpuWait;
  });
  edge.cause = causeOf(op);
  edge.done = op.done;
  edge.steps = op.steps;
  edge.quiet_ns = std::max<int64_t>(0, now_ns - op.change_ns);
  return edge;
}

bool isKnownToHaveEnded(const NcclTask& task) {
  return task.launched && task.parts != 0 && task.parts_open == 0;
}

// Launched long ago without any part, although the ops of its kind before it had some.
bool isNeverTaken(const NcclComm& comm, size_t index, int64_t now_ns, int64_t quiet_for_ns) {
  const NcclTask& task = comm.tasks[index];
  if (!task.launched || task.parts != 0 || task.p2p || now_ns - task.start_ns < quiet_for_ns) {
    return false;
  }
  bool seen = false;
  for (size_t i = 0; i < index; ++i) {
    const NcclTask& before = comm.tasks[i];
    if (!before.p2p && before.func == task.func && before.algo == task.algo) {
      seen = before.sends_begun != 0 || before.recvs_begun != 0;
    }
  }
  return seen;
}

NcclFinding findingOf(const NcclComm& comm, int64_t now_ns, int64_t quiet_for_ns) {
  NcclFinding finding;
  finding.comm = comm.hash;
  finding.name = comm.name;
  finding.rank = comm.rank;
  finding.ranks = comm.ranks;
  finding.nodes = comm.nodes;
  finding.kernels = comm.kernels;
  int64_t change_ns = comm.change_ns;
  for (const NcclProxyOp& op : comm.open) {
    change_ns = std::max(change_ns, op.change_ns);
  }
  finding.quiet_ns = std::max<int64_t>(0, now_ns - change_ns);
  finding.advancing = finding.quiet_ns < quiet_for_ns;

  std::set<uint64_t> in_question;
  for (size_t i = 0; i < comm.tasks.size(); ++i) {
    const NcclTask& task = comm.tasks[i];
    const bool never_taken = isNeverTaken(comm, i, now_ns, quiet_for_ns);
    const bool open = task.parts_open != 0 || !task.launched || never_taken;
    if (!finding.in_op && open) {
      finding.in_op = true;
      finding.p2p = task.p2p;
      finding.op = {task.func, task.seq};
      finding.algo = task.algo;
      finding.never_taken = never_taken;
      finding.kernels_begun = task.kernels_begun;
      finding.sends_begun = task.sends_begun;
      finding.sends_done = task.sends_done;
      finding.recvs_begun = task.recvs_begun;
      finding.recvs_done = task.recvs_done;
      in_question.insert(task.id);
    } else if (!finding.in_op) {
      if (!isKnownToHaveEnded(task)) {
        finding.busy_before = true;
      } else if (!task.p2p) {
        finding.passed.push_back({task.func, task.seq});
      }
    } else if (!task.p2p) {
      finding.queued.push_back({task.func, task.seq});
    } else if (finding.p2p && finding.queued.empty() && open) {
      in_question.insert(task.id);  // of the same group of messages
    }
  }
  for (const NcclProxyOp& op : comm.open) {
    if (in_question.count(op.task) != 0) {
      finding.edges.push_back(edgeOf(op, now_ns));
      finding.busy_before = finding.busy_before && op.done == 0;  // kernels run in order
    }
  }
  return finding;
}

}  // namespace

}  // namespace nccl_progress

std::vector<NcclFinding> diagnoseNccl(const NcclProgress& progress, int64_t now_ns,
                                      int64_t quiet_for_ns,
                                      const std::map<uint32_t, NcclProxy>& proxies) {
  std::vector<NcclFinding> findings;
  std::vector<bool> busy;
  for (const NcclComm& comm : progress.comms) {
    NcclFinding& finding =
        findings.emplace_back(nccl_progress::findingOf(comm, now_ns, quiet_for_ns));
    finding.complete = progress.complete;
    const auto proxy = proxies.find(comm.proxy_thread);
    if (comm.proxy_thread != 0 && proxy != proxies.end()) {
      finding.proxy = proxy->second;
    }
    busy.push_back(
        !std::all_of(comm.tasks.begin(), comm.tasks.end(), nccl_progress::isKnownToHaveEnded));
  }
  for (size_t i = 0; i < findings.size(); ++i) {
    for (size_t other = 0; other < findings.size(); ++other) {
      findings[i].busy_elsewhere = findings[i].busy_elsewhere || (other != i && busy[other]);
    }
  }
  return findings;
}

}  // namespace reft

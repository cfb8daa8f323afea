// What the agent does with the agents of the job's other nodes. They do not know each other: first
// ranks of a node carry their messages through the job's store
// (c10d_backend/store/evidence_exchange.h). Whose turn it is to look: turn.h.
#include <algorithm>
#include <fstream>

#include "agent/agent.h"
#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/evidence/process_state.h"
#include "intercept/base/log.h"

namespace reft::agent {

namespace {

constexpr int64_t kSecond = 1'000'000'000;
// Ranks that do not answer for their stacks cost a node three seconds.
constexpr int64_t kGatherNs = 6 * kSecond;
// For the rank that asks, to say that it is over.
constexpr int64_t kGatherEndNs = 2 * kSecond;
// Of all nodes together: it goes through one store and one process.
constexpr size_t kMaxGathered = 128u << 20;
constexpr size_t kMaxNodeRequests = 16;  // at a time

// "" if it is not known.
std::string bootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id.size() <= 64 ? id : "";
}

}  // namespace

// A rank that can ask other nodes, or answer them.
Connection* Agent::carrier() {
  for (auto& [number, rank] : ranks_.all()) {
    auto* peer = rank.live() && rank.hello.incarnation == ranks_.incarnation() &&
                         rank.hello.local_rank < wire::kEvidenceCarriers &&
                         !processIsStopped(rank.pid)
                     ? connectionOf(rank)
                     : nullptr;
    if (peer != nullptr) {
      return peer;
    }
  }
  return nullptr;
}

void Agent::askNodes(StackCollection& collection) {
  auto& nodes = collection.nodes;
  if (ranks_.nodes() <= 1) {
    return;
  }
  nodes.wanted = true;
  for (int node = 0; node < ranks_.nodes(); ++node) {
    if (node != options_.node) {
      nodes.silent.push_back(node);
    }
  }
  auto* peer = carrier();
  if (peer == nullptr) {
    nodes.over = true;
    nodes.problem = "they were not asked: none of the ranks that could ask them runs";
    return;
  }
  nodes.carrier = peer->id();
  nodes.asked_ns = clock_.nowNs();
  nodes.deadline_ns = nodes.asked_ns + kGatherNs + kGatherEndNs;
  nodes.problem = "the rank that asks them did not come back within " +
                  std::to_string((kGatherNs + kGatherEndNs) / kSecond) + " s";
  peer->send(
      wire::Type::kGather,
      gatherPayload(collection.id, static_cast<double>(kGatherNs) * 1e-9, NodeRequest::kEvidence));
}

void Agent::tellNodes(NodeRequest kind) {
  if (auto* peer = carrier()) {
    peer->send(wire::Type::kGather, gatherPayload(0, 0, kind));
  }
}

void Agent::gathered(const Connection& peer, Gathered gathered) {
  for (auto& collection : collections_) {
    auto& nodes = collection.nodes;
    if (!nodes.wanted || nodes.over || collection.id != gathered.id || nodes.carrier != peer.id()) {
      continue;
    }
    if (gathered.end) {
      nodes.over = true;
      nodes.problem = gathered.error;
    } else if (gathered.answer && std::erase(nodes.silent, gathered.answer->node) != 0) {
      nodes.answers.push_back({std::move(*gathered.answer), clock_.nowNs()});
    }
    return;
  }
}

void Agent::addNodes(HangEvidence& evidence, const StackCollection& collection) {
  const auto& nodes = collection.nodes;
  const auto boot = bootId();
  for (const auto& [said, at_ns] : nodes.answers) {
    const bool same_clock = !boot.empty() && said.boot == boot && said.asked_ns >= nodes.asked_ns &&
                            said.evidence.now_ns <= at_ns;
    // Their clock says what ours said somewhere between.
    const int64_t least = nodes.asked_ns - said.asked_ns;
    const int64_t most = std::max(least, at_ns - said.evidence.now_ns);
    const int64_t half = (most - least) / 2;
    addNode(evidence, said.evidence, same_clock ? 0 : least + half, same_clock ? 0 : half);
  }
  evidence.silent_nodes = nodes.silent;
  evidence.nodes_problem = nodes.problem;
}

void Agent::evidenceRequested(Connection& peer, const EvidenceRequest& request) {
  const auto now = clock_.nowNs();
  if (request.node == options_.node) {
    return;
  }
  if (request.kind != NodeRequest::kPlease) {
    turn_.heldBy(request.node, now);
  }
  if (request.kind == NodeRequest::kPlease && options_.node == 0 && !looking()) {
    if (hang_watch_.reportedStillNs(now) > 0) {
      hold_due_ns_ = now;
    } else {
      logInfo("agent", "the ranks of node ", request.node, " make no progress: collecting stacks");
      collectStacks(0, {});
    }
  }
  if (request.kind != NodeRequest::kEvidence) {
    return;
  }
  size_t open = 0;
  for (auto& collection : collections_) {
    open += collection.node_request != 0 ? 1 : 0;
    if (collection.node_request == request.id) {
      collection.askers.push_back(peer.id());  // another carrier of this node
      return;
    }
  }
  if (open < kMaxNodeRequests && collections_.size() < kMaxCollections) {
    auto* collection = collectStacks(peer.id(), {});
    collection->node_request = request.id;
    collection->asked_ns = now;
    collection->askers = {peer.id()};
  }
}

void Agent::answerNode(const StackCollection& collection, const HangEvidence& evidence) {
  const size_t limit =
      std::min(wire::kMaxEvidence, kMaxGathered / static_cast<size_t>(std::max(1, ranks_.nodes())));
  const auto payload = evidencePayload(collection.node_request, options_.node, collection.asked_ns,
                                       bootId(), evidenceJson(evidence, limit));
  for (const auto id : collection.askers) {
    if (const auto peer = peers_.find(id); peer != peers_.end()) {
      peer->second->send(wire::Type::kEvidence, payload);
    }
  }
}

void Agent::watchNodes(int64_t now) {
  if (ranks_.nodes() <= 1) {
    return;
  }
  if (hang_watch_.episode() != turn_episode_) {
    turn_episode_ = hang_watch_.episode();
    turn_.progress();
  }
  switch (turn_.tick(now)) {
    case Turn::Act::kNothing: break;
    case Turn::Act::kPlease: tellNodes(NodeRequest::kPlease); break;
    case Turn::Act::kLook:
      logInfo(
          "agent",
          "no rank made progress, and no node before this one looks after it: collecting stacks");
      if (!looking()) {
        collectStacks(0, {});
      }
      break;
  }
  // Else the other nodes would look for themselves.
  if (hang_watch_.reportedStillNs(now) > 0 && now >= hold_due_ns_) {
    hold_due_ns_ = now + turn_.holdNs();
    tellNodes(NodeRequest::kHold);
  }
}

}  // namespace reft::agent

#include "agent/hang/nodes.h"

#include <algorithm>

#include "intercept/base/clock.h"

namespace reft::agent {

namespace {

// Time that the carrier has, after kGatherNs, to report the end.
constexpr int64_t kGatherEndNs = 2 * kSecond;

}  // namespace

void OtherNodes::expect(int count, int own_node) {
  open_ = count > 1;
  deadline_ns_ = INT64_MAX;
  for (int node = 0; node < count; ++node) {
    if (node != own_node) {
      silent_.push_back(node);
    }
  }
}

void OtherNodes::asked(uint64_t carrier, int64_t now_ns) {
  if (carrier == 0) {
    open_ = false;
    problem_ = "not asked: no rank that could carry the request runs";
    return;
  }
  carrier_ = carrier;
  asked_ns_ = now_ns;
  deadline_ns_ = now_ns + kGatherNs + kGatherEndNs;
  problem_ = "the rank that carries the request did not come back within " +
             std::to_string((kGatherNs + kGatherEndNs) / kSecond) + " s";
}

void OtherNodes::gathered(uint64_t carrier, Gathered message, int64_t now_ns) {
  if (!open_ || carrier != carrier_) {
    return;
  }
  if (message.end) {
    open_ = false;
    problem_ = message.error;
  } else if (message.answer && std::erase(silent_, message.answer->node) != 0) {
    answers_.push_back({std::move(*message.answer), now_ns});
  }
}

void OtherNodes::addTo(HangEvidence& evidence, const std::string& boot) const {
  for (const auto& [answer, received_ns] : answers_) {
    const bool same_clock = !boot.empty() && answer.boot == boot && answer.asked_ns >= asked_ns_ &&
                            answer.evidence.now_ns <= received_ns;
    // The other clock's time of the request lies between our times of request and answer.
    const int64_t least = asked_ns_ - answer.asked_ns;
    const int64_t most = std::max(least, received_ns - answer.evidence.now_ns);
    const int64_t half = (most - least) / 2;
    addNode(evidence, answer.evidence, same_clock ? 0 : least + half, same_clock ? 0 : half);
  }
  evidence.silent_nodes = silent_;
  evidence.nodes_problem = problem_;
}

}  // namespace reft::agent

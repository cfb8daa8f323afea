#include "agent/hang/leader.h"

#include <algorithm>

#include "intercept/base/clock.h"

namespace reft::agent {

namespace {

// A request reaches a node within a second, unless the machine is overloaded.
constexpr int64_t kAskNs = kSecond * 3 / 2;
constexpr int64_t kLeadNs = 6 * kSecond;
constexpr int64_t kNextNodeNs = kSecond / 2;
constexpr int kMostNodesApart = 8;
// The leading node announces nothing while it waits for the slowest node.
constexpr int64_t kLeastLedNs = 10 * kSecond;

}  // namespace

bool Leader::suspect(int nodes, int64_t now_ns) {
  if (node_ == 0 || nodes <= 1) {
    return true;
  }
  if (lead_ns_ == 0 && !led(now_ns)) {
    const int64_t later = std::min(node_ - 1, kMostNodesApart) * kNextNodeNs;
    ask_ns_ = now_ns + kAskNs + later;
    lead_ns_ = now_ns + kLeadNs + later;
  }
  return false;
}

void Leader::ledBy(int node, int64_t now_ns) {
  if (node < node_) {
    led_ns_ = now_ns;
    ask_ns_ = lead_ns_ = 0;
  }
}

bool Leader::led(int64_t now_ns) const {
  // Less than suspect_ns, else this node would miss every second look.
  return led_ns_ != 0 && now_ns - led_ns_ < std::max(suspect_ns_ / 4 * 3, kLeastLedNs);
}

Leader::Act Leader::tick(int64_t now_ns) {
  if (ask_ns_ != 0 && now_ns >= ask_ns_) {
    ask_ns_ = 0;
    return Act::kAskFirst;
  }
  if (lead_ns_ != 0 && now_ns >= lead_ns_) {
    lead_ns_ = 0;
    return Act::kLead;
  }
  return Act::kNothing;
}

int64_t Leader::announceNs() const {
  return std::max(suspect_ns_ / 2, kLeastLedNs / 4);
}

}  // namespace reft::agent

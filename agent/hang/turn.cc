#include "agent/hang/turn.h"

#include <algorithm>

namespace reft::agent {

namespace {

constexpr int64_t kSecond = 1'000'000'000;
// Requests reach a node within a second, unless the machine has too much to do.
constexpr int64_t kPleaseNs = kSecond * 3 / 2;
constexpr int64_t kLookNs = 6 * kSecond;
constexpr int64_t kNextNodeNs = kSecond / 2;
constexpr int kMostNodesApart = 8;
// Who gathers says nothing while it waits for the slowest.
constexpr int64_t kLeastHeldNs = 10 * kSecond;

}  // namespace

bool Turn::suspect(int nodes, int64_t now_ns) {
  if (node_ == 0 || nodes <= 1) {
    return true;
  }
  if (look_ns_ == 0 && !held(now_ns)) {
    const int64_t later = std::min(node_ - 1, kMostNodesApart) * kNextNodeNs;
    please_ns_ = now_ns + kPleaseNs + later;
    look_ns_ = now_ns + kLookNs + later;
  }
  return false;
}

void Turn::heldBy(int node, int64_t now_ns) {
  if (node < node_) {
    held_ns_ = now_ns;
    please_ns_ = look_ns_ = 0;
  }
}

bool Turn::held(int64_t now_ns) const {
  // Less than suspect_ns, else each second look would be missed.
  return held_ns_ != 0 && now_ns - held_ns_ < std::max(suspect_ns_ / 4 * 3, kLeastHeldNs);
}

Turn::Act Turn::tick(int64_t now_ns) {
  if (please_ns_ != 0 && now_ns >= please_ns_) {
    please_ns_ = 0;
    return Act::kPlease;
  }
  if (look_ns_ != 0 && now_ns >= look_ns_) {
    look_ns_ = 0;
    return Act::kLook;
  }
  return Act::kNothing;
}

int64_t Turn::holdNs() const {
  return std::max(suspect_ns_ / 2, kLeastHeldNs / 4);
}

}  // namespace reft::agent

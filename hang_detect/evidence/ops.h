// Properties of one op of an op log, and a key for the group that it belongs to.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_map>

#include "intercept/record/op_log.h"

namespace reft {

// Begun, and not known to be done. The log seldom learns that an op on a device is done.
inline bool isOpen(const OpEntry& op) {
  return op.begin_ns != 0 && op.done_ns == 0 && !op.failed && !op.passed;
}

// Open, and the device has not come to it: its stream, which was asked to say so, has not.
inline bool isAheadOfDevice(const OpEntry& op) {
  return isOpen(op) && op.reach_asked && !op.reached;
}

// Open, and the device is in it: a stream has not passed it, or its end would have been seen.
inline bool isHeldOnDevice(const OpEntry& op) {
  return isOpen(op) && !isAheadOfDevice(op) && (op.pass_asked || (op.reached && op.end_seen));
}

// Open, and its caller is inside the call or inside wait().
inline bool isHeld(const OpEntry& op) {
  return isOpen(op) && (op.enqueued_ns == 0 || (op.wait_begin_ns != 0 && op.wait_end_ns == 0));
}

// Open, and its caller has left the call without having waited.
inline bool isUnwaited(const OpEntry& op) {
  return isOpen(op) && op.enqueued_ns != 0 && op.wait_begin_ns == 0;
}

// Open, and its caller has left wait(): an op on a device may still run then.
inline bool mayRunOnDevice(const OpEntry& op) {
  return isOpen(op) && op.wait_end_ns != 0;
}

inline bool isPointToPoint(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kRecv || kind == OpKind::kRecvAnysource;
}

inline bool isCollective(OpKind kind) {
  return kind != OpKind::kUnknown && kind != OpKind::kStep && kind != OpKind::kCoalesced &&
         !isPointToPoint(kind);
}

inline bool hasRoot(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter || kind == OpKind::kGatherSingle;
}

// What all members of a group must agree on about one collective.
struct OpContract {
  OpKind kind;
  uint64_t signature;
  int32_t root;
  bool operator<(const OpContract& other) const {
    return std::tie(kind, signature, root) < std::tie(other.kind, other.signature, other.root);
  }
  bool operator==(const OpContract& other) const {
    return kind == other.kind && signature == other.signature && root == other.root;
  }
};

inline OpContract contractOf(const OpEntry& op) {
  return {op.kind, op.signature, hasRoot(op.kind) ? op.peer : -1};
}

// What repeats of an op from step to step. Neither its size does nor, where an op has a root, that.
struct PastOp {
  OpKind kind = OpKind::kUnknown;
  uint32_t group = 0;  // index into the rank's groups
  int32_t peer = -1;   // of messages only
  uint32_t tag = 0;
  uint32_t call_site = 0;
  bool operator==(const PastOp&) const = default;
};

inline PastOp pastOf(const OpEntry& op) {
  return {op.kind, op.group, isPointToPoint(op.kind) ? op.peer : -1, op.tag, op.call_site};
}

// Gives each group of a rank a key that is the same on all its members.
//
// A name alone is no key: destroyed groups stay in a rank's table, and a later group may have the
// same name. torch numbers groups anew when the default group is made again. The default group is
// the first of each table, and all ranks make it together; in between, the ranks of a correct
// program make groups of one name in the same order.
class GroupKeys {
 public:
  // To be called for each group of the rank's table, in order.
  std::string next(const std::string& name) {
    if (defaults_made_ == 0) {
      default_name_ = name;
    }
    if (name == default_name_) {
      ++defaults_made_;
      made_.clear();
    }
    return name + '\n' + std::to_string(defaults_made_) + '\n' + std::to_string(made_[name]++);
  }

 private:
  std::string default_name_;
  size_t defaults_made_ = 0;
  std::unordered_map<std::string, size_t> made_;  // since the newest default group
};

// The table of groups was too short: several groups share its last place.
inline bool hasUnknownGroup(const OpEntry& op) {
  return op.group + 1 >= OpLogHeader::kMaxGroups;
}

}  // namespace reft

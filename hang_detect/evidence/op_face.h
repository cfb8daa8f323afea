// What all ranks of a correct program say alike about an op of their group, and which group that
// is.
//
// Threads: free functions, re-entrant. Errors: none.
#pragma once

#include <string>
#include <tuple>
#include <unordered_map>

#include "intercept/record/op_log.h"

namespace reft {

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

struct OpFace {
  OpKind kind;
  uint64_t signature;
  int32_t root;
  bool operator<(const OpFace& other) const {
    return std::tie(kind, signature, root) < std::tie(other.kind, other.signature, other.root);
  }
  bool operator==(const OpFace& other) const {
    return kind == other.kind && signature == other.signature && root == other.root;
  }
};

inline OpFace faceOf(const OpEntry& op) {
  return {op.kind, op.signature, hasRoot(op.kind) ? op.peer : -1};
}

// Names one group among all that a rank has made: destroyed ones stay in its table, and the next
// may be called the same. torch counts groups anew when the default one is made again, which is the
// first of each table, and which all ranks make together; in between, ranks of a correct program
// make groups of one name in the same order.
class GroupKeys {
 public:
  std::string of(const std::string& name) {
    if (lives_ == 0) {
      first_ = name;
    }
    if (name == first_) {
      ++lives_;
      made_.clear();
    }
    return name + '\n' + std::to_string(lives_) + '\n' + std::to_string(made_[name]++);
  }

 private:
  std::string first_;
  size_t lives_ = 0;
  std::unordered_map<std::string, size_t> made_;
};

// Whether the table of groups was too short for the group of an op: more than one share its last
// place.
inline bool isOfAnUnknownGroup(const OpEntry& op) {
  return op.group + 1 >= OpLogHeader::kMaxGroups;
}

}  // namespace reft

// The ranks of a pipeline × data × tensor parallel job as a simulation needs them: who is in which
// group, what a step does, and which ops all who belong to them have begun.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/unit/hang_detect/evidence/evidence_maker.h"

namespace reft::testing_evidence {

// Indices into a rank's groups. Groups that come later have the numbers from kGroups on, and all
// ranks in them.
enum : uint32_t { kWorld, kTensor, kData, kStage, kGroups };

struct Planned {
  OpKind kind = OpKind::kUnknown;
  uint32_t group = kWorld;
  int32_t peer = -1;  // in kStage
  uint64_t signature = 7;
};

struct Layout {
  int tensor = 1, data = 1, stages = 1;

  int world() const { return tensor * data * stages; }
  int tp(int rank) const { return rank % tensor; }
  int dp(int rank) const { return rank / tensor % data; }
  int pp(int rank) const { return rank / tensor / data; }
  int rankAt(int tp, int dp, int pp) const { return (pp * data + dp) * tensor + tp; }

  // Which of the groups of this index the rank is in, and how many ranks are.
  int which(int rank, uint32_t group) const {
    switch (group) {
      case kTensor: return rank / tensor;
      case kData: return pp(rank) * tensor + tp(rank);
      case kStage: return dp(rank) * tensor + tp(rank);
      default: return 0;
    }
  }
  int sizeOf(uint32_t group) const {
    return group == kTensor ? tensor : group == kData ? data : group == kStage ? stages : world();
  }

  // By index.
  std::array<OpGroup, kGroups> groupsOf(int rank) const {
    return {group("default", rank, world()),
            group("tp" + std::to_string(which(rank, kTensor)), tp(rank), tensor),
            group("dp" + std::to_string(which(rank, kData)), dp(rank), data),
            group("pp" + std::to_string(which(rank, kStage)), pp(rank), stages)};
  }

  // One step: micro-batches down and up the pipeline, gradients over the data-parallel group, a
  // norm over the world.
  std::vector<Planned> step(int rank) const {
    constexpr int kMicroBatches = 3;
    std::vector<Planned> plan;
    for (int phase = 0; phase < 2; ++phase) {
      const int from = phase == 0 ? pp(rank) - 1 : pp(rank) + 1;
      const int to = phase == 0 ? pp(rank) + 1 : pp(rank) - 1;
      for (int batch = 0; batch < kMicroBatches; ++batch) {
        if (from >= 0 && from < stages) {
          plan.push_back({OpKind::kRecv, kStage, from});
        }
        if (tensor > 1) {
          plan.push_back({OpKind::kAllreduce, kTensor});
        }
        if (to >= 0 && to < stages) {
          plan.push_back({OpKind::kSend, kStage, to});
        }
      }
    }
    if (data > 1) {
      plan.push_back({OpKind::kReduceScatterBase, kData});
    }
    plan.push_back({OpKind::kAllreduce, kWorld});
    return plan;
  }
};

// Brings together the ranks that take part in an op.
class Rendezvous {
 public:
  explicit Rendezvous(Layout layout) : layout_(layout) {}

  // `rank` begins the op, its `seq`th in that group; of messages: the `seq`th to or from that peer.
  // Returns all who take part if it is the last of them and they agree about the op: then it can be
  // done.
  std::vector<int> begin(int rank, const Planned& op, uint32_t seq) {
    const bool message = op.group == kStage;
    int which = layout_.which(rank, op.group);
    if (message) {
      const int peer = layout_.rankAt(layout_.tp(rank), layout_.dp(rank), op.peer);
      which =
          op.kind == OpKind::kSend ? rank * layout_.world() + peer : peer * layout_.world() + rank;
    }
    const auto at = open_.try_emplace({op.group, which, seq}, Meeting{op, {}, true}).first;
    Meeting& meeting = at->second;
    meeting.agree =
        meeting.agree &&
        (message || (meeting.first.kind == op.kind && meeting.first.signature == op.signature));
    meeting.ranks.push_back(rank);
    const auto size = static_cast<size_t>(message ? 2 : layout_.sizeOf(op.group));
    if (meeting.ranks.size() < size || !meeting.agree) {
      return {};
    }
    std::vector<int> all = std::move(meeting.ranks);
    open_.erase(at);
    return all;
  }

 private:
  struct Meeting {
    Planned first;
    std::vector<int> ranks;
    bool agree;
  };
  Layout layout_;
  std::map<std::tuple<uint32_t, int, uint32_t>, Meeting> open_;  // by group, which one, op number
};

}  // namespace reft::testing_evidence

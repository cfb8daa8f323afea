// Evidence of the job's other nodes for one look at a hang. Agents do not know each other: a rank
// of each node carries their messages through the job's store
// (c10d_backend/store/evidence_exchange.h). Which node leads: leader.h.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agent/peers/messages.h"
#include "hang_detect/evidence/evidence.h"

namespace reft::agent {

// Time that the other nodes have to answer: ranks that do not answer cost a node three seconds.
constexpr int64_t kGatherNs = 6'000'000'000;

class OtherNodes {
 public:
  // The other nodes of a job of `count` nodes are to be asked. With one node nothing is open.
  void expect(int count, int own_node);
  // A rank on `carrier` asks them now; 0: no rank that could ask runs.
  void asked(uint64_t carrier, int64_t now_ns);
  // A message from `carrier`; messages of other connections are ignored.
  void gathered(uint64_t carrier, Gathered message, int64_t now_ns);
  // Answers are still to come.
  bool open(int64_t now_ns) const { return open_ && now_ns < deadline_ns_; }

  // Adds the answers to the evidence of this node. `boot`: boot id of this machine, "" if unknown.
  void addTo(HangEvidence& evidence, const std::string& boot) const;

 private:
  struct Answer {
    NodeAnswer answer;
    int64_t received_ns = 0;
  };
  bool open_ = false;
  uint64_t carrier_ = 0;
  int64_t asked_ns_ = 0;
  int64_t deadline_ns_ = 0;
  std::vector<Answer> answers_;
  std::vector<int> silent_;  // nodes without an answer
  std::string problem_;      // reason for silent nodes
};

}  // namespace reft::agent

// One look at the ranks of a node: what it waits for, and what has come.
//
// A look samples its ranks' processes, asks them for their stacks, reads the stacks of those that
// cannot answer from outside, and ends with an examination of every rank. Investigation drives it.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agent/hang/nodes.h"
#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/hardware_note.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/stacks/remote_stack.h"

namespace reft::agent {

// Facts that the agent has without asking anybody.
struct RankFacts {
  int rank = -1;
  int pid = 0;              // 0: only its vault was found
  uint64_t connection = 0;  // 0: none
  uint64_t incarnation = 0;
  bool alive = false;
  bool said_bye = false;
  bool hidden = false;  // its process cannot be looked at: of another PID namespace, or not certain

  bool live() const { return alive && !said_bye; }
};
struct NodeFacts {
  uint64_t incarnation = 0;  // of the newest ranks
  int world = 0;
  int nodes = 1;
  bool restarts = false;                 // a launcher lives that would start the ranks again
  std::map<int, RankFacts> ranks;        // of this node
  std::vector<HardwareNote> hardware{};  // on this node
  bool sampling = false;                 // its hardware counters are being read
  bool gpus = false;                     // it has GPUs

  bool anyLive() const;
};

// What a process had used at some time.
struct Use {
  int64_t at_ns = 0;
  ProcessCounters counters;
};

// A rank's process at the begin of a look.
struct ProcessSample {
  int rank = -1;
  ProcessCounters counters;
  bool stopped = false;
  std::vector<int> children;
};

class Look {
 public:
  enum class Kind {
    kSuspected,  // the ranks look hung, or one has died
    kConfirm,    // AbortPolicy's second look
    kEarly,      // HangWatch::early()
    kCrash,      // a rank has just ended: reported only if the ranks disagree about an op
    kTool,       // a tool asked
    kNode,       // another node asked
  };

  Look(Kind kind, uint64_t id, const NodeFacts& facts, const std::set<int>& only, int64_t now_ns,
       int64_t wait_ns);

  Kind kind() const { return kind_; }
  uint64_t id() const { return id_; }
  uint64_t incarnation() const { return incarnation_; }
  // Of this agent, not of a tool or another node.
  bool own() const { return kind_ != Kind::kTool && kind_ != Kind::kNode; }
  // It reads the processes that ranks started, and the ranks that are overdue.
  bool thorough() const { return kind_ != Kind::kCrash && kind_ != Kind::kEarly; }
  bool withOtherNodes() const { return kind_ == Kind::kSuspected || kind_ == Kind::kConfirm; }
  std::vector<int> ranks() const;
  bool hasRank(int rank) const { return ranks_.count(rank) != 0; }
  bool answered(int rank) const;

  // A sample taken before the ranks are asked, because an answer costs time, too.
  void sampled(const ProcessSample& sample, int64_t now_ns);
  void replied(int rank, std::string payload);
  // Returns those of `pids` that it does not read yet.
  std::vector<int> toRead(const std::vector<int>& pids);
  void read(int pid, RemoteStacks stacks);

  // Ranks that still owe an answer and are alive; each is returned once a look.
  std::vector<int> overdue(const NodeFacts& facts, int64_t now_ns);
  bool ready(const NodeFacts& facts, int64_t now_ns) const;
  // A crash look that found nothing: the other ranks may be about to begin the op.
  bool againAfter(int64_t wait_ns, int64_t now_ns);
  // There is nothing to wait for any more.
  void hurry(int64_t now_ns) { deadline_ns_ = std::min(deadline_ns_, now_ns); }

  // Adds what has come to what the examination of a rank found.
  void addTo(RankEvidence& entry, const RankFacts& facts, const std::map<int, Use>& before) const;

  OtherNodes nodes;
  // kTool: the connection of the tool. kNode: the carriers that wait for the answer.
  std::vector<uint64_t> requesters;
  uint64_t request = 0;  // kNode: id of the request
  int64_t asked_ns = 0;  // kNode: time of the request

 private:
  struct Rank {
    Use use;
    std::optional<std::string> reply;
  };
  bool waitsFor(int rank, const NodeFacts& facts) const;
  std::optional<RemoteStacks> outside(int pid) const;

  Kind kind_;
  uint64_t id_;
  uint64_t incarnation_;
  int64_t deadline_ns_;
  std::map<int, Rank> ranks_;
  std::map<int, std::optional<RemoteStacks>> outside_;  // by pid; empty until it is read
  bool read_overdue_ = false;                           // overdue() has returned ranks
  bool repeated_ = false;                               // againAfter() was true
};

// Fills the shares of processors and io_bytes from what was used between two times, as far as that
// is known.
void addUse(RankEvidence& rank, const Use& then, const Use& now);

}  // namespace reft::agent

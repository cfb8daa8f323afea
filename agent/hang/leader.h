// Which node leads the investigation of a hang: one agent gathers the evidence of all nodes and
// writes the verdict.
//
// The first node leads: it investigates when its ranks look hung, or when another node asks it to.
// The agent of another node waits for a request for its evidence. If none comes, it asks the first
// node to investigate, because the culprits may be ranks of this node, and then the first node's
// ranks do not look hung. If that has no effect either, it leads itself, one node after the other.
// While a lower node leads, this one does nothing.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>

namespace reft::agent {

class Leader {
 public:
  enum class Act {
    kNothing,
    kAskFirst,  // ask the first node to investigate
    kLead,      // investigate
  };

  Leader(int node, int64_t suspect_ns) : node_(node), suspect_ns_(suspect_ns) {}

  void setNode(int node) { node_ = node; }
  // A verdict is due here, in a job of so many nodes. True: this node leads at once.
  bool suspect(int nodes, int64_t now_ns);
  // `node` has asked for evidence, or announced that it leads.
  void ledBy(int node, int64_t now_ns);
  // The ranks of this node make progress.
  void progress() { ask_ns_ = lead_ns_ = 0; }
  // Call at each tick.
  Act tick(int64_t now_ns);

  // Time between two announcements of the leading node.
  int64_t announceNs() const;

 private:
  bool led(int64_t now_ns) const;

  int node_;
  int64_t suspect_ns_;
  int64_t led_ns_ = 0;   // last sign of a leading node; 0: never
  int64_t ask_ns_ = 0;   // time of kAskFirst; 0: not waiting
  int64_t lead_ns_ = 0;  // time of kLead; 0: not waiting
};

}  // namespace reft::agent

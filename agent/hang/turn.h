// Whose turn it is to look at a hang of a job over several nodes: one agent gathers the evidence of
// all and writes the verdict.
//
// That is the first node's, which looks when it finds its ranks hung, or is told to. The agent of
// another node waits to be asked for its evidence, then asks the first node to look (its ranks may
// be those that are waited for, and then they do not look hung from there), and only then looks
// itself, one node after the other. While an agent of a lower node asks, or says that it has the
// matter in hand, there is nothing to do.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>

namespace reft::agent {

class Turn {
 public:
  enum class Act {
    kNothing,
    kPlease,  // tell the first node to look
    kLook,
  };

  Turn(int node, int64_t suspect_ns) : node_(node), suspect_ns_(suspect_ns) {}

  // A verdict is due here, in a job of so many nodes. True: this agent looks, now.
  bool suspect(int nodes, int64_t now_ns);
  // `node` has asked for evidence, or said that it has the matter in hand.
  void heldBy(int node, int64_t now_ns);
  // The ranks of this node go on.
  void progress() { please_ns_ = look_ns_ = 0; }
  // At each tick.
  Act tick(int64_t now_ns);

  // How often whoever has written a verdict says that it has the matter in hand.
  int64_t holdNs() const;

 private:
  bool held(int64_t now_ns) const;

  int node_;
  int64_t suspect_ns_;
  int64_t held_ns_ = 0;    // 0: never
  int64_t please_ns_ = 0;  // when to; 0: not waiting
  int64_t look_ns_ = 0;
};

}  // namespace reft::agent

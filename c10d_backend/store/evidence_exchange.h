// Carries evidence of a hang between the agents of a job's nodes, which do not know each other,
// through the job's store.
//
// An agent that wants to know about the other nodes tells a rank of its node (kGather). That rank
// counts `evidence/<incarnation>/count` up to K and writes `request/K`. The carriers of all nodes
// (wire::kEvidenceCarriers ranks of each, so that another steps in where one is stopped) look at
// the counter now and then, pass the request to their agents (kEvidenceRequest) and put what those
// answer (kEvidence) under `answer/K/<node>`. The rank that asked hands over each answer as it
// comes, and at the end says which nodes are silent (kGathered). Payloads: agent/peers/messages.h.
//
// Answers are deleted when they are read; requests a minute later, as somebody may be about to read
// them.
//
// Threads: receive() from any, it never blocks. One thread, `reft-evidence`, talks to the store,
// over a connection of its own. The
//          destructor waits for it, but not for long: a store whose process is stopped answers
//          nobody, and the thread is left behind then. In a forked child nothing happens.
// Errors:  none leave the thread. Without the store other nodes are silent, and the agent is told
// why.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <sys/types.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "intercept/link/wire.h"

namespace reft {

class EvidenceExchange {
 public:
  using Send = std::function<void(
      wire::Type, std::string_view)>;  // to the agent of this node; from `reft-evidence`

  struct Place {
    int node = 0;
    int nodes = 1;
    uint64_t incarnation = 0;
  };
  struct Pace {
    std::chrono::milliseconds requests{500};  // looks for those of other nodes
    std::chrono::milliseconds answers{50};    // looks for answers, while some are wanted
    std::chrono::milliseconds kept{60'000};   // a request stays so long
  };
  // Not so often that all nodes together would bother the store.
  static Pace paceOf(int nodes);

  // `store`: keys that no other attempt of the job sees.
  EvidenceExchange(const c10::intrusive_ptr<c10d::Store>& store, Place place, Send send, Pace pace);
  ~EvidenceExchange();
  EvidenceExchange(const EvidenceExchange&) = delete;
  EvidenceExchange& operator=(const EvidenceExchange&) = delete;

  // A message of the agent.
  void receive(wire::Type type, std::string payload) const { receiver()(type, std::move(payload)); }
  // The same, for a handler that may outlive this.
  std::function<void(wire::Type, std::string)> receiver() const;

 private:
  class Worker;
  const pid_t owner_;
  std::shared_ptr<Worker> worker_;
};

}  // namespace reft

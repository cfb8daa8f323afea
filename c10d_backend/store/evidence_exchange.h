// Carries evidence of a hang between the agents of a job's nodes, which do not know each other,
// through the job's store.
//
// An agent that needs evidence of the other nodes sends kGather to a rank of its node. That rank
// counts `evidence/<incarnation>/count` up to K and writes `request/K`. The carriers of all nodes
// (wire::kEvidenceCarriers ranks of each, in case one is stopped) poll the counter, pass the
// request to their agents (kEvidenceRequest) and write the answers (kEvidence) to
// `answer/K/<node>`. The requesting rank passes on each answer as it arrives, and at the end lists
// the silent nodes (kGathered). Payloads: agent/peers/messages.h.
//
// Requests and answers are sealed by their nodes (intercept/link/value_seal.h), and what is not is
// ignored. The counter is not: who reaches the store can make nodes miss requests, and is then
// taken for silent nodes.
//
// An answer is deleted when it is read; a request a minute later, because a node may still read it.
//
// Threads: receive() from any; it never blocks. One thread, `reft-evidence`, uses the store over a
//          connection of its own. The destructor waits for it a short time: a store whose process
//          is stopped never answers, and the thread is then abandoned. In a forked child nothing
//          happens.
// Errors:  none leave the thread. Without the store other nodes are silent, and the agent receives
// the
//          reason.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <sys/types.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "intercept/link/value_seal.h"
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
    std::chrono::milliseconds requests{500};  // between two polls for other nodes' requests
    std::chrono::milliseconds answers{50};  // between two polls for answers, while some are missing
    std::chrono::milliseconds kept{60'000};  // lifetime of a request
  };
  // Slower with more nodes, to bound the load of the store.
  static Pace paceOf(int nodes);

  // `store`: keys that no other attempt of the job sees.
  EvidenceExchange(const c10::intrusive_ptr<c10d::Store>& store,
                   std::shared_ptr<const ValueSeal> seal, Place place, Send send, Pace pace);
  ~EvidenceExchange();
  EvidenceExchange(const EvidenceExchange&) = delete;
  EvidenceExchange& operator=(const EvidenceExchange&) = delete;

  // A message of the agent.
  void receive(wire::Type type, std::string payload) const { receiver()(type, std::move(payload)); }
  // The same, for a handler that may outlive this object.
  std::function<void(wire::Type, std::string)> receiver() const;

 private:
  class Worker;
  const pid_t owner_;
  std::shared_ptr<Worker> worker_;
};

}  // namespace reft

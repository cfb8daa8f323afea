// Agents of one job keep copies of each other's vaults: this agent, as a keeper, asks those of
// other nodes for the sealed slots of their ranks; as an owner, it offers the slots of its own
// ranks to keepers that ask. What they say is in frames.h. A keeper asks all the time, or only once
// (fetch()), when a node has no rank any more and its agent still has the vaults.
//
// The mesh has a thread of its own, `reft-mesh`, so that neither the network nor the first touch of
// memory delays a vote. It serves strangers nothing: who does not show within 5 s that it has the
// job's key is dropped, and at most 32 wait for that at a time. With TLS, all that crosses the
// network is encrypted (tls.h); an agent of a job takes no connection that differs from its own.
//
// Threads: the agent's loop calls every method. `wake` is written to when events() has something.
// Errors:  open() throws SystemError or Unavailable. Later, what fails between agents is logged,
//          told by events() and status(), and tried again: nothing leaves the thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/mesh/frames.h"
#include "agent/mesh/handshake.h"
#include "intercept/base/clock.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class Mesh {
 public:
  // A node of whose ranks this one keeps copies.
  struct Source {
    std::string address;  // numeric
    uint16_t port = 0;
    std::vector<int> ranks;
  };
  struct Plan {
    uint64_t incarnation = 0;
    int world = 0;
    std::vector<Source> sources;
    uint64_t room = 0;       // bytes that all copies together may take
    uint64_t rate = 0;       // bytes per second of each connection that sends; 0: no limit
    bool on_demand = false;  // nothing is copied before fetch()
  };
  struct Fetched {
    uint64_t number = 0;     // of the fetch
    std::vector<int> ranks;  // of which there is a copy now, ascending
    // Why a source did not answer or a copy was refused; "": neither. A source may not have them.
    std::string problem;
  };
  // What became of a slot of a rank of this node.
  struct Event {
    int rank = 0;
    CommitKey key;
    bool held = false;  // its copy is whole on another node
  };
  struct Copy {
    int rank = 0;
    int world = 0;
    std::shared_ptr<const UniqueFd> vault;
  };
  struct Status {
    int port = 0;              // 0: not open
    bool tls = false;          // connections are encrypted
    int keepers = 0;           // agents that take slots of this one
    int sources = 0;           // agents of which this one is to keep copies
    int connected = 0;         // of those
    uint64_t sent_bytes = 0;   // of slots
    uint64_t taken_bytes = 0;  // of slots
    uint64_t refused = 0;      // connections that ended before they showed the key
    std::string problem;       // why a source is not reached; "": none is missing
  };

  // `budget`: bytes that a connection moves, each way, before others have their turn.
  Mesh(std::string job, int wake, const Clock& clock = SteadyClock::instance(),
       size_t budget = 8u << 20);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Listens on an address of this host, and at `wanted` if that is not 0 and free. Returns the
  // port. Once open, another key, address or `tls` replaces the first; connections under another
  // key, or with and without TLS, end.
  uint16_t open(const MeshKey& key, const std::string& address, uint16_t wanted, bool tls = false);
  bool isOpen() const { return worker_ != nullptr; }

  void keep(Plan plan);
  // Copies what the sources of a plan `on_demand` have of these ranks of a job of `world` ranks,
  // as far as there are sources and `room`. Each ends within seconds if it does not answer.
  // Returns its number. fetched() has the outcome; a fetch that is under way ends with what it has.
  uint64_t fetch(int world, std::vector<int> ranks, uint64_t room);
  // Those that have ended since the last call.
  std::vector<Fetched> fetched();
  // The vault of a rank of this node; the mesh keeps a duplicate.
  void vault(int rank, int fd);
  // It has sealed a slot.
  void sealed(int rank, const CommitKey& key);
  void committed(const CommitKey& key);
  // No copy of the step is needed.
  void aborted(const CommitKey& key);

  // Since the last call.
  std::vector<Event> events();
  // Every copy that this node has; each is a vault, which the mesh may be writing to.
  std::vector<Copy> copies() const;
  // The copy of one rank of a job of `world` ranks; nullptr if this node keeps none.
  std::shared_ptr<const UniqueFd> copyOf(int rank, int world) const;
  Status status() const;

 private:
  class Worker;
  const std::string job_;
  const int wake_;
  const Clock& clock_;
  const size_t budget_;
  uint64_t fetches_ = 0;
  std::unique_ptr<Worker> worker_;
};

}  // namespace reft::agent

// What keeps a collective from ending that all ranks have entered: the findings of all ranks of a
// communicator, joined.
//
// Note [following NCCL's waits]
// A GPU waits for data of a receive, or for room in a send. A receive waits for the sender's GPU if
// the sender's op says so, else for the network between them; likewise a send for the receiver.
// The walk starts at every wait and ends in sinks: an edge of the network, a GPU that waits for
// nothing, a proxy thread that does not run. Both ends of an edge are compared: the network is
// blamed only if both proxy threads are known to run and neither end waits for its GPU.
//
// A wrong name is worse than none, so these are undecidable, with candidates: ranks without a
// finding, a table that lost events, several sinks of different kinds; a GPU that shares its node
// with other ranks of the communicator (they exchange data that no proxy sees) unless its kernel is
// known not to have begun; a GPU that may still be in an op of another communicator; algorithms
// whose proxies work in another way (CollNet, NVLS).
//
// Threads: a free function, re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hang_detect/evidence/nccl_progress.h"

namespace reft {

struct NcclAnswer {
  enum class Kind : uint8_t {
    kNothing,      // no rank waits inside an op of NCCL, as far as is known
    kAdvancing,    // some counter moved: no hang
    kNetwork,      // the network of `links`; no rank
    kGpu,          // the GPU of `rank`
    kProxy,        // the proxy thread of `rank`
    kUndecidable,  // one of `candidates`, or none of them
  };
  // From whom to whom data does not arrive. Ranks in the communicator.
  struct Link {
    int from = -1, to = -1;
    bool both = false;  // nor in the other direction
    bool operator==(const Link&) const = default;
  };
  Kind kind = Kind::kNothing;
  int rank = -1;
  std::vector<Link> links;      // sorted; with `both`, from < to
  std::vector<int> candidates;  // sorted
  std::string why;              // continues "undecidable: "
};

// `findings`: of one communicator (equal NcclFinding::comm), at most one a rank.
NcclAnswer joinNccl(const std::vector<NcclFinding>& findings);

}  // namespace reft

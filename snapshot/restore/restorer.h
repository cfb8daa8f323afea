// Carries out a restore plan on one rank: writes the snapshot's bytes into its live regions.
//
// Parts that lie on the rank's node are copied from the vaults there (slot_source.h). The others
// come through the PeerTransport, several in flight; their readers check them before they send.
// Shards that exist as parities alone are decoded from those and from the shards of the others
// (decoding.h), when all of these are written.
//
// Threads: one at a time. Errors: Unavailable when a vault or the small state is not on this node;
// Corruption and the transport's errors as they come. After an error in restore() the live regions
// are partly written: the rank must end.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "intercept/base/unique_fd.h"
#include "snapshot/peer_transport.h"
#include "snapshot/restore/live_writer.h"
#include "snapshot/restore/plan.h"
#include "snapshot/restore/slot_source.h"

namespace reft {

class Restorer {
 public:
  // Gives a descriptor of the vault of a rank, or of this node's copy of it.
  using OpenVault = std::function<UniqueFd(int rank, bool copy)>;
  using Upload = reft::Upload;

  // `message_bytes`: how long messages are at most, the same on all ranks. 16 of them are what
  // restore() takes of host memory.
  Restorer(RestorePlan plan, int rank, OpenVault open, uint64_t message_bytes = uint64_t{16} << 20);

  // Where the bytes came from that restore() has written or sent: from vaults that this rank read,
  // and from other nodes.
  struct Sources {
    uint64_t memory_bytes = 0, storage_bytes = 0, received_bytes = 0;
  };

  const RestorePlan& plan() const { return plan_; }
  const Sources& sources() const { return sources_; }
  // Whether the owner's vault lies on this node; if not, putTable() must come before table().
  bool hasOwnersVault() const { return plan_.isNear(owner_, rank_); }
  void putTable(SnapshotTable table) { sent_table_ = std::move(table); }
  const SnapshotTable& table();   // of the owner's slot
  const SnapshotTable& wanted();  // what the live regions are to be: tableOf() it
  std::string objects();          // the owner's small state

  // If another number of ranks saved the step: split tensors, and tensors that some of its ranks
  // shared and others had not.
  std::vector<std::string> splits();
  std::vector<std::string> parted();
  // Rank r has part r % `parts` of the rows of split tensors; by default, the ranks are as many as
  // the parts. All ranks say the same. Throws InvalidArgument unless there are as many of each
  // part.
  void dealRows(int parts);
  // Types and shapes of what the owner had of split tensors of which this rank has other rows.
  std::vector<std::pair<std::string, std::vector<int64_t>>> otherParts();

  // The slot of a vault on this node.
  SlotSource& slot(int vault);

  // How the live regions differ from the saved ones: the first difference, in words; "" if they do
  // not.
  std::string difference(const std::vector<LiveRegion>& live);
  // Writes all of `live`, which difference() has accepted on every rank. Returns the bytes written.
  // `transport` is used where parts cross nodes, and may then not be nullptr.
  uint64_t restore(const std::vector<LiveRegion>& live, PeerTransport* transport,
                   const Upload& upload);

 private:
  RestorePlan plan_;
  int rank_;
  int owner_;
  OpenVault open_;
  uint64_t message_bytes_;
  std::map<int, std::unique_ptr<SlotSource>> slots_;
  std::optional<SnapshotTable> sent_table_, wanted_;
  Sources sources_;
};

}  // namespace reft

// Decides what a restarted job resumes from, and which bytes each rank takes from where.
//
// Pure: the same inventories give the same plan on every rank, so the ranks need no vote.
// planRestore() takes the newest step for which all of these hold:
//   - every rank's private part, and every shard of every sharding group, can be had from vaults
//     that sealed the same (step, incarnation); a group's protection says how;
//   - the members of a group agree on who shares it and on what it holds;
//   - the digests that the members of a group recorded are equal (they differ when replicas
//     diverged: silent data corruption);
//   - no message was under way between the ranks' program points (intercept/record/cut.h; with a
//     vault lost, this is not known).
// Of these, a step that has the small state of every rank comes before a newer one for which that
// of a replica has to stand in (RestorePlan::replaced): the older one resumes bit for bit.
//
// Jobs of several numbers of ranks may have left vaults. The steps of the one that ran last come
// first, whatever their numbers: a job that began anew with more or fewer ranks has left the others
// behind, and one that went on has later steps.
//
// A step that another number of ranks saved can be resumed, too, if all of them had the same, or
// rows of the same tensors (snapshot/state/split.h): then each rank takes what a rank of then saved
// (`donor`), and of a split tensor the rows that are its own now. The ranks may also have had a
// model in n parts, each rank r that of r % n: then every nth rank goes on with the same part, if
// the number of ranks is a multiple of n. The caller compares which parts these are; what else
// depends on the number of ranks, as the share of the data, is left to it, too.
//
// movesOf() and transfersOf() expand the plan for one rank. All of them take time in the number of
// vaults and of the rank's parts, so a large job's restart is not their square.
//
// Threads: re-entrant. Errors: none; a step that cannot be resumed is rejected with the reason.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "snapshot/protect/protection.h"
#include "snapshot/restore/inventory.h"
#include "snapshot/state/table.h"

namespace reft {

// How many ranks a job has, and on which node each lives. Nodes are numbered by their lowest ranks
// and may have different numbers of ranks.
struct JobShape {
  int world = 0;
  std::vector<int> node_of;   // by rank
  std::vector<int> first_of;  // by node: its lowest rank

  JobShape() = default;
  // Throws InvalidArgument if a number is negative or not below the number of ranks.
  explicit JobShape(std::vector<int> nodes);
  JobShape(int ranks, int local_world);  // blocks of `local_world` ranks
  int nodeOf(int rank) const { return node_of[static_cast<size_t>(rank)]; }
  int firstOf(int node) const;  // the lowest rank of a node; -1: the job has no such node
};

// Where the vault of a rank lies, and which of its slots holds the step.
struct VaultPlace {
  int node = -1;  // -1: lost
  uint32_t slot = 0;
  bool is_copy = false;  // that the node keeps for another one
};

// Parts of what no group has: all of it, or what is no part of a split tensor.
inline constexpr uint32_t kPrivate = 0, kUnsplit = 1;

struct GroupPlan {
  std::vector<int> ranks;                    // members, ascending
  std::vector<std::vector<Recipe>> recipes;  // per shard; none: it has no bytes
  uint32_t first_tag = 0;                    // of its messages to one receiver
  uint32_t most_parts = 1;                   // of a recipe
  uint64_t digest = 0;                       // that its members recorded; 0: none did

  // Of the message with a part of a shard: unique among all groups of the plan, 0 excepted.
  uint32_t tagOf(uint32_t shard, size_t part) const {
    return first_tag + shard * most_parts + static_cast<uint32_t>(part);
  }
};

struct RestorePlan {
  int64_t step = -1;
  uint64_t incarnation = 0;
  JobShape shape;                  // of the job that resumes
  std::vector<VaultPlace> vaults;  // by rank of the job that saved the step
  // Per lost rank: the lowest member of the same groups; its small state stands in. Groups come
  // back bit for bit; random state, buffers and loop position are the donor's. If another number of
  // ranks saved the step, all ranks have one: that of their number, which starts again from 0 where
  // there were fewer, or its donor.
  std::map<int, int> donor;
  // The ranks of the job that saved the step whose vault is lost, as far as ranks of now follow
  // them: the small state of a replica stands in. Ascending.
  std::vector<int> replaced;
  std::map<std::string, GroupPlan> groups;  // by id
  // Another number of ranks saved split tensors: the tag of the message with rows from the vault of
  // rank 0, followed by those of the other ranks. 0: there are no such messages.
  uint32_t rows_tag = 0;
  // Into how many parts the ranks of now deal the rows of split tensors: rank r has part r % of
  // them. 0: into as many as there are ranks.
  int row_parts = 0;

  // The rank whose small state, private regions and groups `rank` takes: itself, or its donor.
  int ownerFor(int rank) const;
  int savedBy() const { return static_cast<int>(vaults.size()); }
  bool isResized() const { return savedBy() != shape.world; }
  RowRange rowsNow(const SplitTensor& split, int rank) const;
  // The part of a rank's own regions that its successor takes (rangesOf()).
  uint32_t privatePart() const { return rows_tag > 0 ? kUnsplit : kPrivate; }
  bool isNear(int vault, int rank) const;  // the vault lies on the node of `rank`
  bool takesOwn(int rank) const;           // the rank goes on with the vault that it wrote
  // The rank that reads a vault for ranks of other nodes: its own rank, or the first rank of the
  // node that has it.
  int readerOf(int vault) const;
};

struct RestoreDecision {
  std::optional<RestorePlan> plan;
  std::vector<std::string> rejected;  // newer steps that were passed over, each with the reason
};

// Takes steps below `below` alone.
RestoreDecision planRestore(const std::vector<VaultSummary>& vaults, const JobShape& shape,
                            int64_t below = INT64_MAX);

// The vault that a part is read from.
struct MoveSource {
  enum class Kind : uint8_t { kOwnVault, kLocalVault, kPeer };
  Kind kind = Kind::kOwnVault;
  int vault = 0;   // rank whose vault it is
  int reader = 0;  // rank that reads it: another one for kPeer, which sends the part
  uint32_t slot = 0;
  uint32_t shard = 0;  // the part as that vault stores it
  uint32_t tag = 0;    // kPeer: of the message
};

// One shard of a group, all private regions, or rows of split tensors, of one rank.
struct Move {
  int32_t group = -1;  // index into the groups of the owner's table; -1: none
  uint32_t shard = 0;
  Decode decode = Decode::kCopy;
  std::vector<MoveSource> sources;  // as many as the decoding needs
  std::vector<ShardRange> ranges;   // of the owner's regions, in the order of the shard's bytes
  // Rows: where each range begins in the region that the rank of the vault had.
  std::vector<uint64_t> from = {};
};

// A part that one rank reads and another one receives.
struct Transfer {
  int sender = 0, receiver = 0;
  int vault = 0;
  uint32_t slot = 0;
  std::string group;   // "": private regions
  uint32_t shard = 0;  // the part as the vault stores it
  uint32_t tag = 0;    // unique among the receiver's messages
  bool rows = false;   // of split tensors, those that the receiver has now (rowsFor())
};

// What `rank` writes into its live regions. `table`: of its owner's slot, as the rank has it now
// (tableOf()). Those that are decoded from others of the same group come last.
std::vector<Move> movesOf(const RestorePlan& plan, int rank, const SnapshotTable& table);
// What `rank` sends or receives. All ranks keep one order (by receiver, then by tag), so posting
// transfers in it and waiting for the oldest never deadlocks.
std::vector<Transfer> transfersOf(const RestorePlan& plan, int rank);
// Ranges of a table's regions that one shard of a group covers; none for a parity. Group "": a part
// of its private regions.
std::vector<ShardRange> rangesOf(const SnapshotTable& table, const std::string& group,
                                 uint32_t shard);

// Regions and groups that `rank` of the job that resumes has if its owner had those of `saved`: its
// own rows of split tensors.
SnapshotTable tableOf(const RestorePlan& plan, int rank, const SnapshotTable& saved);

// Rows of a split tensor that the rank of a vault had and another rank has now, in bytes of the
// regions of both.
struct RowsFor {
  uint32_t split = 0;  // index into the split tensors, which are equal in all tables
  uint64_t from = 0, to = 0, bytes = 0;
};
std::vector<RowsFor> rowsFor(const RestorePlan& plan, const std::vector<SplitTensor>& splits,
                             int vault, int rank);

}  // namespace reft

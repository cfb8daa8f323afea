// Finds ops about which the ranks of a node disagree while the job runs, whether they hang or not:
// with another dtype of the same size, or one op more where sizes happen to fit, all that comes are
// wrong values.
//
// Reads each rank's op log on from where the last read ended. Keeps the newest kWindow collectives
// of each group as the first rank had them, and compares those of every further rank with them; a
// rank that is more than kWindow ops behind is not compared. Once ranks disagree about op n of a
// group, its numbers after n may mean nothing: next() reports each group once, until reset().
//
// Threads: not thread-safe. Errors: none; a hostile log costs at most kMaxGroups windows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/verdict/disagreement.h"
#include "intercept/record/op_log.h"

namespace reft {

class AgreementWatch {
 public:
  static constexpr size_t kWindow = 1024;     // ops of a group; about 112 KiB
  static constexpr size_t kMaxRead = 8192;    // ops of a rank per read(); older ones are skipped
  static constexpr size_t kMaxGroups = 1024;  // further groups are ignored
  static constexpr size_t kMaxRanks = 64;     // further ranks of the node are ignored
  // How long next() waits for ranks that have not come to the op, to learn the majority.
  static constexpr int64_t kWaitNs = 1'000'000'000;

  // Compares the ops that `rank` has begun since the last call.
  void read(int rank, const OpLogReader& log, int64_t now_ns);

  // The next disagreement to report. Its minority is empty unless more than half of the whole group
  // agree.
  std::optional<Disagreement> next(int64_t now_ns);

  // Ops about which ranks of this node have disagreed so far.
  uint64_t count() const { return count_; }

  // To be called when the ranks are started again: their op logs begin anew.
  void reset();

 private:
  struct Seen {
    OpEntry op;              // as the first rank had it; seq 0: none
    uint64_t alike = 0;      // bits of the ranks that agree with it
    bool disagreed = false;  // some rank does not
  };
  // Sets of ranks are bits, by index into ranks_.
  struct Group {
    OpGroup known{};
    std::vector<Seen> window;  // by seq, modulo kWindow
    uint64_t members = 0;
    std::set<int32_t> group_ranks;
    bool ambiguous = false;  // groups of different ranks under one key; not compared
    bool reported = false;
  };
  struct Rank {
    int rank = -1;
    uint64_t next = 0;  // index of the op to read next
    GroupKeys keys;
    std::vector<Group*> groups;        // as its log numbers them; nullptr: ignored
    std::vector<int32_t> group_ranks;  // its own rank in each
    std::map<uint32_t, std::string> call_sites;
  };
  // A disagreement that next() has not returned yet.
  struct Pending {
    Group* group = nullptr;
    int64_t due_ns = 0;
    uint64_t arrived = 0;           // ranks that have begun the op
    uint64_t located = 0;           // of these, the ones whose call sites are known
    std::map<size_t, OpEntry> ops;  // by index into ranks_
  };

  size_t indexOf(int rank);
  void learnGroups(size_t index, const OpLogReader& log);
  void learnCallSites(size_t index, const OpLogReader& log);
  void compare(size_t index, const OpEntry& op, int64_t now_ns);
  Disagreement describe(const Pending& pending) const;

  std::vector<Rank> ranks_;
  std::unordered_map<std::string, std::unique_ptr<Group>> groups_;
  std::vector<Pending> pending_;
  uint64_t count_ = 0;
};

}  // namespace reft

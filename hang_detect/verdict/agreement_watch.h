// Finds ops that ranks disagree about while the job runs, whether they hang or not: of one dtype
// against another of the same size, or of an op more where sizes happen to fit, all that comes are
// wrong values.
//
// Each rank's op log is read on from where it was read last. Of each group, the newest kWindow
// collectives are kept as the first rank had them; each further rank's are compared with that. A
// rank that is more than kWindow ops behind is not compared. Once ranks disagree about op n of a
// group, its numbers after n may mean nothing: a group is told of once, until reset().
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
#include <unordered_set>
#include <vector>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/verdict/verdict.h"
#include "intercept/record/op_log.h"

namespace reft {

class AgreementWatch {
 public:
  static constexpr size_t kWindow = 1024;     // ops of a group; about 112 KiB
  static constexpr size_t kMaxRead = 8192;    // ops of a rank at a time: of more, the newest
  static constexpr size_t kMaxGroups = 1024;  // further ones are not looked at
  static constexpr size_t kMaxRanks = 64;     // of a node, likewise
  // So long the ranks that have not come to the op are waited for, to see whom most agree with.
  static constexpr int64_t kWaitNs = 1'000'000'000;

  // Compares what `rank` has begun since the last call.
  void read(int rank, const OpLogReader& log, int64_t now_ns);

  // The next disagreement that is to be told. Nobody is in its minority unless more than half of
  // the whole group agree.
  std::optional<Disagreement> next(int64_t now_ns);

  // Ops that ranks of this node disagreed about, ever.
  uint64_t count() const { return count_; }

  // The ranks were started again: their ops begin anew.
  void reset();

 private:
  struct Seen {
    OpEntry op;  // of the first rank that had it; seq 0: none
    size_t first = 0;
    uint64_t alike = 0;  // who has it like that, by place in ranks_
    bool odd = false;    // somebody has it otherwise
  };
  struct Group {
    OpGroup known{};
    std::vector<Seen> window;  // by seq, modulo kWindow
    uint64_t members = 0;      // by place in ranks_
    std::set<int32_t> group_ranks;
    bool doubtful = false;  // two groups, of different ranks, that were called the same
    bool told = false;
  };
  struct Rank {
    int rank = -1;
    uint64_t next = 0;  // index of the op to be read next
    GroupKeys keys;
    std::vector<Group*> groups;        // as its log numbers them
    std::vector<int32_t> group_ranks;  // its own in each
    std::map<uint32_t, std::string> call_sites;
  };
  struct Open {
    Group* group = nullptr;
    int64_t due_ns = 0;
    uint64_t come = 0;              // by place in ranks_
    uint64_t located = 0;           // of them, whose call sites are known
    std::map<size_t, OpEntry> ops;  // by place in ranks_
  };

  size_t placeOf(int rank);
  void learnGroups(size_t place, const OpLogReader& log);
  void locate(size_t place, const OpLogReader& log);
  void compare(size_t place, const OpEntry& op, int64_t now_ns);
  Disagreement describe(const Open& open) const;

  std::vector<Rank> ranks_;
  std::unordered_map<std::string, std::unique_ptr<Group>> groups_;
  std::vector<Open> open_;
  uint64_t count_ = 0;
};

}  // namespace reft

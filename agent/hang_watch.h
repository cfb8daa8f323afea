// When the ranks of a node look hung: no rank moved its op log for a while and some op is pending. One report an episode.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "agent/rank_table.h"

namespace reft::agent {

struct Progress {
  uint64_t ops = 0;
  uint64_t heartbeat_ns = 0;
  bool pending = false;  // some op of the newest ones has begun and is not done
};

// From the mapped op log; nullopt without a (valid) one.
std::optional<Progress> readProgress(RankState& rank);

class HangWatch {
 public:
  explicit HangWatch(int64_t suspect_ns) : suspect_ns_(suspect_ns) {}

  // True once per episode: every live rank stood still for suspect_ns and some live rank has a pending op. Any progress
  // (or a rank that joins or goes) ends the episode.
  bool suspect(const std::map<int, Progress>& live, int64_t now_ns);

 private:
  int64_t suspect_ns_;
  bool reported_ = false;
  uint64_t seen_ns_ = 0;
  size_t seen_ranks_ = 0;
};

// Answers to one stack_request, waited for until `deadline_ns`.
struct StackCollection {
  uint64_t id = 0;
  uint64_t requester = 0;  // connection of the tool; 0: the watch, the report goes to files
  int64_t deadline_ns = 0;
  std::map<int, std::optional<std::string>> replies;  // rank → payload
  bool complete() const;
};

// (JSON, text) of the report.
std::pair<std::string, std::string> writeReport(RankTable& ranks, const StackCollection& collection,
                                                const std::string& job, int node, double suspect_sec, int64_t now_ns);

}  // namespace reft::agent

// Evidence of a hang: what is known about each rank of a job, and where it comes from.
//
// Threads: values; the functions are re-entrant.
// Errors:  none: op logs and stack texts may be damaged or hostile. What cannot be read is named in
// the rank's `error`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/process_state.h"
#include "intercept/record/op_log.h"

namespace reft {

// A process that a rank started: data workers, checkpoint writers, compilers.
struct ChildProcess {
  int pid = 0;
  std::string state;  // as RankEvidence::proc_state
  std::string name;
  std::string stacks_text{};  // as RankEvidence::stacks_text; "": not read, or it runs no Python
  std::string error{};        // why there are none
};

// What is known about one rank. Every field may be left at its default: unknown is said as such.
struct RankEvidence {
  int rank = -1;
  int node = 0;
  int pid = 0;
  std::string host;
  bool alive = false;
  bool answered = false;      // answered the stack request
  std::string proc_state;     // letter of /proc/<pid>/stat: R S D T t Z X; empty = unknown
  std::vector<OpEntry> tail;  // newest ops, oldest first
  std::vector<OpGroup> groups;
  uint64_t ops_begun = 0;                      // more than tail.size(): the tail is not everything
  uint64_t heartbeat_age_ns = 0;               // age of the newest mark in the op log; 0 = unknown
  std::map<uint32_t, std::string> call_sites;  // OpEntry::call_site → "train.py:88 load_batch"
  std::string stacks_text;  // as faulthandler prints it, plus the lines that dumpStacks() adds
  int64_t committed_step = -1;
  bool said_bye = false;   // it ended cleanly
  int64_t gone_ns = 0;     // when its end was noticed; 0 = it lives, or that is unknown
  int64_t oom_kills = -1;  // processes of its cgroup that the OOM killer ended since it came, once
                           // it is dead; < 0 = unknown
  int tracer_pid = 0;      // a debugger is attached to it
  std::string wait_channel;  // kernel function that its main thread sleeps in
  double cpu_share = -1;     // processors that it kept busy in the last seconds; < 0 = unknown
  int64_t io_bytes = -1;     // that it read and wrote in that time; < 0 = unknown
  std::vector<ChildProcess> children;
  std::string error;  // why something above is missing
};

struct HangEvidence {
  std::string job;
  int node = 0;
  int world = 0;           // ranks of the whole job; 0 = unknown
  int64_t now_ns = 0;      // CLOCK_MONOTONIC, as the op logs
  double suspect_sec = 0;  // what was configured; 0: the report was asked for
  double away_sec = 0;     // since the newest mark, the observer stood still itself for so long
  int nodes = 1;           // that the job has
  std::vector<int>
      silent_nodes;  // whose ranks are not in `ranks`, because nobody there answered in time
  std::string nodes_problem;  // why the other nodes could not be asked as they should
  int64_t clock_error_ns =
      0;  // times of ranks of two nodes may be wrong by so much against each other
  std::vector<RankEvidence> ranks;
};

// Fills tail, groups, call_sites, ops_begun and heartbeat_age_ns from a mapped op log area. Damage
// goes to `rank.error`. A log that another process than `writer` has written (0: any) is an earlier
// attempt's, and is left out.
void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count = 64,
              uint32_t writer = 0) noexcept;

// Fills answered and stacks_text from the payload of a kStackReply. Damage goes to `rank.error`.
void addStackReply(RankEvidence& rank, std::string_view payload) noexcept;

// Fills alive, proc_state, tracer_pid, wait_channel and children from /proc.
void addProcessState(RankEvidence& rank) noexcept;

// Adds what another node knows about its ranks. `shift_ns`, to be added to its clock's times to
// have ours, is known to `error_ns`. Ranks that are there already stay as they are.
void addNode(HangEvidence& evidence, HangEvidence other, int64_t shift_ns, int64_t error_ns);

}  // namespace reft

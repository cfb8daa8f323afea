// Evidence of a hang: what is known about each rank of a job, and the functions that collect it.
//
// Threads: values; the functions are re-entrant.
// Errors:  none: op logs and stack texts may be damaged or hostile. RankEvidence::error names what
//          could not be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/connections.h"
#include "hang_detect/evidence/driver_use.h"
#include "hang_detect/evidence/ending.h"
#include "hang_detect/evidence/hardware_note.h"
#include "hang_detect/evidence/nccl_progress.h"
#include "hang_detect/evidence/ops.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/stacks/stacks.h"
#include "intercept/record/op_log.h"

namespace reft {

// A process that a rank started: a data worker, a checkpoint writer, a compiler.
struct ChildProcess {
  int pid = 0;
  std::string state;  // as RankEvidence::proc_state
  std::string name;
  ProcessStacks stacks{};  // empty: not read, or the process runs no Python
  std::string error{};     // reason for missing stacks
};

// A thread that has called ops and still lives.
struct CallingThread {
  uint64_t thread = 0;  // OpEntry::thread
  std::string state{};  // as RankEvidence::proc_state
  std::string wait_channel{};
};

// Every field may keep its default, which means unknown.
struct RankEvidence {
  int rank = -1;
  int node = 0;
  int pid = 0;
  std::string host;
  bool alive = false;
  bool answered = false;               // the rank itself replied to the stack request
  std::string proc_state;              // letter of /proc/<pid>/stat: R S D T t Z X; "" = unknown
  std::vector<CallingThread> callers;  // who trains first: the order of callersOf()
  std::vector<OpEntry> tail;           // newest ops, oldest first
  std::vector<PastOp> past;            // the ops before those, steps left out, oldest first
  std::vector<OpGroup> groups;
  uint64_t ops_begun = 0;                      // above tail.size(): older ops are not in the tail
  uint64_t heartbeat_age_ns = 0;               // age of the newest mark in the op log; 0 = unknown
  std::map<uint32_t, std::string> call_sites;  // OpEntry::call_site → "train.py:88 load_batch"
  ProcessStacks stacks;
  int64_t committed_step = -1;
  bool said_bye = false;   // the rank ended cleanly
  int64_t gone_ns = 0;     // time at which the agent noticed its end; 0 = alive, or unknown
  int64_t oom_kills = -1;  // OOM kills in its cgroup during the life of a dead rank; < 0 = unknown
  Ending ending;           // of a dead rank
  int tracer_pid = 0;      // debugger attached to it; 0 = none
  std::string wait_channel;        // kernel function in which its main thread sleeps
  double cpu_share = -1;           // processors kept busy over the last seconds; < 0 = unknown
  double children_cpu_share = -1;  // the same of the processes that it started and of theirs
  int64_t io_bytes = -1;           // bytes that it read and wrote in that time; < 0 = unknown
  // How many ran or waited for a processor or a disk when they were looked at.
  int running_threads = 0;   // of the rank
  int running_children = 0;  // processes that it started, and theirs
  std::vector<ChildProcess> children;
  Connections connections;
  DriverUse driver;
  std::vector<NcclFinding> nccl;  // one for each communicator; none without the plugin
  std::string error;              // reason for missing fields
};

struct HangEvidence {
  std::string job;
  int node = 0;            // node of the agent that collected this
  int world = 0;           // ranks of the whole job; 0 = unknown
  int64_t now_ns = 0;      // CLOCK_MONOTONIC, as in the op logs
  double suspect_sec = 0;  // configured time without progress; 0: a user asked for the report
  double away_sec = 0;     // time since the newest mark during which the agent itself stood still
  int nodes = 1;           // nodes of the job
  std::vector<int> silent_nodes;       // nodes without an answer in time; `ranks` lacks their ranks
  std::string nodes_problem;           // reason why other nodes could not be asked
  int64_t clock_error_ns = 0;          // bound on the error between times of two nodes
  std::vector<HardwareNote> hardware;  // of the nodes that answered
  std::vector<RankEvidence> ranks;
};

// Where a rank stands.
struct Standing {
  const ThreadStack* stack = nullptr;  // nullptr: unknown, or without frames
  std::string_view state;              // of that thread
  std::string_view wait_channel;
};

// The thread of a rank that counts: the first of its callers that runs Python, else its main
// thread. Ops may also be called by threads of autograd, which run none.
Standing standingOf(const RankEvidence& rank);

// Whether its process has ended, and not cleanly.
bool endedUncleanly(const RankEvidence& rank);
// Whether one of its newest ops failed. A transport reports an error to a rank whose peer is gone:
// its end is a consequence.
bool aNewestOpFailed(const RankEvidence& rank);
// The last step that a rank completed, by its op log; -1: none, or unknown.
int64_t lastStepOf(const RankEvidence& rank);

// Threads that called `ops` (oldest first), without their states: first who took the newest step,
// then by number of ops.
std::vector<CallingThread> callersOf(const std::vector<OpEntry>& ops);

// Fills tail, past, groups, call_sites, callers, ops_begun and heartbeat_age_ns from a mapped op
// log area. Skips a log that another process than `writer` wrote (0: any): it belongs to an earlier
// attempt.
void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count = 64,
              uint32_t writer = 0) noexcept;

// Takes back what the tail says of a device: only the rank itself can look what its streams have
// said since (OpLog::refresh), and it has not answered.
void forgetDevice(RankEvidence& rank);

// Fills answered, stacks, driver and nccl from the payload of a kStackReply.
void addStackReply(RankEvidence& rank, std::string_view payload) noexcept;

// Fills alive, proc_state, tracer_pid, wait_channel, children, connections and what runs from
// /proc, and states of callers; drops callers that have ended.
void addProcessState(RankEvidence& rank) noexcept;

// Adds the ranks of another node, but for those that are present already. `shift_ns` converts its
// clock to this node's, with an error of at most `error_ns`.
void addNode(HangEvidence& evidence, HangEvidence other, int64_t shift_ns, int64_t error_ns);

}  // namespace reft

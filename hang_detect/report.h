// The hang report: what is known about each rank of a node when nothing progresses, and the verdict on it.
//
// The agent collects the evidence (op logs, liveness, process states, stacks) and calls this folder to put it into
// words. Who holds up the job is decided by `decide()`, verdict.h.
//
// Threads: free functions, re-entrant.
// Errors:  none: op logs and stack texts may be damaged or hostile. What cannot be read is named in the rank's `error`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "intercept/base/op_log.h"

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
  std::string stacks_text;                     // as faulthandler prints it, plus the lines that dumpStacks() adds
  int64_t committed_step = -1;
  bool said_bye = false;  // it ended cleanly
  int64_t gone_ns = 0;    // when its end was noticed; 0 = it lives, or that is unknown
  int64_t oom_kills =
      -1;  // processes of its cgroup that the OOM killer ended since it came, once it is dead; < 0 = unknown
  int tracer_pid = 0;        // a debugger is attached to it
  std::string wait_channel;  // kernel function that its main thread sleeps in
  double cpu_share = -1;     // processors that it kept busy in the last seconds; < 0 = unknown
  int64_t io_bytes = -1;     // that it read and wrote in that time; < 0 = unknown
  std::vector<ChildProcess> children;
  std::string error;  // why something above is missing
};

struct HangEvidence {
  std::string job;
  int node = 0;
  int world = 0;                  // ranks of the whole job; 0 = unknown
  int64_t now_ns = 0;             // CLOCK_MONOTONIC, as the op logs
  double suspect_sec = 0;         // what was configured; 0: the report was asked for
  double away_sec = 0;            // since the newest mark, the observer stood still itself for so long
  int nodes = 1;                  // that the job has
  std::vector<int> silent_nodes;  // whose ranks are not in `ranks`, because nobody there answered in time
  std::string nodes_problem;      // why the other nodes could not be asked as they should
  int64_t clock_error_ns = 0;     // times of ranks of two nodes may be wrong by so much against each other
  std::vector<RankEvidence> ranks;
};

// Fills tail, groups, call_sites, ops_begun and heartbeat_age_ns from a mapped op log area. Damage goes to `rank.error`. A
// log that another process than `writer` has written (0: any) is an earlier attempt's, and is left out.
void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count = 64,
              uint32_t writer = 0) noexcept;

// Fills answered and stacks_text from the payload of a kStackReply. Damage goes to `rank.error`.
void addStackReply(RankEvidence& rank, std::string_view payload) noexcept;

// Processor time and I/O so far, of a process and of those it started and that ended. < 0 = unknown.
struct ProcessCounters {
  int64_t cpu_ns = -1;
  int64_t io_bytes = -1;
};
ProcessCounters processCounters(int pid) noexcept;

// Processes that the main thread of `pid` has started and that have not been reaped.
std::vector<int> childrenOf(int pid) noexcept;

// Process that traces `pid`; 0 = none, or that is unknown.
int tracerOf(int pid) noexcept;

// State T or t.
bool processIsStopped(int pid) noexcept;

// Fills alive, proc_state, tracer_pid, wait_channel and children from /proc.
void addProcessState(RankEvidence& rank) noexcept;

// Adds what another node knows about its ranks. `shift_ns`, to be added to its clock's times to have ours, is known to
// `error_ns`. Ranks that are there already stay as they are.
void addNode(HangEvidence& evidence, HangEvidence other, int64_t shift_ns, int64_t error_ns);

// The evidence without a verdict, for another node: evidenceFromJson() reads it. Not longer than `limit`: threads besides the
// main one are left out for that, then older ops, then ranks.
std::string evidenceJson(HangEvidence evidence, size_t limit = SIZE_MAX);

struct Verdict;  // verdict.h

// Never throw, whatever the evidence holds (except std::bad_alloc).
std::string hangReportJson(const HangEvidence& evidence, const Verdict& verdict);  // fields: docs/hang.md
std::string hangReportText(const HangEvidence& evidence, const Verdict& verdict);  // at most 80 columns

struct StackFrame {
  std::string file;
  int64_t line = 0;  // 0 = unknown
  std::string function;
};

struct ThreadStack {
  std::string thread;  // "0x00007f…", as printed
  std::string name;    // where the interpreter prints one
  bool main = false;
  bool current = false;
  bool truncated = false;          // the printer stopped at its frame limit
  bool holds_gil = false;          // false, too, where that is not known
  std::string awaits_gil_of;       // thread that keeps it from taking the GIL (gil_text.h); "": none, or not known
  std::vector<StackFrame> frames;  // most recent call first
};

// A thread as the kernel sees it, with or without Python frames.
struct NativeThread {
  int64_t tid = 0;
  std::string state;
  std::string name;
};

struct Stacks {
  std::vector<ThreadStack> threads;
  std::vector<NativeThread> native;
  bool truncated = false;  // more threads or frames than are kept here
};

// Reads what faulthandler, dumpStacks() and gilText() write. Lines that it does not know are skipped.
Stacks parseStacks(std::string_view text);

}  // namespace reft

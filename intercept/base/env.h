// Every environment variable of reft, in one table: name, type, default, sentence. The docs page is
// generated from it
// (`tools/gen_env_docs`), and a REFT_* name that is not in it is warned about.
//
// Threads: environment() parses once, then it is read-only.
// Errors:  Env::parse throws InvalidArgument that names the variable, its value and what is
// allowed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

// X(member, NAME, kind, default, allowed, sentence)
//   kind: kFlag (0|1) · kInt · kSeconds (float) · kBytes (integer with optional K/M/G/T, binary) ·
//   kChoice · kText
//   sentence: "Internal: " and "Testing: " mark what tests and benchmarks set; the docs list it apart
// clang-format off
#define REFT_ENV_TABLE(X)                                                                                            \
  X(disable, "REFT_DISABLE", kFlag, "0", "0|1", "1: `backend=\"reft\"` is plain gloo/NCCL; nothing else runs. Beats every other setting.") \
  X(strict, "REFT_STRICT", kFlag, "0", "0|1", "1: a failure of reft, or a snapshot that cannot be begun, ends training; one that is dropped later is still counted.") \
  X(log, "REFT_LOG", kText, "warn", "level[,logger=level…]", "Log levels: error, warn, info, debug, trace; per folder as `reft.snapshot=debug`.") \
  X(job_id, "REFT_JOB_ID", kText, "", "letters, digits, . _ -", "Name of the job. Default: from torchrun, Slurm or the launcher's process. Set it to find vaults again after the launcher itself was restarted.") \
  X(run_dir, "REFT_RUN_DIR", kText, "", "a directory", "Sockets and reports go here. Default: `$XDG_RUNTIME_DIR/reft` or `/tmp/reft-<uid>`.") \
  X(vault_dir, "REFT_VAULT_DIR", kText, "", "a directory", "Vaults are files here (tmpfs or local disk) instead of anonymous memory: they outlive the agent.") \
  X(snapshot, "REFT_SNAPSHOT", kFlag, "1", "0|1", "0: the backend and the op log only, no snapshots.") \
  X(snapshot_slots, "REFT_SNAPSHOT_SLOTS", kInt, "2", "2..3", "Full snapshots that a vault holds.") \
  X(snapshot_protection, "REFT_SNAPSHOT_PROTECTION", kChoice, "none", "none|arc", "What is kept beside the own shard: nothing (survives killed processes), or a copy of the next member's shard (survives a lost node).") \
  X(snapshot_every, "REFT_SNAPSHOT_EVERY", kInt, "1", "1..1000000", "Snapshot every so many steps.") \
  X(snapshot_overhead_percent, "REFT_SNAPSHOT_OVERHEAD_PERCENT", kInt, "0", "0..100", "Above 0: snapshots become rarer (every 2nd, 4th, … 64th step) while they make training slower by more than so many percent, measured, and frequent again when it is well less; a restart then loses up to as many steps. 0: never rarer.") \
  X(snapshot_control_every, "REFT_SNAPSHOT_CONTROL_EVERY", kInt, "64", "0..1000000", "Internal: one step in so many runs with no copy beside it, to measure what snapshots cost: its snapshot is copied before it begins (on a CUDA device: at its end, one step in eight times as many). 0: none.") \
  X(snapshot_chunk_bytes, "REFT_SNAPSHOT_CHUNK_BYTES", kBytes, "4M", "64K..1G", "Internal: unit of copying and of checksums.") \
  X(snapshot_threads, "REFT_SNAPSHOT_THREADS", kInt, "1", "1..64", "Internal: copy threads per rank.") \
  X(snapshot_policy, "REFT_SNAPSHOT_POLICY", kChoice, "gap", "gap|eager|sync", "When copies run: while the rank waits for others and what does not fit there beside its work; all as soon as possible, at low priority; or before training goes on.") \
  X(snapshot_verify, "REFT_SNAPSHOT_VERIFY", kChoice, "sampled", "sampled|full", "How writes that bypass version counters (`.data`) are looked for: hashes of samples, or of everything.") \
  X(snapshot_host_bytes, "REFT_SNAPSHOT_HOST_BYTES", kBytes, "0", "0 or bytes", "Most host memory that the vaults of this node may take; 0: nine tenths of what is available.") \
  X(snapshot_wait_sec, "REFT_SNAPSHOT_WAIT_SEC", kSeconds, "5", "0..3600", "How long a step waits, when its optimizers have returned, for a free slot before it skips (and counts) its snapshot.") \
  X(snapshot_alarm_sec, "REFT_SNAPSHOT_ALARM_SEC", kSeconds, "120", "1..86400", "Say aloud that training is unprotected when collectives progress but nothing was committed for so long.") \
  X(resume, "REFT_RESUME", kChoice, "exact", "exact|state|off", "What a restarted job gets back: everything and its place in the loop, tensors and random state only, or nothing.") \
  X(resume_frame_bytes, "REFT_RESUME_FRAME_BYTES", kBytes, "1M", "0..1G", "What all variables of the loop may take together; what does not fit is named and not put back.") \
  X(agent_linger_sec, "REFT_AGENT_LINGER_SEC", kSeconds, "60", "0..86400", "How long the agent keeps the vaults when all ranks are gone without a clean end.") \
  X(agent_path, "REFT_AGENT_PATH", kText, "", "an executable", "The agent to start. Default: the one in the package.") \
  X(metrics_port, "REFT_METRICS_PORT", kInt, "0", "0..65535", "Serve Prometheus text on 127.0.0.1 at this port; 0: only over the agent's socket.") \
  X(hang_suspect_sec, "REFT_HANG_SUSPECT_SEC", kSeconds, "20", "1..86400", "No progress of any rank for so long: write a hang report.") \
  X(hang_action, "REFT_HANG_ACTION", kChoice, "report", "report|abort", "After the report on a hang: nothing, or end the ranks so that the launcher starts them again and memory is restored. Needs a launcher with restarts (`--max-restarts`).") \
  X(op_log_records, "REFT_OP_LOG_RECORDS", kInt, "16384", "256..16777216", "Internal: records in a rank's op log.") \
  X(connect_sec, "REFT_CONNECT_SEC", kSeconds, "10", "0.1..600", "How long a rank waits for the agent of its node before it trains without snapshots.") \
  X(fault_attempt, "REFT_FAULT_ATTEMPT", kInt, "0", "0..1000000", "Testing: the restart count in which REFT_FAULT fires.") \
  X(fault, "REFT_FAULT", kText, "", "rank:step:point:action[;…]", "Testing: at the named point of the step, `kill`, `stop`, `exit` or `abort` the rank.") \
  X(banner, "REFT_BANNER", kFlag, "1", "0|1", "Internal: the two lines at start.")
// clang-format on

struct EnvRow {
  enum Kind { kFlag, kInt, kSeconds, kBytes, kChoice, kText };
  const char* member;
  const char* name;
  Kind kind;
  const char* default_text;
  const char* allowed;
  const char* sentence;
};

class Env {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

  static const std::vector<EnvRow>& table();

  // Parses everything; throws InvalidArgument at the first malformed value.
  static Env parse(const Lookup& lookup);
  // From the process environment.
  static Env parse();
  // REFT_* names in `names` that the table does not know, each with the nearest known name ("" if
  // none is near).
  static std::vector<std::pair<std::string, std::string>> unknown(
      const std::vector<std::string>& names);

  bool flag(std::string_view member) const;
  int64_t integer(std::string_view member) const;  // kInt and kBytes
  double seconds(std::string_view member) const;
  const std::string& text(
      std::string_view member) const;  // kChoice and kText; other kinds: as given

 private:
  struct Value {
    std::string text;
    int64_t integer = 0;
    double seconds = 0;
  };
  const Value& value(std::string_view member, std::initializer_list<EnvRow::Kind> kinds) const;
  std::vector<Value> values_;  // by table index
};

}  // namespace reft

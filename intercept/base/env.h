// Every environment variable of reft, in one table: name, type, default, sentence.
// `tools/gen_env_docs` writes docs/environment.md from it. A REFT_* name that is not in the table
// causes a warning.
//
// Threads: an Env is read-only after parse().
// Errors:  Env::parse throws InvalidArgument with the variable, its value and the allowed values.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reft {

// X(member, NAME, kind, default, allowed, sentence)
//   kind: kFlag (0|1) · kInt · kSeconds (float) · kBytes (integer with optional K/M/G/T, binary) ·
//   kChoice · kText
//   sentence: "Internal: " and "Testing: " mark settings of tests and benchmarks, which the docs
//   list apart
// clang-format off
#define REFT_ENV_TABLE(X) \
  X(disable, "REFT_DISABLE", kFlag, "0", "0|1", \
    "1: `backend=\"reft\"` is plain gloo/NCCL and nothing else runs. Takes precedence over " \
    "every other setting.") \
  X(strict, "REFT_STRICT", kFlag, "0", "0|1", \
    "1: training ends if reft fails or cannot begin a snapshot. A snapshot that is dropped " \
    "later is only counted.") \
  X(log, "REFT_LOG", kText, "warn", "level[,reft.logger=level…]", \
    "Log levels: error, warn, info, debug, trace. For one logger: `reft.snapshot=debug`; " \
    "loggers are intercept, snapshot, hang, agent, backend, python.") \
  X(job_id, "REFT_JOB_ID", kText, "", "letters, digits, . _ -", \
    "Name of the job. Default: made from the command (script, arguments, directory) and from " \
    "what started it, so that another command is another job. Set it to continue a job that was " \
    "started elsewhere or with other arguments, and to distinguish jobs that differ only in " \
    "environment variables or files.") \
  X(job_secret_file, "REFT_JOB_SECRET_FILE", kText, "", "a file of 32 to 4096 bytes", \
    "The secret with which ranks of the job authenticate each other. All ranks must be able to " \
    "read the file, and no other user (mode 0600 or 0400). Default: reft makes one in the run " \
    "directory and, unless all ranks are known to be on one host, in `~/.reft/secrets`.") \
  X(job_secret, "REFT_JOB_SECRET", kChoice, "file", "file|store", \
    "What happens if a rank finds no file with the job's secret. file: the job trains without " \
    "reft. store: rank 0 sends the secret through the job's store and warns; a process that can " \
    "read or write the store at that moment can pose as a rank.") \
  X(run_dir, "REFT_RUN_DIR", kText, "", "a directory", \
    "Directory of sockets and reports. Default: `$XDG_RUNTIME_DIR/reft`. Without a writable " \
    "XDG_RUNTIME_DIR: `$TMPDIR/reft-<uid>` (TMPDIR defaults to `/tmp`). If another user has " \
    "taken that name: `$XDG_CACHE_HOME/reft/run-<boot id>` (XDG_CACHE_HOME defaults to " \
    "`~/.cache`).") \
  X(vault_dir, "REFT_VAULT_DIR", kText, "", "a directory", \
    "Keep vaults (the snapshots of each rank) as files in this directory, not in anonymous " \
    "memory. Files survive the agent. The directory must be on tmpfs, ramfs, ext2 to ext4, xfs " \
    "or overlayfs; on others, the job trains without snapshots.") \
  X(intercept, "REFT_INTERCEPT", kFlag, "1", "0|1", \
    "0: the preloaded library (docs/intercept.md) observes nothing. It reads this once, when the " \
    "process first looks up a function of CUDA.") \
  X(snapshot, "REFT_SNAPSHOT", kFlag, "1", "0|1", \
    "0: no snapshots and no resume; the backend and the op log only. Snapshots of an earlier " \
    "start stay until the job ends cleanly.") \
  X(snapshot_slots, "REFT_SNAPSHOT_SLOTS", kInt, "2", "2..3", \
    "Snapshots that a vault has room for.") \
  X(snapshot_protection, "REFT_SNAPSHOT_PROTECTION", kChoice, "none", \
    "none|arc|arc:2|arc:3|aec|aor|peer|arc+peer|arc:2+peer|arc:3+peer|aec+peer|aor+peer|auto", \
    "What a rank stores in addition to its own shard of the state that replicas share. none: " \
    "nothing; snapshots survive killed processes. arc: a copy of a replica's shard, on another " \
    "node where there is one; this state survives any lost node. arc:2, arc:3: copies of two or " \
    "three; it survives as many lost nodes. aec: the XOR of parts of the shards of up to 15 " \
    "replicas on other nodes; survives what arc does, with less memory where the replicas are on " \
    "three nodes or more. aor: as arc, and another rank computes what a ZeroRedundancyOptimizer " \
    "keeps on one rank only a second time, in host memory, so this state survives any lost node, " \
    "too. peer: the agent of another node keeps a copy of all that the ranks of a node store, so " \
    "state without replicas survives any lost node, too (FSDP2, pipelines); with +peer, in " \
    "addition to what the ranks store themselves. auto: after the first step the ranks choose the " \
    "cheapest of aec, arc, aor and peer with which each of them survives any lost node, and a " \
    "cheaper one later if snapshots stay above " \
    "REFT_SNAPSHOT_OVERHEAD_PERCENT. reft prints at the first step how many it does survive.") \
  X(mesh_address, "REFT_MESH_ADDRESS", kText, "", "a numeric address of this node, or none", \
    "Where the agent of this node takes connections of other nodes' agents. Default: the address " \
    "from which this node reaches MASTER_ADDR. `none`: it takes none, so copies and vaults stay on " \
    "their node.") \
  X(mesh_bytes_per_sec, "REFT_MESH_BYTES_PER_SEC", kBytes, "0", "0 or a size", \
    "Most bytes per second that an agent sends to another node. 0: no limit.") \
  X(mesh_tls, "REFT_MESH_TLS", kChoice, "off", "off|on", \
    "on: what agents of different nodes send each other is encrypted (TLS 1.3, under a key that is " \
    "derived from the job's secret). Set it to the same value on all nodes: agents with it and " \
    "without it refuse each other, and snapshots then stay on their node.") \
  X(snapshot_every, "REFT_SNAPSHOT_EVERY", kInt, "1", "1..1000000", \
    "Steps from one snapshot to the next.") \
  X(snapshot_overhead_percent, "REFT_SNAPSHOT_OVERHEAD_PERCENT", kInt, "0", "0..100", \
    "Limit of the measured slowdown, in percent. Above it, snapshots become rarer (every " \
    "2nd, 4th, … 64th step); well below it, more frequent. A restart repeats at most the steps " \
    "since the newest committed snapshot. 0: no limit.") \
  X(snapshot_control_every, "REFT_SNAPSHOT_CONTROL_EVERY", kInt, "64", "0..1000000", \
    "Internal: of this many steps, one takes place without a concurrent copy, so that reft can " \
    "measure the overhead of snapshots: reft copies the snapshot before that step begins. " \
    "With state on a CUDA device, " \
    "it is one step in eight times as many, and reft copies the snapshot at the end of that " \
    "step. 0: no such steps.") \
  X(snapshot_chunk_bytes, "REFT_SNAPSHOT_CHUNK_BYTES", kBytes, "4M", "64K..1G", \
    "Internal: unit of copies and checksums.") \
  X(snapshot_threads, "REFT_SNAPSHOT_THREADS", kInt, "0", "0..64", \
    "Internal: copy threads per rank. 0: one, and for state on CUDA devices a quarter of the " \
    "rank's share of the node's cores, at most 4.") \
  X(snapshot_policy, "REFT_SNAPSHOT_POLICY", kChoice, "gap", "gap|eager|sync", \
    "When copies run. gap: while the rank is idle, and the rest overlaps with compute. " \
    "eager: at once, at low priority. sync: before training continues.") \
  X(snapshot_verify, "REFT_SNAPSHOT_VERIFY", kChoice, "sampled", "sampled|full", \
    "How reft detects writes that bypass version counters (`.data`): by hashes of samples, " \
    "or of everything.") \
  X(snapshot_host_bytes, "REFT_SNAPSHOT_HOST_BYTES", kBytes, "0", "0 or a size", \
    "Limit of the host memory that the vaults of this node take. 0: nine tenths of what the job " \
    "leaves of the available memory (docs/memory.md).") \
  X(snapshot_wait_sec, "REFT_SNAPSHOT_WAIT_SEC", kSeconds, "5", "0..3600", \
    "Longest wait for a free slot after the optimizers return. If none is free by then, the " \
    "step skips its snapshot, and the skip is counted. With `peer`, there is no wait.") \
  X(snapshot_alarm_sec, "REFT_SNAPSHOT_ALARM_SEC", kSeconds, "120", "1..86400", \
    "Warn that training is unprotected if collectives progress but no snapshot is committed " \
    "for this long.") \
  X(resume, "REFT_RESUME", kChoice, "exact", "exact|state|off", \
    "What a restarted job restores. exact: everything, and the place in the loop. state: " \
    "tensors (optimizer state included), schedulers, gradient scaler, random state and " \
    "registered objects. off: nothing.") \
  X(resume_frame_bytes, "REFT_RESUME_FRAME_BYTES", kBytes, "1M", "0..1G", \
    "Limit for all variables of the loop together. reft does not restore variables that do " \
    "not fit, and names them.") \
  X(resume_verify, "REFT_RESUME_VERIFY", kChoice, "auto", "auto|always|off", \
    "Whether a resume computes the resumed step again from the one before it and compares the " \
    "results; the step then prints its lines again. auto: at the first resume of a job, and " \
    "after the script, torch, Python, reft or the host of a rank has changed, if the launcher " \
    "has a restart left. always: at every resume. off: never.") \
  X(resume_verify_sec, "REFT_RESUME_VERIFY_SEC", kSeconds, "60", "0..86400", \
    "Longest time that a verification may add to a resume, estimated from how long steps took " \
    "before the restart and how long a restore takes. If it would take longer, reft prints that " \
    "the resume is not verified.") \
  X(agent_linger_sec, "REFT_AGENT_LINGER_SEC", kSeconds, "60", "0..86400", \
    "How long the agent keeps the vaults after all ranks are gone without a clean end. While a " \
    "launcher lives that would start the ranks again, up to one hour.") \
  X(agent_path, "REFT_AGENT_PATH", kText, "", "an executable", \
    "The agent to start. Default: the one in the package.") \
  X(metrics_port, "REFT_METRICS_PORT", kInt, "0", "0..65535", \
    "Serve Prometheus text on 127.0.0.1 at this port. 0: only over the agent's socket.") \
  X(hang_suspect_sec, "REFT_HANG_SUSPECT_SEC", kSeconds, "20", "1..86400", \
    "Search for a hang if no rank makes progress for this long while a collective or message is " \
    "open, and write a report if it is one. If the missing rank may have a good reason to be " \
    "late, the report waits for ten times as long (docs/hang.md).") \
  X(hang_device_marks, "REFT_HANG_DEVICE_MARKS", kFlag, "1", "0|1", \
    "Whether CUDA streams write into host memory when they reach a collective and when they have " \
    "passed it, so that a verdict can name the rank whose device does not come (docs/hang.md). Two " \
    "calls to the driver for each collective on a device; 0: none.") \
  X(crash_verdict, "REFT_CRASH_VERDICT", kFlag, "1", "0|1", \
    "Whether a rank tells its agent how it ends, so that a verdict names the rank that failed " \
    "first (docs/crash.md). 0: no handlers of exceptions and faults, and torchrun's error file is " \
    "not written.") \
  X(crash_loop_limit, "REFT_CRASH_LOOP_LIMIT", kInt, "0", "0..1000", \
    "If so many attempts in a row fail alike (same ranks, error and line, at the same step), end " \
    "the launcher with SIGTERM instead of another restart (docs/crash.md). 0: never.") \
  X(hardware_counters, "REFT_HARDWARE_COUNTERS", kFlag, "1", "0|1", \
    "Whether the agent has a separate process read the counters of GPUs (NVML) and network devices, " \
    "as evidence in verdicts and as metrics (docs/hardware.md). 0: none, and NVML is not loaded.") \
  X(hang_action, "REFT_HANG_ACTION", kChoice, "report", "report|abort", \
    "What reft does after the report of a hang. report: nothing. abort: ends the ranks, so " \
    "that the launcher restarts them and they resume; needs a launcher with restarts " \
    "(`--max-restarts`).") \
  X(nccl_profiler, "REFT_NCCL_PROFILER", kChoice, "off", "off|on|kernels", \
    "Whether reft follows what NCCL does inside a collective, as its profiler plugin (NCCL 2.27 or " \
    "later). Not yet run with a real NCCL. on: what its proxy thread sends and receives, per channel " \
    "and peer. kernels: also when the kernel begins and ends on each channel; NCCL's proxy thread " \
    "then keeps a processor busy during every collective. A plugin that `NCCL_PROFILER_PLUGIN` " \
    "names already keeps its place.") \
  X(check_drain, "REFT_CHECK_DRAIN", kChoice, "print", "print|run", \
    "What `reft check` does, in a Slurm job, on a node that is to be excluded. print: shows the " \
    "`scontrol` command that drains it. run: runs that command on the node.") \
  X(op_log_records, "REFT_OP_LOG_RECORDS", kInt, "16384", "256..16777216", \
    "Internal: records in the op log of a rank.") \
  X(connect_sec, "REFT_CONNECT_SEC", kSeconds, "10", "0.1..600", \
    "How long a rank waits for the agent of its node. After that, it trains without " \
    "snapshots.") \
  X(fault_attempt, "REFT_FAULT_ATTEMPT", kInt, "0", "0..1000000", \
    "Testing: the restart count in which REFT_FAULT fires.") \
  X(fault, "REFT_FAULT", kText, "", "rank:step:point:action[;…]", \
    "Testing: at the named point of the step, `kill`, `stop`, `exit` or `abort` the rank.") \
  X(drill, "REFT_DRILL", kText, "", "a directory", \
    "Internal: the folder through which `reft drill` controls the ranks, and in which they write " \
    "their records.") \
  X(banner, "REFT_BANNER", kFlag, "1", "0|1", \
    "Internal: print the lines at start, and those on protection and overhead.")
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

  // Parses all variables. Throws InvalidArgument at the first malformed value.
  static Env parse(const Lookup& lookup);
  // Parses the environment of the process.
  static Env parse();
  // The REFT_* names in `names` that are not in the table, each with the nearest one that is, or
  // "".
  static std::vector<std::pair<std::string, std::string>> unknown(
      const std::vector<std::string>& names);

  bool flag(std::string_view member) const;
  int64_t integer(std::string_view member) const;  // kInt and kBytes
  double seconds(std::string_view member) const;
  const std::string& text(std::string_view member) const;  // every kind, as given

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

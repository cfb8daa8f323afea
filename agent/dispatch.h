// What each message of a peer does: ranks hand over vaults, vote and answer; tools ask.
//
// Threads: the agent's loop only.
// Errors:  handle() throws reft::Error for a message that is not what it should be; the caller
// refuses the peer then.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "agent/hang/investigation_runner.h"
#include "agent/hang/native_readers.h"
#include "agent/health/hardware_watch.h"
#include "agent/mesh/copy_gate.h"
#include "agent/mesh/mesh.h"
#include "agent/options.h"
#include "agent/peers/connection.h"
#include "agent/peers/line_budget.h"
#include "agent/peers/rank_table.h"
#include "agent/serve/status.h"
#include "snapshot/commit/commit_ledger.h"

namespace reft::agent {

class Dispatch {
 public:
  // `joined`: called for each rank that has joined, with its old connection (0: none). `wake`:
  // written to when takeCopies() has something to do.
  Dispatch(const AgentOptions& options, RankTable& ranks, Connections& connections,
           InvestigationRunner& investigation, HardwareWatch& hardware,
           std::function<void(RankState&, uint64_t old_connection)> joined, int wake,
           int64_t now_ns);

  void handle(Connection& peer, wire::Frame frame, int64_t now_ns);
  // Sends an error and closes the connection.
  void refuse(Connection& peer, const std::string& what, const std::string& hint);
  // Logs what happened to a peer, unless peers have caused too many lines.
  void note(const Connection& peer, const std::string& what);
  void noteNoDescriptors();
  // Sends the native stacks that are there by now.
  void sendNativeStacks();
  // Counts the votes whose copies have arrived on another node.
  void takeCopies();
  void tick(int64_t now_ns);
  std::string metrics();

 private:
  void hello(Connection& peer, const wire::Frame& frame);
  void fromRank(Connection& peer, RankState& rank, wire::Frame& frame, int64_t now_ns);
  void fromAnybody(Connection& peer, wire::Frame& frame, int64_t now_ns);
  void vote(RankState& rank, const wire::Frame& frame, int64_t now_ns);
  void recount(RankState& rank, int64_t now_ns);
  void openMesh(const MeshOpen& open);
  void keepCopies(RankState& rank, const MeshKeep& keep, int64_t now_ns);
  void fetchCopies(Connection& peer, const MeshFetch& fetch);
  void count(const std::vector<CopyGate::Vote>& votes);
  // Prints what has changed about the copies of this node's snapshots.
  void reportCopies();
  // Prints a line on the terminal of the job.
  void say(const std::string& line, bool is_warning = true);
  void giveVault(Connection& peer, const VaultGet& wanted);
  void readNative(Connection& peer, int number);
  void hearWords(Connection& peer, RankState& rank, std::string_view payload, int64_t now_ns);
  void act(const std::vector<CommitLedger::Action>& actions);
  const AgentState& state();

  const AgentOptions& options_;
  RankTable& ranks_;
  Connections& connections_;
  InvestigationRunner& investigation_;
  HardwareWatch& hardware_;
  std::function<void(RankState&, uint64_t)> joined_;
  CommitLedger ledger_;
  NativeReaders native_readers_;
  Mesh mesh_;
  CopyGate gate_;
  uint64_t sent_bytes_ = 0;                // by the mesh, at the tick before
  std::map<uint64_t, uint64_t> fetching_;  // by fetch of the mesh: the connection that waits
  CopyGate::State reported_ = CopyGate::State::kFresh;  // of gate_, on the terminal
  MeshKey mesh_key_{};
  uint16_t mesh_port_ = 0;
  bool mesh_tls_ = false;
  AgentState state_;
  LineBudget lines_;  // that peers cause
};

}  // namespace reft::agent

// What the agent knows about the ranks of its node: processes, connections, vaults.
//
// Threads: the agent's loop only. Errors: putVault throws Corruption or InvalidArgument and leaves
// the old vault.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "agent/peers/messages.h"
#include "agent/peers/peer_process.h"
#include "agent/peers/vault_files.h"
#include "hang_detect/evidence/ending.h"
#include "intercept/base/unique_fd.h"
#include "snapshot/commit/commit_ledger.h"
#include "snapshot/vault/identity.h"
#include "snapshot/vault/reader.h"

namespace reft::agent {

// A vault that the agent keeps.
struct HeldVault {
  UniqueFd fd;
  VaultIdentity identity;
  std::unique_ptr<VaultReader> reader;  // nullptr: not mapped, perhaps because that failed
  std::string path;                     // "": a memfd
  bool lost = false;                    // it was cut off, and given up
  // Numbers of ranks that could not resume from it: it is not offered to as many again, or they
  // would start from their beginning each time.
  std::set<int> refused_by;

  explicit operator bool() const { return static_cast<bool>(fd); }
  // The vault, mapped as long as it is now; nullptr if there is none, or it cannot be mapped now:
  // then it is kept, and the next call tries again.
  const VaultReader* readable(int rank);

 private:
  bool warned_ = false;
};

// Whether native frames of a rank that a fault has stopped were read.
enum class FaultFrames : uint8_t { kNone, kUnderWay, kRead };

struct RankState {
  Hello hello;
  // As people know it: of the rank's own PID namespace if that is another one. 0: never seen by
  // this agent (only its vault was found). To look at the process: RankTable::readablePid().
  int pid = 0;
  UniqueFd pidfd;                 // empty: only the end of the connection shows its end
  bool pid_is_own = false;        // `pid` is of the agent's namespace, and belongs to `pidfd`
  UniqueFd launcher;              // pidfd of the parent process
  int launcher_pid = 0;           // 0: unknown
  std::string oom_counter;        // of its cgroup, oom_kills.h
  int64_t oom_kills_before = -1;  // when it came
  uint64_t connection = 0;        // 0: none
  bool alive = false;             // the process exists
  bool said_bye = false;
  Ending ending;                            // of its process, as far as it is known
  FaultFrames frames = FaultFrames::kNone;  // of its ending.fault
  uint64_t frames_reader = 0;               // connection that it said it on

  std::vector<Note> notes;  // of the process that is connected now

  HeldVault vault;
  // Vaults of the rank that jobs with another number of ranks have left, by that number. A later
  // start resumes from the newest step that it can.
  std::map<int, HeldVault> set_aside;
  bool resumed = false;   // its process goes on with the vault of an earlier one
  int resumes_world = 0;  // of VaultPut

  bool live() const { return alive && !said_bye; }
  // Processes of its cgroup that the kernel's OOM killer has ended since it came; < 0: unknown.
  int64_t oomKillsSince() const;
  const VaultReader* readable() { return vault.readable(hello.rank); }
  // The vault that a job of so many ranks has left, 0: the present one; nullptr if there is none.
  HeldVault* vaultOf(int world);
  // All of them.
  std::vector<HeldVault*> vaults();
};

class RankTable {
 public:
  RankTable(std::string job, std::string vault_dir);

  // Vault files that an earlier agent left. Foreign ones stay and are logged.
  void adoptVaultFiles();

  // Registers a rank, and takes the descriptor of its process. Throws InvalidArgument with what to
  // do if a live process of another job uses the name.
  RankState& join(const Hello& hello, PeerProcess& process, uint64_t connection);
  // A vault that a job with another number of ranks has left is set aside.
  void putVault(RankState& rank, const VaultPut& put, UniqueFd fd);
  // A step was committed. What another number of ranks has left is no longer needed if the job has
  // resumed from it, or if it was a smaller job and the rank has resumed from its own vault.
  void dropSetAside();

  std::map<int, RankState>& all() { return ranks_; }
  RankState* find(int rank);
  RankState* ofConnection(uint64_t connection);
  // True if the process has ended, as far as is known.
  static bool ended(const RankState& rank);
  // The process to look at in /proc: 0 if it has ended, or cannot be seen from here.
  static int readablePid(const RankState& rank);

  bool anyLive() const;
  // Every local rank of the newest incarnation said bye.
  bool allSaidBye() const;
  // Whether ranks that said bye may still be started again: one that dies on its way out fails the
  // job, and a launcher with restarts left begins anew.
  bool mayComeBack() const { return restartingRank() != nullptr; }
  // A newest rank whose launcher lives and has restarts left; nullptr: none.
  const RankState* restartingRank() const;
  int world() const;
  int nodes() const;                                     // that the newest ranks said the job has
  uint64_t incarnation() const { return incarnation_; }  // the newest

  std::vector<std::pair<CommitKey, CommitLedger::Held>> sealed(RankState& rank);
  // Deletes the vault files of this node's ranks, each with a log line.
  void deleteVaultFiles();
  // Shows that the job lives; call each tick.
  void tendVaultFiles(int64_t now_ns) { files_.tend(now_ns); }

 private:
  std::string job_;
  VaultFiles files_;
  std::map<int, RankState> ranks_;
  uint64_t incarnation_ = 0;  // of the newest hello
  int local_world_ = 0;
};

}  // namespace reft::agent

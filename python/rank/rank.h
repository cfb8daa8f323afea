// Puts the native parts of one rank together: vault, op log, snapshot engine, and the votes between
// nodes.
//
// The vault takes over the op log of the process; the engine votes through the agent's client; the
// first rank of a node carries the node's votes through the job's store. One Rank in a process at a
// time.
//
// Threads: the training thread; check() from the thread that ask_check asked; nothing here takes
//          the GIL but hold_still. The destructor waits for threads, up to seconds if the store
//          does not answer; in a forked child, which has none of them, it frees nothing that they
//          use.
// Errors:  Unavailable for a second Rank; the constructor also throws what making or adopting a
//          vault throws.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <sys/types.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "intercept/base/unique_fd.h"
#include "intercept/link/agent_client.h"
#include "python/rank/live_tensors.h"
#include "python/rank/rank_options.h"
#include "snapshot/engine/engine.h"
#include "snapshot/restore/plan.h"
#include "snapshot/vault/writer.h"

namespace reft {

class StoreCommit;
class ValueSeal;

class Rank {
 public:
  struct Start {
    RankIdentity identity;
    RankOptions options;
    std::shared_ptr<AgentClient> client;
    int node = 0;                           // of this rank
    std::vector<int> domain_of;             // by rank: equal for those that are lost together
    c10::intrusive_ptr<c10d::Store> store;  // keys that no other attempt of the job sees
    std::shared_ptr<const ValueSeal> seal;  // of what goes into the store
    std::string vault_path;                 // "": anonymous memory
    UniqueFd adopted;                   // the rank's vault of an earlier attempt, if there is one
    const RestorePlan* plan = nullptr;  // what the job resumes from
    // Asks the main thread to call check() between two bytecodes; false: it could not be asked.
    std::function<bool()> ask_check;
    // Runs its argument while no other thread of the script moves memory.
    std::function<void(const std::function<void()>&)> hold_still;
    // Runs its argument, which waits for threads, while the caller lets go of the GIL.
    std::function<void(const std::function<void()>&)> let_go;
  };
  // A region of the snapshot, as the script has it.
  struct Region {
    std::string name;
    at::Tensor tensor;
    int32_t group = -1;
    bool early = false;
    bool replaceable = false;
  };
  // A contiguous tensor on a device whose contents belong into the objects at `offset`.
  struct Part {
    at::Tensor tensor;
    uint64_t offset = 0;
  };
  struct Point {
    int64_t step = 0;
    std::vector<at::Tensor> tensors;  // of the regions, in the table's order
    std::string_view objects;
    std::vector<Part> parts;
    std::vector<DeviceStream> writers;  // streams that may write tensors or parts
    bool gated = true;
  };

  explicit Rank(Start start);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  static Rank* current();  // nullptr: this process has none; a parent's does not count
  void check() { engine_->check(); }

  // `splits`: tensors of which each rank has some rows; `plan_anew`: as in
  // SnapshotEngine::setTable().
  void setTable(const std::vector<Region>& regions, std::vector<GroupInfo> groups,
                std::vector<SplitTensor> splits, bool plan_anew);
  // kNoTable: a tensor has another type, shape or layout than its region, or shares the memory of
  // another one since; setTable() has to come first.
  // kUnderWay: an op that was issued may still write a region; nothing is copied.
  CaptureResult capture(const Point& point);
  // From the next table on; as REFT_SNAPSHOT_PROTECTION.
  void protect(std::string_view setting);
  int64_t gate();
  // Free tensors that no copy reads any more: after capture() those of the snapshot before, after
  // gate() all. With the GIL held: the last reference to a storage may free Python objects.
  void freeReplaced() { dropped_.reset(); }
  void freeCopied();

  SnapshotEngine& engine() { return *engine_; }
  const SnapshotEngine& engine() const { return *engine_; }
  Vault& vault() { return *vault_; }
  const Vault& vault() const { return *vault_; }
  const Protection& protection() const { return *protection_; }
  std::vector<DeviceStream> streams() const { return currentStreams(devices_); }

 private:
  class OnlyOne;  // the claim that this is the only Rank of the process
  EngineOptions engineOptions(const Start& start) const;
  std::chrono::nanoseconds slotWait(bool copied) const;
  void startVotes(const Start& start);
  void stop();

  const pid_t owner_;
  std::unique_ptr<OnlyOne> only_one_;
  std::shared_ptr<AgentClient> client_;
  const RankIdentity identity_;
  const uint64_t chunk_bytes_;
  const std::chrono::nanoseconds slot_wait_;
  const Protection* protection_;
  const std::vector<int> domain_of_;  // by rank
  const std::function<void(const std::function<void()>&)> hold_still_, let_go_;
  std::unique_ptr<Vault> vault_;
  std::unique_ptr<SnapshotEngine> engine_;
  std::unique_ptr<StoreCommit> commit_;
  std::shared_ptr<TensorVersions> held_;     // tensors of the newest snapshot
  std::shared_ptr<TensorVersions> dropped_;  // no longer read; freed where the GIL is held
  MemberNodes nodesOf(const GroupInfo& group) const;
  bool standsApart(const std::vector<const void*>& addresses);
  std::vector<RegionInfo> regions_;
  std::vector<const void*> addresses_;  // of the regions at the newest capture
  std::vector<int> devices_;            // of the regions of the newest snapshot
};

}  // namespace reft

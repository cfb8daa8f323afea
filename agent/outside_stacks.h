// The stacks of ranks that do not answer, read from their memory.
//
// Each is read by a thread of its own, `agent-outside`: a read waits for a page that a dead file system does not give, and then
// for ever. Such a thread is left behind.
//
// Threads: the agent's loop only. Errors: none: with too many threads left behind, a rank has no stacks, and that is said.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "hang_detect/remote_stack.h"

namespace reft::agent {

class OutsideStacks {
 public:
  // At most once for a rank.
  void read(int rank, int pid);
  bool asked(int rank) const { return found_ != nullptr && found_->ranks.count(rank) != 0; }
  // nullopt: not asked for, or not there yet.
  std::optional<RemoteStacks> of(int rank) const;

 private:
  struct Found {
    std::mutex mutex;
    std::map<int, std::shared_ptr<std::optional<RemoteStacks>>> ranks;  // keys change in the agent's loop only
  };
  std::shared_ptr<Found> found_;
};

}  // namespace reft::agent

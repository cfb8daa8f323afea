// The Python stacks of processes that cannot be asked, read from their memory: ranks that do not
// answer, and what ranks started.
//
// They are read by threads of their own, `agent-outside`: a read waits for a page that a dead file
// system does not give, and then for ever. Such a thread is left behind.
//
// Threads: the agent's loop only. Errors: none: with too many threads left behind there are no
// stacks, and that is said.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hang_detect/stacks/remote_stack.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class OutsideStacks {
 public:
  OutsideStacks() : OutsideStacks(-1) {}
  // `wake`: an eventfd that is written to when reads are done; -1: none.
  explicit OutsideStacks(int wake);
  // One thread reads these, one after the other; each process at most once.
  void read(const std::vector<int>& pids);
  bool asked(int pid) const { return found_->processes.count(pid) != 0; }
  bool done() const;  // all that was asked for is there
  // nullopt: not asked for, or not there yet.
  std::optional<RemoteStacks> of(int pid) const;

 private:
  struct Found {
    UniqueFd wake;
    std::mutex mutex;
    std::map<int, std::shared_ptr<std::optional<RemoteStacks>>>
        processes;  // keys change in the agent's loop only
  };
  std::shared_ptr<Found> found_;
};

}  // namespace reft::agent

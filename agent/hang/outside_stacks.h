// The Python stacks of processes that cannot be asked, read from their memory: ranks that do not
// answer, and processes that ranks started.
//
// Threads of their own, `agent-outside`, read them, because a read of a page that a dead file
// system holds never returns. Such a thread is left behind.
//
// Threads: the agent's loop only. Errors: none: with too many threads left behind, the result is an
// error text.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hang_detect/stacks/remote_stack.h"
#include "intercept/base/mutex.h"
#include "intercept/base/thread_annotations.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class OutsideStacks {
 public:
  struct Result {
    uint64_t look = 0;
    int pid = 0;
    RemoteStacks stacks;
  };

  // `wake`: an eventfd that is written to when results are there; -1: none.
  explicit OutsideStacks(int wake = -1);
  // One thread reads these, one after the other.
  void read(uint64_t look, const std::vector<int>& pids);
  // Results since the last call.
  std::vector<Result> finished();

 private:
  struct Shared {
    UniqueFd wake;
    Mutex mutex;
    std::vector<Result> finished GUARDED_BY(mutex);

    void add(Result result) EXCLUDES(mutex);
  };
  std::shared_ptr<Shared> shared_;  // threads that are left behind keep it
};

}  // namespace reft::agent

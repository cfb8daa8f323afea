// Runs `reft-unwind PID` for tools that ask for a rank's native frames.
//
// Reading native frames stops the rank for a moment. A process of its own does that, never the
// agent: a crash of it costs the vaults nothing. As the agent's child it may trace the ranks, which
// allow the agent and its children to do so where the kernel allows it to parents only (Yama).
//
// A thread of its own, `agent-native`, waits for each reader and kills it at the limit.
//
// Threads: the agent's loop only. Errors: start() throws InvalidArgument if too many readers run; a
// reader that fails gives an answer with its error.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "intercept/base/mutex.h"
#include "intercept/base/thread_annotations.h"

namespace reft::agent {

class NativeReaders {
 public:
  // `program`: by default reft-unwind in the folder of this program. `limit`: time until a reader
  // is killed.
  explicit NativeReaders(std::string program = besideThisProgram(),
                         std::chrono::milliseconds limit = std::chrono::seconds(15));

  void start(uint64_t requester, int pid);
  // Requester and JSON of the readers that have ended since the last call.
  std::vector<std::pair<uint64_t, std::string>> finished();

  static std::string besideThisProgram();

 private:
  struct Shared {
    Mutex mutex;
    size_t running GUARDED_BY(mutex) = 0;
    std::vector<std::pair<uint64_t, std::string>> finished GUARDED_BY(mutex);
  };
  std::string program_;
  std::chrono::milliseconds limit_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace reft::agent

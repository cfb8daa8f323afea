// `reft-agent --stack PID --native`, run for tools that ask for a rank's native frames.
//
// A process of its own holds the rank for a moment, never the agent. As the agent's child it may:
// ranks allow the agent, and its children, to trace them where the kernel allows that to parents
// only (Yama).
//
// Each reader is waited for by a thread of its own, `agent-native`, and killed if it takes too
// long.
//
// Threads: the agent's loop only. Errors: start() throws InvalidArgument if too many are under way;
// a reader that fails is an answer with its error.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace reft::agent {

class NativeReaders {
 public:
  // `program` is this one. `limit`: after that a reader is killed.
  explicit NativeReaders(std::string program = "/proc/self/exe",
                         std::chrono::milliseconds limit = std::chrono::seconds(15));

  void start(uint64_t requester, int pid);
  // Requester and JSON of those that are done, once each.
  std::vector<std::pair<uint64_t, std::string>> finished();

 private:
  struct Shared {
    std::mutex mutex;
    size_t under_way = 0;
    std::vector<std::pair<uint64_t, std::string>> finished;
  };
  std::string program_;
  std::chrono::milliseconds limit_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace reft::agent

// The agent's log, agent.log in its directory, which stderr leads to: bounded, and reopened
// where the directory moves.
//
// Threads: one at a time. Errors: none; without a file, lines go nowhere.
#pragma once

#include <cstdint>

namespace reft::agent {

class LogFile {
 public:
  static constexpr int64_t kMostBytes = 4 << 20;  // of agent.log; agent.log.1 has as many

  // `active` false: stderr is the user's, as with --foreground, and stays.
  explicit LogFile(bool active) : active_(active) {}

  // Begins a new agent.log, and keeps the old one as agent.log.1, if it is too long. `directory`:
  // open. Call each tick.
  void tend(int directory);
  // Leads stderr to agent.log in `directory`.
  void open(int directory);

 private:
  bool active_;
};

}  // namespace reft::agent

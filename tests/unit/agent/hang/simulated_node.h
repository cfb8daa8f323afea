// One node's agent in simulated time: the Investigation that ships, whose actions are executed on
// simulated ranks. What a rank's process, memory and op log show follows from SimulatedRanks; this
// class decides nothing.
//
// Threads: one. Errors: none.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "agent/hang/investigation.h"
#include "tests/unit/agent/hang/simulated_ranks.h"

namespace reft::agent {

class SimulatedNode {
 public:
  struct Hang {
    int64_t at_ns = 0;
    HangEvidence evidence;
    Verdict verdict;
  };

  SimulatedNode(int64_t suspect_ns, SimulatedClock& clock, uint64_t seed);

  // The node runs these ranks from now on.
  void join(SimulatedRanks* ranks);
  // Time of the next wake().
  int64_t nextNs() const;
  // Executes what is due.
  void wake();
  // The agent stood still: for so long from now on, or, with its machine, until now.
  void stoodStill(int64_t ns);

  const std::vector<Hang>& hangs() const { return hangs_; }
  int looks() const { return looks_; }  // for suspected hangs

 private:
  static constexpr int64_t kTickNs = kSec / 4;

  // Something that comes back later.
  struct Answer {
    int64_t at_ns = 0;
    uint64_t look = 0;
    int rank = -1;
    bool outside = false;  // from the rank's memory, not from the rank
    int64_t until_ns = 0;  // a rank that does not answer may still do so until then
  };

  void tick();
  void step();
  void learn();
  void execute();
  void execute(const action::Sample& action);
  void execute(const action::Count& action);
  void execute(const action::AskForStacks& action);
  void execute(const action::ReadOutside& action);
  void execute(const action::Examine& action);
  void execute(const action::WriteReport& action);
  void execute(const action::ReadHardware&) {}
  void execute(const action::AskNodes&) {}
  void execute(const action::AnswerNode&) {}
  void execute(const action::AnswerTool&) {}
  void execute(const action::Show&) {}
  void execute(const action::ShowAtLauncher&) {}
  void execute(const action::EndLauncher&) {}
  void execute(const action::Abort&) {}
  int64_t soon();

  SimulatedClock& clock_;
  std::mt19937_64 random_;
  Investigation investigation_;
  SimulatedRanks* ranks_ = nullptr;
  uint64_t incarnation_ = 0;
  std::set<int> ended_;
  int64_t next_tick_;
  std::vector<Answer> answers_;
  std::vector<Hang> hangs_;
  int looks_ = 0;
};

}  // namespace reft::agent

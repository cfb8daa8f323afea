// An agent in simulated time: what Agent::tick() and Agent::finishCollections() do about hangs in a
// job of one node, over the real HangWatch and the real verdict, with simulated processes in the
// place of /proc and sockets.
//
// Threads: one. Errors: none.
#pragma once

#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "tests/unit/agent/hang/simulated_ranks.h"

namespace reft::agent {

class SimulatedAgent {
 public:
  struct Hang {
    int64_t at_ns = 0;
    HangEvidence evidence;
    Verdict verdict;
  };

  SimulatedAgent(int64_t suspect_ns, SimulatedClock& clock, uint64_t seed)
      : suspect_ns_(suspect_ns),
        clock_(clock),
        random_(seed),
        watch_(suspect_ns, kTickNs),
        next_tick_(clock.now_ns) {}

  // These ranks from now on.
  void join(SimulatedRanks* ranks);
  // The next time at which it does something.
  int64_t nextNs() const;
  // Whatever is due at this time.
  void wake();
  // It was stopped, for so long from now on; or the machine was, until now.
  void stoodStill(int64_t ns);

  const std::vector<Hang>& hangs() const { return hangs_; }
  const HangEvidence& lastLook() const { return last_look_; }
  int looks() const { return looks_; }  // at which somebody was suspected

 private:
  static constexpr int64_t kTickNs = kSec / 4;

  struct Collection {
    bool crash = false, early = false;
    std::map<int, Noted> used;
    std::map<int, int64_t> reply_ns;   // that are to come
    std::map<int, std::string> texts;  // and have come
    std::set<int> answered;
    int64_t over_ns = 0;  // when those that do not answer have been read from outside
  };

  void tick();
  enum class Why { kSuspect, kCrash, kEarly };
  void collect(Why why);
  void replies(std::optional<Collection>& collection);
  void conclude(const Collection& collection);
  void note();

  int64_t suspect_ns_;
  SimulatedClock& clock_;
  std::mt19937_64 random_;
  HangWatch watch_;
  SimulatedRanks* ranks_ = nullptr;
  int64_t next_tick_;
  int64_t death_due_ns_ = 0;
  int64_t crash_again_ns_ = 0;
  std::map<int, Noted> noted_;
  std::map<int, int64_t> gone_ns_;
  std::optional<Collection> collection_, early_;
  std::vector<Hang> hangs_;
  HangEvidence last_look_;
  int looks_ = 0;
};

}  // namespace reft::agent

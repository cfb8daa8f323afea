// Ranks of a job that work and wait in simulated time, and write real op logs: what the hang watch
// is to make sense of.
//
// Each rank plays activities one after the other: work of some length, ops that last until all
// members have begun them, waits for ops that it has begun. What a rank's process and stack look
// like follows from what it is at.
//
// Threads: one. Errors: none.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/process_state.h"
#include "tests/unit/hang_detect/verdict/simulated_job.h"

namespace reft::agent {

using testing_evidence::kSec;
using testing_evidence::Layout;
using testing_evidence::Planned;

constexpr int64_t kNever = INT64_MAX;

class SimulatedClock final : public Clock {
 public:
  int64_t nowNs() const override { return now_ns; }
  int64_t now_ns = 1000 * kSec;
};

// A process at work or at rest, as its stack, the kernel and its counters show it.
struct Doing {
  std::string frames;  // of its main thread, as faulthandler prints them
  std::string state = "R";
  double processors = 1;
  int64_t io_per_sec = 0;
  std::string wait_channel = {};
  bool answers = true;  // when it is asked for its stacks
  int tracer_pid = 0;
};

struct Activity {
  enum class Kind {
    kWork,
    kOp,
    kAwait,  // until all ops of its that are under way are over
    kBye,
    kDie,
  };
  // How the caller meets an op.
  enum class How {
    kWait,    // waits for it
    kInCall,  // does not come back from the call until it is over
    kFuture,  // goes on, and somebody waits for its future later
    kDevice,  // goes on, and nobody tells the log that it is over
  };
  Kind kind = Kind::kWork;
  int64_t ns = 0;                // of work; of an op after all have begun it; kNever
  const Doing* doing = nullptr;  // of work and kAwait; static
  Planned op = {};
  uint32_t call_site = 0;
  How how = How::kWait;
};

class SimulatedRanks {
 public:
  // `more` is called when a rank has nothing left to do, and gives it something.
  SimulatedRanks(Layout layout, SimulatedClock& clock, std::function<void()> more);

  void push(int rank, Activity activity) {
    ranks_[static_cast<size_t>(rank)].plan.push_back(std::move(activity));
  }
  // Registers one more group of all ranks; its number.
  uint32_t addGroup();

  // All that happens until then.
  void play(int64_t until_ns);
  // The machine stood still until now.
  void stoodStill(int64_t ns);

  const Layout& layout() const { return layout_; }
  bool live(int rank) const;
  bool alive(int rank) const { return ranks_[static_cast<size_t>(rank)].alive; }
  bool saidBye(int rank) const { return ranks_[static_cast<size_t>(rank)].said_bye; }
  OpLogReader log(int rank) const;
  ProcessCounters used(int rank) const;
  const Doing& doing(int rank) const;
  // What is known about the process and the op log of a rank; its stacks are not.
  RankEvidence evidence(int rank) const;
  std::string stacks(int rank) const { return testing_evidence::stackOf(doing(rank).frames); }

 private:
  struct Open {  // op that is under way
    Planned op;
    uint32_t number = 0;
    uint64_t ticket = 0;
    int64_t ns = 0;
    Activity::How how = Activity::How::kWait;
    int64_t over_ns = kNever;
  };
  struct Rank {
    std::deque<Activity> plan;
    std::unique_ptr<OpLog> log;
    std::vector<uint32_t> seq;
    std::map<std::pair<OpKind, int>, uint32_t> messages;
    std::vector<Open> open;
    uint32_t p2p = 0;
    bool alive = true, said_bye = false;
    bool inside = false;    // an op that it waits for
    bool awaiting = false;  // all that are open
    int64_t next_ns = 0;    // its work is over
    const Doing* doing = nullptr;
    int64_t since_ns = 0;
    double cpu_ns = 0, io_bytes = 0;
  };

  int64_t nextOf(const Rank& rank) const;
  void happen(int number);
  void go(int number);
  void begin(int number, const Activity& activity);
  void over(Rank& rank, size_t open);
  void turnTo(Rank& rank, const Doing* doing);
  void account(Rank& rank) const;

  Layout layout_;
  SimulatedClock& clock_;
  std::function<void()> more_;
  std::vector<Rank> ranks_;
  testing_evidence::Rendezvous rendezvous_;
  uint32_t groups_ = testing_evidence::kGroups;
};

}  // namespace reft::agent

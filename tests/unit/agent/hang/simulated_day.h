// A day of training in simulated time: steps of all lengths, and at random whatever looks like a
// hang in healthy jobs; at its end one real hang.
//
// How long a healthy phase lasts is bounded by what docs/hang.md promises for it: Note [what the
// watch allows].
//
// Threads: one. Errors: none.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/agent/hang/simulated_node.h"

namespace reft::agent {

// What looks like a hang and is none.
enum class LookAlike {
  kEvaluationOfOne,
  kEvaluationOfAll,
  kCheckpointOfOne,
  kCheckpointOfAll,
  kGarbageCollection,
  kDataStall,
  kDataWarmUp,
  kMachineSuspended,
  kAgentStopped,
  kDebuggerAttached,
  kRollouts,
  kStraggler,
  kNewGroup,
  kHugeCollective,
  kCompilationOfOne,
  kCompilationOfAll,
  kProfileWritten,
  kIdle,
  kEndOfData,
  kKilledAndStartedAgain,
  kCount
};
const char* nameOf(LookAlike kind);

enum class RealHang {
  // One rank does something else instead of its next op.
  kSleeps,
  kLoops,
  kStopped,
  kDead,
  kShutsDown,
  kDataLoader,
  kPipe,
  kUninterruptible,
  kLock,
  kChild,
  kCheckpoint,
  kPrompt,
  // Something is wrong with an op.
  kStoppedInOp,
  kOtherSize,
  kOtherOp,
  kNetwork,
  // These are taken for slow first.
  kCompilesForever,
  kLoopsInEvaluation,
  kNewGroupNeverUp,
  kCount
};
const char* nameOf(RealHang kind);

class SimulatedDay {
 public:
  SimulatedDay(uint64_t seed, int64_t suspect_ns);

  // Healthy training for so long.
  void train(int64_t ns);

  struct Outcome {
    bool can_show = true;  // false: the log of a job on a device does not
    bool found = false;
    double after_sec = 0;   // from the instant at which the rank goes wrong
    double within_sec = 0;  // the bar
    bool named_right = false;
    Verdict verdict;
    int victim = -1;
  };
  // Some ordinary steps, then one rank goes wrong for good, until that is found or twice the bar is
  // over.
  Outcome hang(RealHang kind);
  const std::vector<SimulatedNode::Hang>& hangs() const { return node_.hangs(); }
  const std::map<LookAlike, int>& played() const { return played_; }
  int looks() const { return node_.looks(); }
  uint64_t steps() const { return steps_; }
  // The job, and what it was at last.
  std::string describe() const;

 private:
  void start();
  void run(int64_t until_ns);
  void step();
  void firstStep();
  LookAlike pick(LookAlike before);  // any of those
  void lookAlike(LookAlike kind);
  void end(bool clean);
  void ops(int victim, std::optional<RealHang> wrong);
  void goWrong();
  void breakDown(int rank, RealHang kind);

  // Between 0 and 1.
  double uniform();
  // All orders of magnitude are alike likely.
  int64_t between(int64_t least_ns, int64_t most_ns);
  // See Note [what the watch allows].
  int64_t alone();
  int64_t atWork();
  int64_t shortly();
  bool showsWork() const;

  void work(int rank, int64_t ns, const Doing& doing);
  void await(int rank, const Doing& doing);
  void op(int rank, const Planned& op, uint32_t call_site, Activity::How how, int64_t ns);
  void all(const Planned& op, uint32_t call_site, Activity::How how, int64_t ns);
  void barrier(uint32_t call_site);

  std::mt19937_64 random_;
  int64_t suspect_ns_;
  SimulatedClock clock_;
  SimulatedNode node_;

  // The job that runs.
  Layout layout_;
  Activity::How how_ = Activity::How::kWait;
  int64_t step_ns_ = 0;
  double jitter_ = 0;
  std::unique_ptr<SimulatedRanks> ranks_;
  bool begun_ = false;   // its first step is planned
  bool ending_ = false;  // its last one is
  int64_t restart_at_ns_ = kNever;

  uint64_t steps_ = 0, next_look_alike_ = 0;
  LookAlike last_ = LookAlike::kCount;
  std::map<LookAlike, int> played_;
  // Look-alikes that last for some steps.
  int straggles_ = 0, straggler_ = 0, rollouts_ = 0, new_group_steps_ = 0;
  int64_t straggler_ns_ = 0, rollout_ns_ = 0;
  uint32_t new_group_ = 0;
  int64_t suspend_at_ns_ = kNever, stop_agent_at_ns_ = kNever, still_ns_ = 0;

  std::optional<RealHang> wrong_;
  int ordinary_ = 0;  // steps that are left before it
  int victim_ = -1;
  int64_t wrong_ns_ = kNever;
};

}  // namespace reft::agent

#include "tests/unit/agent/hang/simulated_day.h"

#include <algorithm>
#include <cmath>

// Note [what the watch allows]
// Phases of a healthy job are drawn as long as docs/hang.md lets them be, S being
// REFT_HANG_SUSPECT_SEC:
// - alone(): minutes, where no rank waits for another;
// - atWork(): up to 10 S (and 10 min), where others wait at a place where they seldom do, or for
//   somebody who keeps a processor busy, compiles, writes a profile, is traced or moves bytes. The
//   latter only in jobs that need less than a quarter of S
//   from op to op (showsWork()): who comes out of such work needs as long to come to the op, and
//   nothing tells then why the others wait;
// - shortly(): less than S, where others wait at a place where they always wait, and nothing tells
// why. What the ranks wait for each other anyway, because of their jitter, is taken off.

namespace reft::agent {

namespace {

using testing_evidence::kData;
using testing_evidence::kStage;
using testing_evidence::kWorld;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kMinute = 60 * kSec;

#define PACKAGE "/x/site-packages/torch/"
#define FRAME(file, function) "  File \"" file "\", line 1 in " function "\n"
#define OWN(line, function) "  File \"/home/u/train.py\", line " #line " in " function "\n"
#define BOTTOM OWN(160, "<module>")

const Doing kCompute{FRAME("/home/u/model.py", "forward") OWN(130, "step") BOTTOM};
const Doing kBackward{
    FRAME(PACKAGE "autograd/graph.py", "_engine_run_backward") OWN(133, "step") BOTTOM, "S", 0.1};
const Doing kItem{OWN(140, "step") BOTTOM};  // waits for the device, on a processor
const Doing kEvaluate{FRAME("/home/u/model.py", "forward") OWN(80, "evaluate") BOTTOM};
const Doing kCollect{
    FRAME("/home/u/model.py", "forward") OWN(130, "step") BOTTOM, "R", 1, 0, "", false};
const Doing kLoad{FRAME(PACKAGE "utils/data/dataloader.py", "_try_get_data") OWN(120, "batches")
                      BOTTOM,
                  "S", 0.02};
const Doing kIndex{FRAME("/home/u/data.py", "build_index") OWN(30, "main") BOTTOM};
const Doing kRead{FRAME(PACKAGE "serialization.py", "load") OWN(40, "main") BOTTOM, "D", 0.3,
                  300 << 20, "folio_wait_bit"};
const Doing kCompile{FRAME(PACKAGE "_inductor/compile_fx.py", "compile_fx") OWN(130, "step")
                         BOTTOM};
const Doing kProfile{FRAME(PACKAGE "profiler/profiler.py", "stop_trace") OWN(150, "main") BOTTOM,
                     "R", 1, 1 << 20};
const Doing kTraced{FRAME("/home/u/model.py", "forward") OWN(130, "step") BOTTOM,
                    "t",
                    0,
                    0,
                    "ptrace_stop",
                    false,
                    77};
const Doing kGenerate{FRAME("/home/u/rollout.py", "generate") OWN(100, "collect") BOTTOM};
const Doing kSleep{OWN(145, "pause") BOTTOM, "S", 0, 0, "hrtimer_nanosleep"};
const Doing kUpload{FRAME("/home/u/upload.py", "send_results") BOTTOM, "S", 0.1, 20 << 20,
                    "sk_wait_data"};
const Doing kDestroy{
    FRAME(PACKAGE "distributed/distributed_c10d.py", "destroy_process_group") BOTTOM, "S", 0.1};
const Doing kSaves[] = {
    {FRAME(PACKAGE "serialization.py", "_save") OWN(90, "save") BOTTOM, "R", 0.8, 200 << 20},
    {FRAME(PACKAGE "serialization.py", "_save") OWN(90, "save") BOTTOM, "D", 0.2, 500 << 20,
     "balance_dirty_pages"},
    {FRAME("/home/u/store.py", "write") OWN(90, "save") BOTTOM, "S", 0.3, 5 << 20,
     "sk_stream_wait_memory"},
};
// What goes wrong.
const Doing kSleeps{OWN(122, "load_batch") BOTTOM, "S", 0, 0, "hrtimer_nanosleep"};
const Doing kLoops{OWN(123, "find") BOTTOM};
const Doing kStopped{OWN(130, "step") BOTTOM, "T", 0, 0, "do_signal_stop", false};
const Doing kPipe{OWN(124, "read_line") BOTTOM, "S", 0, 0, "pipe_read"};
const Doing kDisk{OWN(125, "read_file") BOTTOM, "D", 0, 0, "rpc_wait_bit_killable", false};
const Doing kLock{FRAME("/usr/lib/python3.11/threading.py", "wait") OWN(126, "take") BOTTOM, "S", 0,
                  0, "futex_wait_queue"};
const Doing kChild{FRAME("/usr/lib/python3.11/subprocess.py", "_try_wait") OWN(127, "fetch") BOTTOM,
                   "S", 0, 0, "do_wait"};
const Doing kSaveStands{FRAME(PACKAGE "serialization.py", "_save") OWN(90, "save") BOTTOM, "S", 0,
                        0, "rpc_wait_bit_killable"};
const Doing kPrompt{FRAME("/usr/lib/python3.11/pdb.py", "interaction") OWN(128, "check") BOTTOM,
                    "S", 0, 0, "n_tty_read"};

enum : uint32_t {  // call sites besides those of a step
  kAfterEvaluation = 100,
  kAfterCheckpoint,
  kAfterIndex,
  kAfterRollout,
  kOfNewGroup,
  kOfHugeTensor,
  kAtEnd,
};

// One rank does something else instead of its next op, or dies.
bool goesWrongBetweenOps(RealHang kind) {
  return kind < RealHang::kStoppedInOp;
}

}  // namespace

const char* nameOf(LookAlike kind) {
  static constexpr const char* kNames[] = {"evaluation of one",  "evaluation of all",
                                           "checkpoint of one",  "checkpoint of all",
                                           "garbage collection", "data stall",
                                           "data warm-up",       "machine suspended",
                                           "agent stopped",      "debugger attached",
                                           "rollouts",           "straggler",
                                           "new group",          "huge collective",
                                           "compilation of one", "compilation of all",
                                           "profile written",    "idle",
                                           "end of data",        "killed and started again"};
  return kind == LookAlike::kCount ? "none" : kNames[static_cast<size_t>(kind)];
}

const char* nameOf(RealHang kind) {
  static constexpr const char* kNames[] = {"sleeps",
                                           "loops",
                                           "stopped",
                                           "dead",
                                           "shuts down",
                                           "data loader",
                                           "pipe",
                                           "disk",
                                           "lock",
                                           "child",
                                           "checkpoint stands",
                                           "prompt",
                                           "stopped in an op",
                                           "other size",
                                           "other op",
                                           "network",
                                           "compiles for ever",
                                           "loops in evaluation",
                                           "new group never up"};
  return kNames[static_cast<size_t>(kind)];
}

SimulatedDay::SimulatedDay(uint64_t seed, int64_t suspect_ns)
    : random_(seed), suspect_ns_(suspect_ns), node_(suspect_ns, clock_, seed) {
  start();
}

double SimulatedDay::uniform() {
  return static_cast<double>(random_() >> 11) * 0x1p-53;
}

int64_t SimulatedDay::between(int64_t least_ns, int64_t most_ns) {
  return static_cast<int64_t>(
      static_cast<double>(least_ns) *
      std::pow(static_cast<double>(std::max(most_ns, least_ns)) / static_cast<double>(least_ns),
               uniform()));
}

int64_t SimulatedDay::alone() {
  return between(kSec, 30 * kMinute);
}

int64_t SimulatedDay::atWork() {
  const auto apart = static_cast<int64_t>(static_cast<double>(step_ns_) * (jitter_ + 0.1));
  return between(suspect_ns_ / 3, std::min(10 * kMinute, suspect_ns_ * 98 / 10 - apart - kSec / 2));
}

bool SimulatedDay::showsWork() const {
  size_t least = SIZE_MAX;
  for (int r = 0; r < layout_.world(); ++r) {
    least = std::min(least, layout_.step(r).size());
  }
  return static_cast<double>(step_ns_) / static_cast<double>(least) * (1 + jitter_) * 4 <
         static_cast<double>(suspect_ns_);
}

int64_t SimulatedDay::shortly() {
  const auto apart = static_cast<int64_t>(static_cast<double>(step_ns_) * jitter_);
  return between(100 * kMs, std::min(kMinute, suspect_ns_ * 85 / 100 - apart));
}

std::string SimulatedDay::describe() const {
  const char* how = how_ == Activity::How::kWait     ? "waits"
                    : how_ == Activity::How::kFuture ? "futures"
                                                     : "device";
  return std::to_string(layout_.tensor) + "x" + std::to_string(layout_.data) + "x" +
         std::to_string(layout_.stages) + ", " + how + ", steps of " +
         std::to_string(step_ns_ / kMs) + " ms +- " +
         std::to_string(static_cast<int>(jitter_ * 100)) + " %, step " + std::to_string(steps_) +
         ", at " + std::to_string(clock_.now_ns / kSec - 1000) +
         " s, last look-alike: " + nameOf(last_);
}

// A job begins, or begins again.
void SimulatedDay::start() {
  static constexpr Layout kLayouts[] = {{1, 4, 1}, {2, 2, 1}, {1, 2, 2}, {2, 2, 2},
                                        {1, 1, 4}, {1, 8, 1}, {1, 2, 1}};
  static constexpr Activity::How kHows[] = {Activity::How::kWait, Activity::How::kFuture,
                                            Activity::How::kDevice};
  layout_ = kLayouts[random_() % std::size(kLayouts)];
  how_ = kHows[random_() % std::size(kHows)];
  step_ns_ = between(50 * kMs, 20 * kSec);
  jitter_ = 0.3 * uniform() * uniform();
  straggles_ = rollouts_ = new_group_steps_ = 0;
  begun_ = ending_ = false;
  ranks_ = std::make_unique<SimulatedRanks>(layout_, clock_, [this] { step(); });
  node_.join(ranks_.get());
  next_look_alike_ = steps_ + 20;
}

void SimulatedDay::work(int rank, int64_t ns, const Doing& doing) {
  Activity activity;
  activity.ns = ns;
  activity.doing = &doing;
  ranks_->push(rank, activity);
}

void SimulatedDay::op(int rank, const Planned& op, uint32_t call_site, Activity::How how,
                      int64_t ns) {
  Activity activity;
  activity.kind = Activity::Kind::kOp;
  activity.ns = ns;
  activity.op = op;
  activity.call_site = call_site;
  activity.how = how;
  ranks_->push(rank, activity);
}

void SimulatedDay::all(const Planned& planned, uint32_t call_site, Activity::How how, int64_t ns) {
  for (int r = 0; r < layout_.world(); ++r) {
    op(r, planned, call_site, how, ns);
  }
}

void SimulatedDay::barrier(uint32_t call_site) {
  all({OpKind::kBarrier, kWorld}, call_site, Activity::How::kWait, kMs);
}

void SimulatedDay::run(int64_t until_ns) {
  while (clock_.now_ns < until_ns) {
    const int64_t suspend_ns = std::max(suspend_at_ns_, clock_.now_ns);
    const int64_t stop_ns = std::max(stop_agent_at_ns_, clock_.now_ns);
    const int64_t next =
        std::min({std::max(node_.nextNs(), clock_.now_ns), until_ns, suspend_ns, stop_ns});
    ranks_->play(next);
    if (next == suspend_ns) {
      suspend_at_ns_ = kNever;
      clock_.now_ns += still_ns_;
      ranks_->stoodStill(still_ns_);
      node_.stoodStill(still_ns_ - static_cast<int64_t>(uniform() * 200 * kMs));
    } else if (next == stop_ns) {
      stop_agent_at_ns_ = kNever;
      node_.stoodStill(still_ns_);
    } else {
      node_.wake();
    }
    bool anybody = false;
    for (int r = 0; r < layout_.world(); ++r) {
      anybody = anybody || ranks_->live(r);
    }
    if (!anybody && restart_at_ns_ == kNever) {
      restart_at_ns_ = clock_.now_ns + between(5 * kSec, 2 * kMinute);
    } else if (clock_.now_ns >= restart_at_ns_) {
      restart_at_ns_ = kNever;
      start();
    }
  }
}

void SimulatedDay::train(int64_t ns) {
  run(clock_.now_ns + ns);
}

// All ranks get their next step.
void SimulatedDay::step() {
  ++steps_;
  if (ending_) {
    return;
  }
  if (!begun_) {
    begun_ = true;
    firstStep();
  } else if (wrong_ && --ordinary_ <= 0) {
    goWrong();
    return;
  } else if (!wrong_ && steps_ >= next_look_alike_) {
    last_ = pick(LookAlike::kCount);
    ++played_[last_];
    lookAlike(last_);
    const auto usual = std::max<int64_t>(20, 2 * kMinute / step_ns_);
    next_look_alike_ = steps_ + static_cast<uint64_t>(between(2, usual));
  }
  if (!ending_) {
    ops(-1, {});
  }
}

// Loading, warming up and compiling; places where nobody has waited before.
void SimulatedDay::firstStep() {
  for (int r = 0; r < layout_.world(); ++r) {
    work(r, between(kMs, kSec), kSleep);
    if (uniform() < 0.5) {
      work(r, atWork() / 2, kRead);
    }
  }
  if (uniform() < 0.5) {
    work(0, atWork() / 2, kIndex);
    barrier(kAfterIndex);
  }
  const int64_t compiles_ns = between(kSec, 10 * kMinute);
  for (int r = 0; r < layout_.world(); ++r) {
    work(r, compiles_ns + atWork() / 2, kCompile);
  }
}

LookAlike SimulatedDay::pick(LookAlike before) {
  for (;;) {
    const auto kind = static_cast<LookAlike>(random_() % static_cast<uint64_t>(before));
    const bool by_work =
        kind == LookAlike::kCheckpointOfOne || kind == LookAlike::kCheckpointOfAll ||
        kind == LookAlike::kDebuggerAttached || kind == LookAlike::kCompilationOfOne ||
        kind == LookAlike::kCompilationOfAll || kind == LookAlike::kProfileWritten;
    if (!by_work || showsWork()) {
      return kind;
    }
  }
}

void SimulatedDay::lookAlike(LookAlike kind) {
  const int one = static_cast<int>(random_() % static_cast<uint64_t>(layout_.world()));
  const auto everybody = [&](int64_t ns, const Doing& doing, int64_t apart_ns) {
    for (int r = 0; r < layout_.world(); ++r) {
      work(r, ns + static_cast<int64_t>(uniform() * static_cast<double>(apart_ns)), doing);
    }
  };
  switch (kind) {
    case LookAlike::kEvaluationOfOne:
      work(one, atWork(), kEvaluate);
      barrier(kAfterEvaluation);
      break;
    case LookAlike::kEvaluationOfAll: everybody(alone(), kEvaluate, shortly()); break;
    case LookAlike::kCheckpointOfOne:
    case LookAlike::kCheckpointOfAll:
      for (int r = 0; r < layout_.world(); ++r) {
        if (kind == LookAlike::kCheckpointOfAll || r == one) {
          work(r, atWork(), kSaves[random_() % std::size(kSaves)]);
        }
      }
      if (uniform() < 0.5) {
        barrier(kAfterCheckpoint);
      }
      break;
    case LookAlike::kGarbageCollection: work(one, atWork(), kCollect); break;
    case LookAlike::kDataStall: work(one, shortly(), kLoad); break;
    case LookAlike::kDataWarmUp: everybody(alone(), kLoad, shortly()); break;
    case LookAlike::kMachineSuspended:
    case LookAlike::kAgentStopped:
      (kind == LookAlike::kAgentStopped ? stop_agent_at_ns_ : suspend_at_ns_) =
          clock_.now_ns + static_cast<int64_t>(uniform() * static_cast<double>(step_ns_));
      still_ns_ = between(kSec / 2, 20 * kMinute);
      if (uniform() < 0.5) {  // in the midst of another
        lookAlike(pick(LookAlike::kMachineSuspended));
      }
      break;
    case LookAlike::kDebuggerAttached: work(one, std::min(atWork(), kMinute), kTraced); break;
    case LookAlike::kRollouts:
      rollouts_ = 5 + static_cast<int>(random_() % 20);
      rollout_ns_ = atWork();
      break;
    case LookAlike::kStraggler:
      straggles_ = 20 + static_cast<int>(random_() % 80);
      straggler_ = one;
      straggler_ns_ = std::min(step_ns_, shortly());
      break;
    case LookAlike::kNewGroup:
      new_group_ = ranks_->addGroup();
      new_group_steps_ = static_cast<int>(random_() % 20);
      // Its communicator is made in its first op.
      all({OpKind::kAllreduce, new_group_}, kOfNewGroup, Activity::How::kInCall,
          std::min(atWork(), 3 * kMinute));
      break;
    case LookAlike::kHugeCollective:
      all({OpKind::kAllgather, kWorld}, kOfHugeTensor, Activity::How::kWait, atWork());
      break;
    case LookAlike::kCompilationOfOne: work(one, atWork(), kCompile); break;
    case LookAlike::kCompilationOfAll:
      for (int r = 0, base = static_cast<int>(1 + random_() % 300); r < layout_.world(); ++r) {
        work(r, base * kSec + atWork(), kCompile);
      }
      break;
    case LookAlike::kProfileWritten: work(one, std::min(atWork(), kMinute), kProfile); break;
    case LookAlike::kIdle: everybody(alone(), kSleep, 200 * kMs); break;
    case LookAlike::kEndOfData: end(/*clean=*/true); break;
    case LookAlike::kKilledAndStartedAgain: end(/*clean=*/false); break;
    case LookAlike::kCount: break;
  }
}

void SimulatedDay::end(bool clean) {
  ending_ = true;
  if (clean) {
    barrier(kAtEnd);
  }
  for (int r = 0; r < layout_.world(); ++r) {
    // A launcher ends the others within the second.
    work(r, between(kMs, clean ? 5 * kSec : kSec), clean ? kDestroy : kCompute);
    if (clean && r == 0) {
      work(r, alone(), kUpload);
    }
    Activity last;
    last.kind = clean ? Activity::Kind::kBye : Activity::Kind::kDie;
    ranks_->push(r, last);
  }
}

// One ordinary step; with what goes wrong in it.
void SimulatedDay::ops(int victim, std::optional<RealHang> wrong) {
  const int64_t rollout_ns = rollouts_ > 0 ? rollout_ns_ : 0;
  const uint32_t new_group = new_group_steps_ > 0 ? new_group_ : 0;
  const int straggler = straggles_ > 0 ? straggler_ : -1;
  rollouts_ -= rollouts_ > 0 ? 1 : 0;
  straggles_ -= straggles_ > 0 ? 1 : 0;
  new_group_steps_ -= new_group_steps_ > 0 ? 1 : 0;
  const double where = uniform();  // of its ops
  for (int r = 0; r < layout_.world(); ++r) {
    if (rollout_ns > 0) {
      if (r != 0) {
        work(r, static_cast<int64_t>(static_cast<double>(rollout_ns) * (0.5 + 0.5 * uniform())),
             kGenerate);
      }
      op(r, {OpKind::kBroadcast, kWorld, 0}, kAfterRollout, Activity::How::kWait, kMs);
    }
    const std::vector<Planned> plan = layout_.step(r);
    const double piece = 0.9 * static_cast<double>(step_ns_) * (1 + jitter_ * uniform()) /
                         static_cast<double>(plan.size());
    const auto wrong_at = wrong && r == victim
                              ? static_cast<size_t>(where * static_cast<double>(plan.size()))
                              : SIZE_MAX;
    for (size_t i = 0; i < plan.size(); ++i) {
      work(r, static_cast<int64_t>(piece) + (i == 0 && r == straggler ? straggler_ns_ : 0),
           kCompute);
      Planned planned = plan[i];
      int64_t ns = 100'000 + step_ns_ / 100;
      const bool of_world = planned.group == kWorld;
      auto how =
          how_ == Activity::How::kFuture && planned.group != kData ? Activity::How::kWait : how_;
      if (i == wrong_at && (goesWrongBetweenOps(*wrong) || *wrong == RealHang::kCompilesForever)) {
        breakDown(r, *wrong);
      }
      if (wrong && of_world && *wrong == RealHang::kNetwork) {
        ns = kNever;
      }
      if (wrong && of_world && r == victim) {
        planned.signature = *wrong == RealHang::kOtherSize ? 8 : planned.signature;
        planned.kind = *wrong == RealHang::kOtherOp ? OpKind::kBarrier : planned.kind;
      }
      if (wrong && of_world && *wrong == RealHang::kStoppedInOp) {
        ns = kNever;
        how = r == victim ? Activity::How::kFuture : how;
      }
      const bool second_half = i * 2 >= plan.size();
      const uint32_t site =
          1 + planned.group * 4 + (planned.kind == OpKind::kSend ? 1 : 0) + (second_half ? 2 : 0);
      op(r, planned, site, how, ns);
      if (wrong && of_world && r == victim && *wrong == RealHang::kStoppedInOp) {
        work(r, kNever, kStopped);
      }
      if (planned.group == kData && how == Activity::How::kFuture) {
        await(r, kBackward);
      }
    }
    if (how_ == Activity::How::kDevice) {
      await(r, kItem);
    }
    if (new_group > 0) {
      op(r, {OpKind::kAllreduce, new_group}, kOfNewGroup + 100, Activity::How::kWait, kMs);
    }
  }
}

void SimulatedDay::await(int rank, const Doing& doing) {
  Activity activity;
  activity.kind = Activity::Kind::kAwait;
  activity.doing = &doing;
  ranks_->push(rank, activity);
}

void SimulatedDay::breakDown(int rank, RealHang kind) {
  switch (kind) {
    case RealHang::kDead: {
      Activity dies;
      dies.kind = Activity::Kind::kDie;
      ranks_->push(rank, dies);
      break;
    }
    case RealHang::kLoops: work(rank, kNever, kLoops); break;
    case RealHang::kStopped: work(rank, kNever, kStopped); break;
    case RealHang::kShutsDown: work(rank, kNever, kDestroy); break;
    case RealHang::kDataLoader: work(rank, kNever, kLoad); break;
    case RealHang::kPipe: work(rank, kNever, kPipe); break;
    case RealHang::kUninterruptible: work(rank, kNever, kDisk); break;
    case RealHang::kLock: work(rank, kNever, kLock); break;
    case RealHang::kChild: work(rank, kNever, kChild); break;
    case RealHang::kCheckpoint: work(rank, kNever, kSaveStands); break;
    case RealHang::kPrompt: work(rank, kNever, kPrompt); break;
    case RealHang::kCompilesForever: work(rank, kNever, kCompile); break;
    case RealHang::kLoopsInEvaluation: work(rank, kNever, kEvaluate); break;
    default: work(rank, kNever, kSleeps); break;
  }
}

void SimulatedDay::goWrong() {
  victim_ = static_cast<int>(random_() % static_cast<uint64_t>(layout_.world()));
  wrong_ns_ = clock_.now_ns;
  if (*wrong_ == RealHang::kLoopsInEvaluation) {
    breakDown(victim_, *wrong_);
    barrier(kAfterEvaluation);
  } else if (*wrong_ == RealHang::kNewGroupNeverUp) {
    all({OpKind::kAllreduce, ranks_->addGroup()}, kOfNewGroup, Activity::How::kInCall, kNever);
  }
  ops(victim_, wrong_);
}

SimulatedDay::Outcome SimulatedDay::hang(RealHang kind) {
  constexpr int kOrdinarySteps = 40;
  // The agent is to be there.
  while (node_.nextNs() > clock_.now_ns + kSec || suspend_at_ns_ != kNever ||
         stop_agent_at_ns_ != kNever) {
    train(kSec);
  }
  wrong_ = kind;
  ordinary_ = kOrdinarySteps;
  rollouts_ = straggles_ = new_group_steps_ = 0;
  while (wrong_ns_ == kNever) {
    train(kSec);
  }
  const size_t before = node_.hangs().size();
  // Nothing excuses these; the others are taken for slow while they keep a processor busy, where
  // nobody has waited before, or where that is not known.
  const bool plain = kind == RealHang::kStopped || kind == RealHang::kShutsDown ||
                     kind == RealHang::kPrompt ||
                     (how_ != Activity::How::kDevice && kind < RealHang::kCompilesForever &&
                      kind != RealHang::kLoops);
  const double suspect_sec = static_cast<double>(suspect_ns_) * 1e-9;
  const double step_sec = static_cast<double>(step_ns_) * 1e-9 * (1 + jitter_);
  Outcome outcome;
  outcome.can_show =
      how_ != Activity::How::kDevice || kind < RealHang::kStoppedInOp || kind > RealHang::kNetwork;
  outcome.victim = victim_;
  if (!outcome.can_show) {
    return outcome;
  }
  // Until the others wait; two ticks; the time for stacks.
  outcome.within_sec = 2 * step_sec + 0.5 + 2.2;
  if (kind == RealHang::kDead) {
    outcome.within_sec += 2;
  } else if (!plain) {
    outcome.within_sec += 11 * suspect_sec;
  } else if (4 * step_sec <= suspect_sec) {
    outcome.within_sec += suspect_sec;
  } else {
    // They wait so long for each other anyway that more looks are needed.
    outcome.within_sec += std::min(10 * suspect_sec, 4 * step_sec) + suspect_sec;
  }
  const auto give_up_ns = wrong_ns_ + static_cast<int64_t>(outcome.within_sec * 2e9);
  while (clock_.now_ns < give_up_ns && node_.hangs().size() == before) {
    run(clock_.now_ns + kSec / 4);
  }
  if (node_.hangs().size() > before) {
    const SimulatedNode::Hang& found = node_.hangs()[before];
    outcome.found = true;
    outcome.after_sec = static_cast<double>(found.at_ns - wrong_ns_) * 1e-9;
    outcome.verdict = found.verdict;
    const auto ranks = testing_evidence::ranksOf(found.verdict.culprits);
    // Nobody is to be named where all have begun the op; of two who disagree, either may be wrong.
    const bool open = kind == RealHang::kNetwork || kind == RealHang::kNewGroupNeverUp ||
                      kind == RealHang::kOtherSize || kind == RealHang::kOtherOp;
    outcome.named_right = ranks == std::vector<int>{victim_} || (open && ranks.empty());
  }
  return outcome;
}

}  // namespace reft::agent

#include "snapshot/placement/simulate/simulator.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>

#include "intercept/base/error.h"
#include "intercept/base/hash.h"
#include "snapshot/placement/simulate/noise.h"
#include "snapshot/placement/simulate/trace_log.h"

namespace reft::simulate {

namespace {

constexpr int64_t kUnknown = -1;
constexpr uint32_t kPipelineGroup = 0;
constexpr uint32_t kReplicaGroup = 1;

enum class Activity : uint8_t { kCompute, kCommunication, kIdle };

struct CopySpan {
  int64_t begin_ns, end_ns;
};

struct Rank {
  Rank(int rank_stage, int rank_replica, const PlacerOptions& options)
      : stage(rank_stage), replica(rank_replica), placer(options) {}
  int stage, replica;
  Placer placer;
  int64_t now_ns = 0;
  size_t next_action = 0;
  bool waiting = false;  // for a collective; the placer knows of its begin
  int64_t wait_begin_ns = 0;

  bool copying = false;
  uint64_t chunk = 0;
  double chunk_left = 0;
  Tier chunk_tier = Tier::kCompute;
  int64_t chunk_begin_ns = 0;
  int64_t retry_ns = 0;
  uint32_t in_flight = 0;            // collectives in flight
  std::vector<CopySpan> copy_spans;  // copies of this step

  int64_t counted_from_ns = 0;
  double bubble_ns = 0, exposed_ns = 0, stall_ns = 0;
  std::array<double, kTiers> bytes{};
  uint64_t snapshots = 0;
};

struct Collective {
  int started = 0;
  int waiting = 0;
  int64_t start_ns = 0;  // time when all members have started it
  int64_t end_ns = kUnknown;
  int64_t work_ns = 0;
};

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options)
      : options_(options),
        schedule_(makeSchedule(options.schedule)),
        stages_(static_cast<int>(schedule_.stages.size())),
        replicas_(options.schedule.replicas),
        cadence_(
            {.limit_ppm = static_cast<int64_t>(options.overhead_limit * 1e6), .decides = true}),
        control_steps_(options.control_every) {
    if (options.steps <= options.warm_up_steps || options.warm_up_steps < 0 ||
        !(options.copy_bytes_per_sec > 0) || !(options.compute_slowdown >= 1) ||
        !(options.communication_slowdown >= 1) || !(options.jitter >= 0)) {
      throw InvalidArgument(
          "no such simulation: there have to be more steps than warm_up_steps, a positive copy "
          "rate, slowdowns of at "
          "least 1");
    }
    bytes_per_ns_ = options.copy_bytes_per_sec / 1e9;
    for (int replica = 0; replica < replicas_; ++replica) {
      for (int stage = 0; stage < stages_; ++stage) {
        PlacerOptions placer = options.placer;
        placer.bytes_per_sec = options.copy_bytes_per_sec;
        placer.stages = stages_;
        placer.stage = stage;
        placer.micro_batch_ns = options.schedule.forward_ns + options.schedule.backward_ns;
        ranks_.push_back(std::make_unique<Rank>(stage, replica, placer));
      }
    }
    arrivals_.resize(static_cast<size_t>(replicas_) * schedule_.messages);
    receivers_.resize(arrivals_.size());
    collectives_.resize(static_cast<size_t>(stages_) * schedule_.collectives);
    traced_ = std::max(options.trace_rank, 0);
  }

  SimulationResult run() {
    SimulationResult result;
    for (step_ = 0; step_ < options_.steps; ++step_) {
      if (step_ == options_.warm_up_steps) {
        startCounting();
      }
      const int64_t before = ranks_.front()->now_ns;
      runStep();
      result.step_ns.push_back(static_cast<double>(ranks_.front()->now_ns - before));
      const ScheduleModel::Errors errors = tracedRank().placer.model().errors();
      // The model closes a step at the next program point, so its errors are those of the previous
      // step.
      if (step_ > 0) {
        const bool foretold = errors.foretold_gaps > foretold_before_;
        result.step_errors.push_back(foretold ? errors.last_weighted : -1);
      }
      foretold_before_ = errors.foretold_gaps;
    }
    summarise(result);
    return result;
  }

 private:
  Rank& tracedRank() { return *ranks_[std::min(static_cast<size_t>(traced_), ranks_.size() - 1)]; }
  Rank& rankAt(int replica, int stage) {
    return *ranks_[static_cast<size_t>(replica) * static_cast<size_t>(stages_) +
                   static_cast<size_t>(stage)];
  }
  const std::vector<Action>& actionsOf(const Rank& rank) const {
    return schedule_.stages[static_cast<size_t>(rank.stage)];
  }
  Collective& collectiveOf(const Rank& rank, uint32_t id) {
    return collectives_[static_cast<size_t>(rank.stage) * schedule_.collectives + id];
  }
  size_t messageAt(const Rank& rank, uint32_t id) const {
    return static_cast<size_t>(rank.replica) * schedule_.messages + id;
  }

  void startCounting() {
    for (const auto& rank : ranks_) {
      rank->counted_from_ns = rank->now_ns;
      rank->bubble_ns = rank->exposed_ns = rank->stall_ns = 0;
      rank->bytes.fill(0);
      rank->snapshots = 0;
    }
  }

  void runStep() {
    std::fill(arrivals_.begin(), arrivals_.end(), kUnknown);
    std::fill(receivers_.begin(), receivers_.end(), nullptr);
    std::fill(collectives_.begin(), collectives_.end(), Collective());
    ready_.clear();
    chooseCadence();
    for (const auto& rank : ranks_) {
      beginStep(*rank);
      ready_.push_back(rank.get());
    }
    begun_ns_ = ranks_.front()->now_ns;
    size_t finished = 0;
    while (!ready_.empty()) {
      Rank& rank = *ready_.front();
      ready_.pop_front();
      advance(rank);
      finished += rank.next_action == actionsOf(rank).size() ? 1 : 0;
    }
    if (finished != ranks_.size()) {
      throw InvalidArgument("schedule", "waiting for itself",
                            "actions of which some rank can go on");
    }
  }

  // Rank 0 measures and decides; all ranks apply its decision at once.
  void chooseCadence() {
    if (options_.overhead_limit <= 0) {
      return;
    }
    const int64_t now_ns = ranks_.front()->now_ns;
    if (step_ > 0) {
      meter_.step(control_steps_.block(step_ - 1),
                  now_ns - (taken_ && !control_ ? point_ns_ : begun_ns_), taken_ && !control_);
      cadence_.learn(meter_.overhead());
      cadence_.committed(step_, cadence_.proposal());
    } else {
      control_steps_.beginAt(0);
    }
    point_ns_ = now_ns;
    const uint64_t before = cadence_.every();
    taken_ = cadence_.ask(step_, true) == Cadence::Answer::kTake;
    if (cadence_.every() != before) {
      control_steps_.beginAt(step_);
      meter_.restart(control_steps_.block(step_));
    }
    control_ = taken_ && cadence_.every() == 1 && control_steps_.drawn(step_);
  }

  void beginStep(Rank& rank) {
    rank.next_action = 0;
    rank.copy_spans.clear();
    rank.in_flight = 0;
    if (&rank == &tracedRank()) {
      trace_.step(static_cast<uint32_t>(step_), rank.now_ns);
    }
    const bool sync = options_.placer.policy == PlacementPolicy::kSync || control_;
    const uint64_t bytes = taken_ ? options_.snapshot_bytes : 0;
    const uint64_t at_once = sync ? bytes : std::min(options_.at_once_bytes, bytes);
    rank.retry_ns = rank.now_ns;
    rank.placer.beginStep(rank.now_ns, bytes, at_once);
    if (bytes == 0) {
      return;
    }
    ++rank.snapshots;
    const auto stall = static_cast<int64_t>(static_cast<double>(at_once) / bytes_per_ns_);
    rank.now_ns += stall;
    rank.stall_ns += static_cast<double>(stall);
    rank.bytes[static_cast<size_t>(Tier::kAtOnce)] += static_cast<double>(at_once);
  }

  // Runs the rank until it waits for an event whose time is still unknown, or its step is over.
  void advance(Rank& rank) {
    const auto& actions = actionsOf(rank);
    while (rank.next_action < actions.size()) {
      const Action& action = actions[rank.next_action];
      switch (action.kind) {
        case Action::kCompute:
          work(rank, Activity::kCompute, static_cast<double>(jittered(rank, action.work_ns)));
          break;
        case Action::kSend: send(rank, action); break;
        case Action::kReceive:
          if (!receive(rank, action)) {
            return;
          }
          break;
        case Action::kStart: start(rank, action); break;
        case Action::kWait:
          if (!wait(rank, action)) {
            return;
          }
          break;
        case Action::kGate: gate(rank); break;
      }
      ++rank.next_action;
    }
  }

  int64_t jittered(const Rank& rank, int64_t work_ns) const {
    double factor = step_ >= options_.change_at_step && options_.change_at_step >= 0
                        ? options_.change_factor
                        : 1.0;
    if (options_.jitter > 0) {
      const uint64_t place = splitmix64(options_.seed * 1000003 + static_cast<uint64_t>(step_)) ^
                             splitmix64(static_cast<uint64_t>(rank.replica) * 65537 +
                                        static_cast<uint64_t>(rank.stage)) ^
                             splitmix64(rank.next_action * 8191 + 7);
      factor *= std::clamp(1 + options_.jitter * normal(place), 0.5, 2.0);
    }
    return static_cast<int64_t>(static_cast<double>(work_ns) * factor);
  }

  // --- copies

  void startChunk(Rank& rank) {
    if (rank.copying || rank.placer.bytesLeft() == 0 || rank.now_ns < rank.retry_ns) {
      return;
    }
    const Grant grant = rank.placer.ask(rank.now_ns);
    if (grant.bytes == 0) {
      rank.retry_ns = grant.retry_ns;
      return;
    }
    rank.copying = true;
    rank.chunk = std::min(grant.bytes, options_.placer.chunk_bytes);
    rank.chunk_left = static_cast<double>(rank.chunk);
    rank.chunk_tier = grant.tier;
    rank.chunk_begin_ns = rank.now_ns;
  }

  void endChunk(Rank& rank) {
    rank.copying = false;
    rank.placer.copied(rank.chunk, rank.chunk_tier, rank.chunk_begin_ns, rank.now_ns);
    rank.retry_ns = rank.now_ns;
  }

  // The copier asks again after every event.
  static void event(Rank& rank) { rank.retry_ns = rank.now_ns; }

  void pass(Rank& rank, Activity activity, int64_t span_ns) {
    if (rank.copying && span_ns > 0) {
      const double bytes = std::min(rank.chunk_left, static_cast<double>(span_ns) * bytes_per_ns_);
      rank.chunk_left -= bytes;
      const Tier tier = activity == Activity::kIdle ? Tier::kGap
                        : activity == Activity::kCommunication || rank.in_flight > 0
                            ? Tier::kCommunication
                            : Tier::kCompute;
      rank.bytes[static_cast<size_t>(tier)] += bytes;
      if (!rank.copy_spans.empty() && rank.copy_spans.back().end_ns == rank.now_ns) {
        rank.copy_spans.back().end_ns += span_ns;
      } else {
        rank.copy_spans.push_back({rank.now_ns, rank.now_ns + span_ns});
      }
    }
    rank.now_ns += span_ns;
  }

  int64_t chunkEnd(const Rank& rank) const {
    return rank.now_ns +
           std::max<int64_t>(1, static_cast<int64_t>(std::ceil(rank.chunk_left / bytes_per_ns_)));
  }

  // Runs work that takes `work_ns` without copies, while copies may run.
  void work(Rank& rank, Activity activity, double work_ns) {
    const double slowdown = activity == Activity::kCompute ? options_.compute_slowdown
                                                           : options_.communication_slowdown;
    while (work_ns >= 1) {
      startChunk(rank);
      const double slower = rank.copying ? slowdown : 1.0;
      int64_t end_ns = rank.now_ns + static_cast<int64_t>(std::ceil(work_ns * slower));
      if (rank.copying) {
        end_ns = std::min(end_ns, chunkEnd(rank));
      } else if (rank.placer.bytesLeft() > 0) {
        end_ns = std::min(end_ns, std::max(rank.retry_ns, rank.now_ns + 1));
      }
      const int64_t span_ns = end_ns - rank.now_ns;
      work_ns -= static_cast<double>(span_ns) / slower;
      pass(rank, activity, span_ns);
      if (rank.copying && rank.chunk_left < 0.5) {
        endChunk(rank);
      }
    }
  }

  void idle(Rank& rank, int64_t until_ns, Activity activity) {
    while (rank.now_ns < until_ns) {
      startChunk(rank);
      int64_t end_ns = until_ns;
      if (rank.copying) {
        end_ns = std::min(end_ns, chunkEnd(rank));
      } else if (rank.placer.bytesLeft() > 0) {
        end_ns = std::min(end_ns, std::max(rank.retry_ns, rank.now_ns + 1));
      }
      pass(rank, activity, end_ns - rank.now_ns);
      if (rank.copying && rank.chunk_left < 0.5) {
        endChunk(rank);
      }
    }
  }

  // --- ops

  static OpEntry entryOf(OpKind kind, const Action& action) {
    const bool collective = action.kind == Action::kStart || action.kind == Action::kWait;
    OpEntry entry;
    entry.kind = kind;
    entry.group = collective ? kReplicaGroup : kPipelineGroup;
    entry.peer = collective ? -1 : action.peer;
    entry.bytes = action.bytes;
    return entry;
  }
  static ScheduleOp opOf(OpKind kind, const Action& action) {
    return scheduleOp(entryOf(kind, action));
  }
  OpKind collectiveKind() const {
    return options_.schedule.kind == ScheduleKind::kFsdp ? OpKind::kAllgatherBase
                                                         : OpKind::kAllreduce;
  }
  void traceBegin(const Rank& rank, OpKind kind, const Action& action) {
    if (&rank == &tracedRank()) {
      trace_.begin(entryOf(kind, action), action.id, rank.now_ns);
    }
  }
  void traceWait(const Rank& rank, OpKind kind, uint32_t number, int64_t begin_ns) {
    if (&rank == &tracedRank()) {
      trace_.waited(kind, number, begin_ns, rank.now_ns);
    }
  }

  void send(Rank& rank, const Action& action) {
    const ScheduleOp op = opOf(OpKind::kSend, action);
    traceBegin(rank, OpKind::kSend, action);
    rank.placer.opBegin(op, rank.now_ns);
    const double slower = rank.copying ? options_.communication_slowdown : 1.0;
    const size_t message = messageAt(rank, action.id);
    arrivals_[message] =
        rank.now_ns + static_cast<int64_t>(static_cast<double>(action.work_ns) * slower);
    if (receivers_[message] != nullptr) {
      ready_.push_back(receivers_[message]);
      receivers_[message] = nullptr;
    }
  }

  bool receive(Rank& rank, const Action& action) {
    const int64_t arrival_ns = arrivals_[messageAt(rank, action.id)];
    if (arrival_ns == kUnknown) {
      receivers_[messageAt(rank, action.id)] = &rank;
      return false;
    }
    const ScheduleOp op = opOf(OpKind::kRecv, action);
    traceBegin(rank, OpKind::kRecv, action);
    rank.placer.opBegin(op, rank.now_ns);
    rank.placer.waitBegin(op, rank.now_ns);
    event(rank);
    const int64_t begin_ns = rank.now_ns;
    idle(rank, arrival_ns, Activity::kIdle);
    rank.bubble_ns += static_cast<double>(rank.now_ns - begin_ns);
    rank.placer.waitEnd(rank.now_ns);
    rank.placer.opDone(op, rank.now_ns);
    event(rank);
    traceWait(rank, OpKind::kRecv, action.id, begin_ns);
    return true;
  }

  void start(Rank& rank, const Action& action) {
    traceBegin(rank, collectiveKind(), action);
    rank.placer.opBegin(opOf(collectiveKind(), action), rank.now_ns);
    ++rank.in_flight;
    event(rank);
    Collective& collective = collectiveOf(rank, action.id);
    ++collective.started;
    collective.start_ns = std::max(collective.start_ns, rank.now_ns);
    collective.work_ns = action.work_ns;
  }

  // Transfer work, as time without copies, that the link has done for a member from `from_ns` to
  // `to_ns`.
  double linkWork(const Rank& rank, int64_t from_ns, int64_t to_ns) const {
    if (to_ns <= from_ns) {
      return 0;
    }
    int64_t copying_ns = 0;
    for (auto span = rank.copy_spans.rbegin();
         span != rank.copy_spans.rend() && span->end_ns > from_ns; ++span) {
      copying_ns +=
          std::max<int64_t>(0, std::min(span->end_ns, to_ns) - std::max(span->begin_ns, from_ns));
    }
    const double free_ns = static_cast<double>(to_ns - from_ns - copying_ns);
    return free_ns + static_cast<double>(copying_ns) / options_.communication_slowdown;
  }

  // Returns when the group's link is free for collective `id`. Sets the end of earlier collectives
  // that no rank waits for yet, from the copies of their members so far.
  int64_t settleBefore(Rank& member, uint32_t id) {
    int64_t free_ns = 0;
    for (uint32_t earlier = 0; earlier < id; ++earlier) {
      Collective& other = collectiveOf(member, earlier);
      if (other.end_ns == kUnknown) {
        const int64_t start_ns = std::max(other.start_ns, free_ns);
        int64_t end_ns = start_ns;
        for (int replica = 0; replica < replicas_; ++replica) {
          const Rank& rank = rankAt(replica, member.stage);
          const int64_t nominal_ns = start_ns + other.work_ns;
          const double missing = std::max(
              0.0, static_cast<double>(other.work_ns) - linkWork(rank, start_ns, nominal_ns));
          end_ns = std::max(end_ns, nominal_ns + static_cast<int64_t>(missing));
        }
        other.end_ns = end_ns;
      }
      free_ns = std::max(free_ns, other.end_ns);
    }
    return free_ns;
  }

  bool wait(Rank& rank, const Action& action) {
    Collective& collective = collectiveOf(rank, action.id);
    if (!rank.waiting) {
      rank.placer.waitBegin(opOf(collectiveKind(), action), rank.now_ns);
      event(rank);
      rank.waiting = true;
      rank.wait_begin_ns = rank.now_ns;
      if (++collective.waiting < replicas_) {
        return false;
      }
      if (collective.end_ns == kUnknown) {
        settle(rank, action.id, collective);
      }
      // This rank continues here; the others continue when their turn comes.
      for (int replica = 0; replica < replicas_; ++replica) {
        if (replica != rank.replica) {
          ready_.push_back(&rankAt(replica, rank.stage));
        }
      }
    } else if (collective.end_ns == kUnknown) {
      return false;
    }
    idle(rank, collective.end_ns, Activity::kCommunication);
    rank.exposed_ns += static_cast<double>(rank.now_ns - rank.wait_begin_ns);
    rank.placer.waitEnd(rank.now_ns);
    rank.placer.opDone(opOf(collectiveKind(), action), rank.now_ns);
    rank.in_flight -= rank.in_flight > 0 ? 1 : 0;
    rank.waiting = false;
    event(rank);
    traceWait(rank, collectiveKind(), action.id, rank.wait_begin_ns);
    return true;
  }

  // All members wait. Each finishes the rest of the transfer while its own copies run; the slowest
  // member sets the end.
  void settle(Rank& last, uint32_t id, Collective& collective) {
    const int64_t start_ns = std::max(collective.start_ns, settleBefore(last, id));
    int64_t end_ns = start_ns;
    for (int replica = 0; replica < replicas_; ++replica) {
      Rank& member = rankAt(replica, last.stage);
      const double done = linkWork(member, start_ns, member.now_ns);
      idle(member, start_ns, Activity::kIdle);
      work(member, Activity::kCommunication, static_cast<double>(collective.work_ns) - done);
      end_ns = std::max(end_ns, member.now_ns);
    }
    collective.end_ns = end_ns;
  }

  void gate(Rank& rank) {
    const int64_t begin_ns = rank.now_ns;
    double left = 0;
    if (rank.copying) {
      left += rank.chunk_left;
    }
    left += static_cast<double>(rank.placer.bytesLeft()) -
            (rank.copying ? static_cast<double>(rank.chunk) : 0);
    if (rank.copying) {
      rank.copying = false;
      const auto in_flight = static_cast<int64_t>(rank.chunk_left / bytes_per_ns_);
      rank.placer.copied(rank.chunk, rank.chunk_tier, rank.chunk_begin_ns, begin_ns + in_flight);
    }
    rank.placer.gate(begin_ns);
    rank.now_ns += static_cast<int64_t>(left / bytes_per_ns_);
    rank.stall_ns += static_cast<double>(rank.now_ns - begin_ns);
    rank.bytes[static_cast<size_t>(Tier::kGate)] += left;
    rank.placer.gateDone(begin_ns, rank.now_ns);
  }

  void summarise(SimulationResult& result);

  const SimulationOptions& options_;
  const Schedule schedule_;
  const int stages_;
  const int replicas_;
  double bytes_per_ns_ = 1;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<int64_t> arrivals_;
  std::vector<Rank*> receivers_;
  std::vector<Collective> collectives_;
  std::deque<Rank*> ready_;
  int step_ = 0;
  int traced_ = 0;
  uint64_t foretold_before_ = 0;
  Cadence cadence_;
  ControlSteps control_steps_;
  OverheadMeter meter_;
  int64_t point_ns_ = 0;  // rank 0's newest program point
  int64_t begun_ns_ = 0;  // time when its step continued after that
  bool taken_ = true;     // this step has a snapshot
  bool control_ = false;
  TraceLog trace_;
};

void Simulation::summarise(SimulationResult& result) {
  const double steps = options_.steps - options_.warm_up_steps;
  const double rank_steps = steps * static_cast<double>(ranks_.size());
  std::vector<double> errors;
  double foretold_ns = 0;
  double unforetold_ns = 0;
  result.every = static_cast<double>(cadence_.every());
  result.overhead = meter_.overhead();
  for (const auto& rank : ranks_) {
    result.iteration_ns += static_cast<double>(rank->now_ns - rank->counted_from_ns) / rank_steps;
    result.bubble_ns += rank->bubble_ns / rank_steps;
    result.exposed_communication_ns += rank->exposed_ns / rank_steps;
    result.stall_ns += rank->stall_ns / rank_steps;
    for (size_t tier = 0; tier < kTiers; ++tier) {
      result.bytes[tier] += rank->bytes[tier];
    }
    result.snapshots_per_step += static_cast<double>(rank->snapshots) / rank_steps;
    const ScheduleModel::Errors known = rank->placer.model().errors();
    if (known.foretold_gaps > 0) {
      errors.push_back(known.recent_median);
    }
    foretold_ns += static_cast<double>(known.foretold_ns);
    unforetold_ns += static_cast<double>(known.unforetold_ns);
    result.longest_overrun_chunks =
        std::max(result.longest_overrun_chunks,
                 static_cast<double>(rank->placer.longestOverrunNs()) * bytes_per_ns_ /
                     static_cast<double>(options_.placer.chunk_bytes));
  }
  double bytes = 0;
  for (const double tier : result.bytes) {
    bytes += tier;
  }
  result.bytes_in_gaps_share =
      bytes > 0 ? result.bytes[static_cast<size_t>(Tier::kGap)] / bytes : 0;
  if (!errors.empty()) {
    std::sort(errors.begin(), errors.end());
    result.error_median = errors[errors.size() / 2];
    result.error_worst = errors.back();
  }
  result.foretold_share = foretold_ns > 0 ? foretold_ns / (foretold_ns + unforetold_ns) : 0;
  if (options_.trace_rank >= 0) {
    result.trace = trace_.take();
  }
}

}  // namespace

SimulationResult runSimulation(const SimulationOptions& options) {
  return Simulation(options).run();
}

}  // namespace reft::simulate

#include "tests/unit/agent/hang/simulated_ranks.h"

#include <algorithm>

namespace reft::agent {

namespace {

using testing_evidence::kStage;

constexpr uint32_t kRecords = 256;

const Doing kInOp{
    "  File \"/x/site-packages/torch/distributed/distributed_c10d.py\", line 2810 in all_reduce\n"
    "  File \"/home/u/train.py\", line 131 in step\n"
    "  File \"/home/u/train.py\", line 160 in <module>\n",
    "S", 0.01, 0, "futex_wait_queue"};
const Doing kGone{"", "", 0};

}  // namespace

SimulatedRanks::SimulatedRanks(Layout layout, SimulatedClock& clock, std::function<void()> more)
    : layout_(layout),
      clock_(clock),
      more_(std::move(more)),
      ranks_(static_cast<size_t>(layout.world())),
      rendezvous_(layout) {
  for (int r = 0; r < layout.world(); ++r) {
    Rank& rank = ranks_[static_cast<size_t>(r)];
    rank.log = std::make_unique<OpLog>(nullptr, kRecords, clock_);
    for (const OpGroup& group : layout.groupsOf(r)) {
      rank.log->addGroup(group.name, group.rank, group.size);
    }
    rank.seq.resize(groups_);
    rank.next_ns = rank.since_ns = clock_.now_ns;
    rank.doing = &kGone;
  }
}

uint32_t SimulatedRanks::addGroup() {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r].log->addGroup("new" + std::to_string(groups_), static_cast<int>(r), layout_.world());
    ranks_[r].seq.resize(groups_ + 1);
  }
  return groups_++;
}

void SimulatedRanks::account(Rank& rank) const {
  const auto ns = static_cast<double>(clock_.now_ns - rank.since_ns);
  rank.cpu_ns += ns * rank.doing->processors;
  rank.io_bytes += ns * 1e-9 * static_cast<double>(rank.doing->io_per_sec);
  rank.since_ns = clock_.now_ns;
}

void SimulatedRanks::turnTo(Rank& rank, const Doing* doing) {
  account(rank);
  rank.doing = doing;
}

int64_t SimulatedRanks::nextOf(const Rank& rank) const {
  if (!rank.alive) {
    return kNever;
  }
  int64_t next = rank.next_ns;
  for (const Open& open : rank.open) {
    next = std::min(next, open.over_ns);
  }
  return next;
}

void SimulatedRanks::play(int64_t until_ns) {
  for (;;) {
    int first = 0;
    int64_t next = kNever;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const int64_t mine = nextOf(ranks_[r]);
      if (mine < next) {
        next = mine;
        first = static_cast<int>(r);
      }
    }
    if (next > until_ns) {
      break;
    }
    clock_.now_ns = std::max(clock_.now_ns, next);
    happen(first);
  }
  clock_.now_ns = std::max(clock_.now_ns, until_ns);
}

void SimulatedRanks::stoodStill(int64_t ns) {
  for (Rank& rank : ranks_) {
    rank.next_ns += rank.next_ns == kNever ? 0 : ns;
    rank.since_ns += ns;
    for (Open& open : rank.open) {
      open.over_ns += open.over_ns == kNever ? 0 : ns;
    }
  }
}

void SimulatedRanks::happen(int number) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  const auto ended = std::find_if(rank.open.begin(), rank.open.end(), [this](const Open& open) {
    return open.over_ns <= clock_.now_ns;
  });
  if (ended != rank.open.end()) {
    over(rank, static_cast<size_t>(ended - rank.open.begin()));
    if (rank.inside || (rank.awaiting && rank.open.empty())) {
      rank.inside = rank.awaiting = false;
      go(number);
    }
  } else if (rank.next_ns <= clock_.now_ns) {
    go(number);
  }
}

void SimulatedRanks::over(Rank& rank, size_t index) {
  const Open open = rank.open[index];
  rank.open.erase(rank.open.begin() + static_cast<ptrdiff_t>(index));
  switch (open.how) {
    case Activity::How::kWait: rank.log->markWaitEnd(open.ticket); break;
    case Activity::How::kInCall:
      rank.log->markEnqueued(open.ticket);
      rank.log->markWaitBegin(open.ticket);
      rank.log->markWaitEnd(open.ticket);
      break;
    case Activity::How::kFuture: break;
    case Activity::How::kDevice: return;
  }
  rank.log->markDone(open.ticket);
}

// What it did is over: the next.
void SimulatedRanks::go(int number) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  rank.next_ns = kNever;
  for (;;) {
    if (rank.plan.empty()) {
      more_();
    }
    const Activity activity = rank.plan.front();
    rank.plan.pop_front();
    switch (activity.kind) {
      case Activity::Kind::kWork:
        turnTo(rank, activity.doing);
        rank.next_ns = activity.ns == kNever ? kNever : clock_.now_ns + activity.ns;
        return;
      case Activity::Kind::kOp:
        begin(number, activity);
        if (activity.how == Activity::How::kWait || activity.how == Activity::How::kInCall) {
          turnTo(rank, &kInOp);
          rank.inside = true;
          return;
        }
        break;
      case Activity::Kind::kAwait:
        if (!rank.open.empty()) {
          turnTo(rank, activity.doing);
          rank.awaiting = true;
          return;
        }
        break;
      case Activity::Kind::kBye: rank.said_bye = true; [[fallthrough]];
      case Activity::Kind::kDie:
        turnTo(rank, &kGone);
        rank.alive = false;
        return;
    }
  }
}

void SimulatedRanks::begin(int number, const Activity& activity) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  const Planned& planned = activity.op;
  const bool message = planned.group == kStage;
  OpLog::Op op;
  op.kind = planned.kind;
  op.group = planned.group;
  op.seq = message ? ++rank.p2p : ++rank.seq[planned.group];
  op.peer = planned.peer;
  op.bytes = 4u << 20;
  op.dtype = 6;
  op.call_site = activity.call_site;
  op.signature = planned.signature;
  const uint64_t ticket = rank.log->begin(op);
  if (activity.how != Activity::How::kInCall) {
    rank.log->markEnqueued(ticket);
  }
  if (activity.how == Activity::How::kWait || activity.how == Activity::How::kDevice) {
    rank.log->markWaitBegin(ticket);
  }
  if (activity.how == Activity::How::kDevice) {
    rank.log->markWaitEnd(ticket);
  }
  const uint32_t with_peer = message ? ++rank.messages[{planned.kind, planned.peer}] : op.seq;
  rank.open.push_back({planned, with_peer, ticket, activity.ns, activity.how});
  for (const int member : rendezvous_.begin(number, planned, with_peer)) {
    for (Open& open : ranks_[static_cast<size_t>(member)].open) {
      const bool same = open.op.group == planned.group && open.number == with_peer &&
                        (!message || member == number
                             ? open.op.kind == planned.kind && open.op.peer == planned.peer
                             : open.op.kind != planned.kind && open.op.peer == layout_.pp(number));
      if (same) {
        open.over_ns = activity.ns == kNever ? kNever : clock_.now_ns + activity.ns;
      }
    }
  }
}

bool SimulatedRanks::live(int rank) const {
  return ranks_[static_cast<size_t>(rank)].alive;
}

OpLogReader SimulatedRanks::log(int rank) const {
  const OpLog& log = *ranks_[static_cast<size_t>(rank)].log;
  return {log.area(), log.areaBytes()};
}

ProcessCounters SimulatedRanks::used(int rank) const {
  Rank copy;
  const Rank& mine = ranks_[static_cast<size_t>(rank)];
  copy.doing = mine.doing;
  copy.since_ns = mine.since_ns;
  copy.cpu_ns = mine.cpu_ns;
  copy.io_bytes = mine.io_bytes;
  account(copy);
  return {static_cast<int64_t>(copy.cpu_ns), static_cast<int64_t>(copy.io_bytes)};
}

const Doing& SimulatedRanks::doing(int rank) const {
  return *ranks_[static_cast<size_t>(rank)].doing;
}

RankEvidence SimulatedRanks::evidence(int number) const {
  const Rank& rank = ranks_[static_cast<size_t>(number)];
  RankEvidence result;
  result.rank = number;
  result.host = "n0";
  result.pid = 1000 + number;
  result.alive = rank.alive;
  result.said_bye = rank.said_bye;
  result.proc_state = rank.doing->state;
  result.wait_channel = rank.doing->wait_channel;
  result.tracer_pid = rank.doing->tracer_pid;
  addOpLog(result, rank.log->area(), rank.log->areaBytes(), clock_.now_ns);
  return result;
}

}  // namespace reft::agent

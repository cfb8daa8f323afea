#include "c10d_backend/store/store_commit.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "intercept/base/log.h"
#include "intercept/record/cut.h"

namespace reft {

namespace {

using std::chrono::microseconds;

constexpr microseconds kFirstPause{200};
constexpr microseconds kLeastLongPause{20'000};
constexpr int kNodesPerPauseMs = 25;  // bounds the requests of all nodes together
constexpr size_t kRemembered = 64;    // outcomes; as many as CommitLedger has open
// Fields of the counter `marks`, each wide enough for all nodes: nodes whose cut is not known, the
// proposal of one node, nodes with a vote for a new plan.
constexpr int kProposalShift = 32;
constexpr int kPlanShift = 40;
constexpr uint64_t kUnknownMask = (uint64_t{1} << kProposalShift) - 1;
// Sums of 32,768 nodes stay within the store's signed counter.
constexpr uint64_t kSumMask = (uint64_t{1} << 48) - 1;
constexpr size_t kPlanByte = 2;  // of an outcome: what it was, proposal, whether to plan anew

std::string key(const char* what, const wire::Ballot& ballot) {
  return std::string("commit/") + what + "/" + std::to_string(ballot.step);
}

}  // namespace

StoreCommit::StoreCommit(const c10::intrusive_ptr<c10d::Store>& store, int nodes, Decided decided)
    : store_(store->clone()),
      nodes_(nodes),
      decided_(std::move(decided)),
      thread_([this] { run(); }) {}

StoreCommit::~StoreCommit() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  thread_.join();
}

void StoreCommit::vote(const wire::Ballot& node_vote) {
  {
    const MutexLock lock(mutex_);
    votes_.push_back(node_vote);
  }
  arrived_.notify_all();
}

void StoreCommit::cast(const wire::Ballot& ballot) {
  const auto plan_anew = static_cast<uint8_t>(ballot.plan_anew != 0);
  if (ballot.yes == 0) {
    // The first one stays: all nodes read the same.
    store_->compareSet(key("outcome", ballot), std::vector<uint8_t>{},
                       std::vector<uint8_t>{static_cast<uint8_t>('0'), 0, plan_anew});
    return;
  }
  const bool unknown_cut = ballot.cut == kUnknownCut;
  const int64_t mark = (int64_t{plan_anew} << kPlanShift) +
                       (int64_t{ballot.proposal} << kProposalShift) + (unknown_cut ? 1 : 0);
  if (mark != 0) {
    store_->add(key("marks", ballot), mark);
  }
  if (!unknown_cut && ballot.cut != 0) {
    store_->add(key("cut", ballot), static_cast<int64_t>(ballot.cut & kSumMask));
  }
  if (ballot.replicas != 0) {  // groups within a node add up to 0
    store_->add(key("replicas", ballot), static_cast<int64_t>(ballot.replicas & kSumMask));
  }
  if (store_->add(key("sealed", ballot), 1) == nodes_) {
    const auto marks = static_cast<uint64_t>(store_->add(key("marks", ballot), 0));
    const auto sum = [&](const char* what) {
      return static_cast<uint64_t>(store_->add(key(what, ballot), 0)) & kSumMask;
    };
    const bool cut_holds = (marks & kUnknownMask) != 0 || sum("cut") == 0;
    const bool agreed = sum("replicas") == 0;
    const char what = !cut_holds ? 'c' : !agreed ? 'r' : '1';
    store_->set(key("outcome", ballot),
                std::vector<uint8_t>{
                    static_cast<uint8_t>(what), static_cast<uint8_t>(marks >> kProposalShift),
                    static_cast<uint8_t>(what == 'r' || marks >> kPlanShift != 0 ? 1 : 0)});
  }
}

void StoreCommit::await(wire::Ballot ballot) {
  const microseconds longest =
      std::max(kLeastLongPause, microseconds(1000 * nodes_ / kNodesPerPauseMs));
  microseconds pause{0};
  while (!stopsWithin(pause)) {
    if (store_->check({key("outcome", ballot)})) {
      const std::vector<uint8_t> found = store_->get(key("outcome", ballot));
      const char what = found.empty() ? '0' : static_cast<char>(found[0]);
      ballot.yes = what == '1' ? 1 : 0;
      ballot.cut = what == 'c' ? 1 : 0;
      ballot.replicas = what == 'r' ? 1 : 0;
      ballot.proposal = what == '1' && found.size() > 1 ? found[1] : 0;
      ballot.plan_anew = found.size() > kPlanByte ? found[kPlanByte] : 0;
      answered_[ballot.step] = ballot;
      if (answered_.size() > kRemembered) {
        answered_.erase(answered_.begin());
      }
      decided_(ballot);
      forget(ballot);
      return;
    }
    pause = std::clamp(pause * 3 / 2, kFirstPause, longest);
  }
}

// This node has read the outcome. Every node writes before it reads, so nothing is written behind
// the last one.
void StoreCommit::forget(const wire::Ballot& ballot) {
  if (store_->add(key("read", ballot), 1) == nodes_) {
    for (const char* what : {"sealed", "marks", "cut", "replicas", "outcome", "read"}) {
      store_->deleteKey(key(what, ballot));
    }
  }
}

// Waits for `pause`, or until the destructor runs: then true.
bool StoreCommit::stopsWithin(microseconds pause) {
  const MutexLock lock(mutex_);
  return arrived_.wait_for(mutex_, pause, [this]() REQUIRES(mutex_) { return stopping_; });
}

void StoreCommit::run() {
  ::pthread_setname_np(::pthread_self(), "reft-commit");
  while (true) {
    wire::Ballot ballot{};
    {
      const MutexLock lock(mutex_);
      arrived_.wait(mutex_, [this]() REQUIRES(mutex_) { return stopping_ || !votes_.empty(); });
      if (stopping_) {
        return;
      }
      ballot = votes_.front();
      votes_.pop_front();
    }
    if (const auto known = answered_.find(ballot.step); known != answered_.end()) {
      decided_(known->second);
      continue;
    }
    if (!answered_.empty() && ballot.step < answered_.begin()->first) {
      continue;  // decided long ago
    }
    try {
      cast(ballot);
      await(ballot);
    } catch (const std::exception& error) {
      // The store lives in the launcher or in rank 0: without it the job ends or restarts.
      logWarn("backend", "commit of step ", ballot.step, ": the store failed: ", error.what());
    }
  }
}

}  // namespace reft

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
constexpr int64_t kKeptSteps = 8;
constexpr int kProposalShift =
    32;  // of the counter `marks`: below it are nodes whose cut is not known
constexpr uint64_t kCutMask =
    (uint64_t{1} << 48) - 1;  // sums of 32,768 nodes stay within the store's signed counter

std::string key(const char* what, const wire::Ballot& ballot, int64_t back = 0) {
  return std::string("commit/") + what + "/" + std::to_string(ballot.step - back);
}

std::vector<uint8_t> value(char c) {
  return {static_cast<uint8_t>(c)};
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
  if (ballot.yes == 0) {
    store_->set(key("outcome", ballot), value('0'));
    store_->deleteKey(key("outcome", ballot, kKeptSteps));
    return;
  }
  const bool unknown_cut = ballot.cut == kUnknownCut;
  if (unknown_cut || ballot.proposal != 0) {  // one node has a proposal at most
    store_->add(key("marks", ballot),
                (int64_t{ballot.proposal} << kProposalShift) + (unknown_cut ? 1 : 0));
  }
  if (!unknown_cut && ballot.cut != 0) {
    store_->add(key("cut", ballot), static_cast<int64_t>(ballot.cut & kCutMask));
  }
  if (store_->add(key("sealed", ballot), 1) == nodes_) {
    const auto marks = static_cast<uint64_t>(store_->add(key("marks", ballot), 0));
    const bool unknown = (marks & ((uint64_t{1} << kProposalShift) - 1)) != 0;
    const auto cut = static_cast<uint64_t>(store_->add(key("cut", ballot), 0)) & kCutMask;
    std::vector<uint8_t> outcome = value(unknown || cut == 0 ? '1' : 'c');
    outcome.push_back(static_cast<uint8_t>(marks >> kProposalShift));
    store_->set(key("outcome", ballot), outcome);
    for (const char* counter : {"sealed", "marks", "cut"}) {
      store_->deleteKey(key(counter, ballot));
    }
    store_->deleteKey(key("outcome", ballot, kKeptSteps));
  }
}

void StoreCommit::await(wire::Ballot ballot) {
  const microseconds longest =
      std::max(kLeastLongPause, microseconds(1000 * nodes_ / kNodesPerPauseMs));
  microseconds pause{0};
  while (!stopsWithin(pause)) {
    if (store_->check({key("outcome", ballot)})) {
      const std::vector<uint8_t> found = store_->get(key("outcome", ballot));
      ballot.yes = !found.empty() && found[0] == '1' ? 1 : 0;
      ballot.cut = !found.empty() && found[0] == 'c' ? 1 : 0;
      ballot.proposal = ballot.yes != 0 && found.size() > 1 ? found[1] : 0;
      decided_(ballot);
      return;
    }
    pause = std::clamp(pause * 3 / 2, kFirstPause, longest);
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

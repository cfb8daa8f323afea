#include "c10d_backend/store/store_commit.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "intercept/base/log.h"
#include "intercept/base/mutex.h"
#include "intercept/record/cut.h"

namespace reft {

namespace {

using std::chrono::microseconds;

constexpr microseconds kFirstPause{200};
constexpr microseconds kLeastLongPause{20'000};
constexpr int kNodesPerPauseMs = 25;  // bounds the requests of all nodes together
constexpr int kFanOut = 32;           // votes that one node adds to its own
constexpr size_t kRemembered = 64;    // outcomes; as many as CommitLedger has open
constexpr size_t kOutcomeBytes = 3;   // kind of outcome, proposal, whether to plan again
constexpr std::chrono::milliseconds kLeave{2000};  // longest wait for the thread at the end

std::string commitKey(const char* what, const wire::Ballot& ballot) {
  return std::string("commit/") + what + "/" + std::to_string(ballot.step);
}

std::string voteKey(const wire::Ballot& ballot, int node) {
  return commitKey("vote", ballot) + "/" + std::to_string(node);
}

std::vector<uint8_t> stored(const std::string& value) {
  return {value.begin(), value.end()};
}

std::string_view viewOf(const std::vector<uint8_t>& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

constexpr char kDropped = '0', kCommitted = '1', kInconsistentCut = 'c', kReplicasDiffer = 'r';

// Adds the vote of another node. One that is missing or not of its node counts as a no.
void add(wire::Ballot& sum, const std::optional<wire::Ballot>& vote) {
  if (!vote || vote->yes == 0) {
    sum.yes = 0;
    return;
  }
  sum.cut = CutCounter::combine(sum.cut, vote->cut);
  sum.replicas += vote->replicas;  // groups within a node add up to 0
  sum.plan_anew |= vote->plan_anew;
  sum.proposal = std::max(sum.proposal, vote->proposal);  // of one node alone
}

// Of the votes of all nodes together.
std::string outcomeOf(const wire::Ballot& all) {
  if (all.yes == 0) {
    return {kDropped, 0, 0};
  }
  const char what = !CutCounter::consistent(all.cut) ? kInconsistentCut
                    : all.replicas != 0              ? kReplicasDiffer
                                                     : kCommitted;
  const bool plan_anew = what == kReplicasDiffer || all.plan_anew != 0;
  return {what, static_cast<char>(all.proposal), static_cast<char>(plan_anew ? 1 : 0)};
}

}  // namespace

// What the thread uses; the thread is one of its owners.
class StoreCommit::Worker : public std::enable_shared_from_this<Worker> {
 public:
  Worker(const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<const ValueSeal> seal,
         Place place, Decided decided)
      : store_(store->clone()),
        seal_(std::move(seal)),
        place_(place),
        decided_(std::move(decided)) {}

  void start() {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  void vote(const wire::Ballot& node_vote) EXCLUDES(mutex_);
  void stop() EXCLUDES(mutex_);

 private:
  void run();
  void carry();
  bool cast(const wire::Ballot& ballot);
  std::vector<std::vector<uint8_t>> read(const std::vector<std::string>& keys);
  void publish(const wire::Ballot& ballot, const std::string& outcome);
  std::optional<std::string> opened(const wire::Ballot& ballot,
                                    const std::vector<uint8_t>& value) const;
  void await(wire::Ballot ballot);
  void forget(const wire::Ballot& ballot, char outcome);
  void forgetVotes(const wire::Ballot& ballot, int above);
  bool stopsWithin(microseconds pause) EXCLUDES(mutex_);

  // Of the thread alone.
  c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const ValueSeal> seal_;
  const Place place_;
  Decided decided_;
  std::map<int64_t, wire::Ballot> answered_;  // newest outcomes, by step

  Mutex mutex_;
  ConditionVariable arrived_, ended_;
  std::deque<wire::Ballot> votes_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool over_ GUARDED_BY(mutex_) = false;
};

void StoreCommit::Worker::stop() {
  const MutexLock lock(mutex_);
  stopping_ = true;
  arrived_.notify_all();
  if (!ended_.wait_for(mutex_, kLeave, [this]() REQUIRES(mutex_) { return over_; })) {
    logWarn("backend", "the store does not answer; abandoned the thread reft-commit");
  }
}

void StoreCommit::Worker::vote(const wire::Ballot& node_vote) {
  {
    const MutexLock lock(mutex_);
    votes_.push_back(node_vote);
  }
  arrived_.notify_all();
}

// Gives the vote of this node and of those below it to the node above; the first node publishes
// the outcome of all. False: votes from below are missing yet.
bool StoreCommit::Worker::cast(const wire::Ballot& ballot) {
  wire::Ballot sum = ballot;
  if (sum.yes != 0) {
    const int first = place_.node * kFanOut + 1;
    std::vector<std::string> keys;
    for (int node = first; node < std::min(first + kFanOut, place_.nodes); ++node) {
      keys.push_back(voteKey(ballot, node));
    }
    if (!keys.empty() && !store_->check(keys)) {
      return false;
    }
    const std::vector<std::vector<uint8_t>> values = read(keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto vote =
          seal_->open(ValueKind::kVote, keys[i], static_cast<uint32_t>(first + static_cast<int>(i)),
                      viewOf(values.at(i)));
      add(sum, vote ? wire::decodeBallot(vote->payload) : std::nullopt);
      store_->deleteKey(keys[i]);
    }
  }
  if (place_.node == 0 && sum.yes != 0) {
    publish(ballot, outcomeOf(sum));
  } else if (sum.yes == 0) {
    publish(ballot, {kDropped, 0, static_cast<char>(ballot.plan_anew != 0 ? 1 : 0)});
  } else {
    const std::string key = voteKey(ballot, place_.node);
    store_->set(key, stored(seal_->seal(ValueKind::kVote, key, static_cast<uint32_t>(place_.node),
                                        {reinterpret_cast<const char*>(&sum), sizeof(sum)})));
  }
  return true;
}

std::vector<std::vector<uint8_t>> StoreCommit::Worker::read(const std::vector<std::string>& keys) {
  if (!keys.empty() && store_->hasExtendedApi()) {
    return store_->multiGet(keys);
  }
  std::vector<std::vector<uint8_t>> values;
  for (const std::string& key : keys) {
    values.push_back(store_->get(key));
  }
  return values;
}

// The first outcome stays, so that all nodes read the same, unless it is not one.
void StoreCommit::Worker::publish(const wire::Ballot& ballot, const std::string& outcome) {
  const std::string key = commitKey("outcome", ballot);
  const auto value =
      stored(seal_->seal(ValueKind::kOutcome, key, static_cast<uint32_t>(place_.node), outcome));
  const std::vector<uint8_t> there = store_->compareSet(key, {}, value);
  if (there != value && !opened(ballot, there)) {
    store_->set(key, value);
  }
}

std::optional<std::string> StoreCommit::Worker::opened(const wire::Ballot& ballot,
                                                       const std::vector<uint8_t>& value) const {
  auto outcome = seal_->open(ValueKind::kOutcome, commitKey("outcome", ballot), ValueSeal::kAnyRank,
                             viewOf(value));
  if (!outcome || outcome->payload.size() != kOutcomeBytes) {
    return std::nullopt;
  }
  return std::move(outcome->payload);
}

void StoreCommit::Worker::await(wire::Ballot ballot) {
  const microseconds longest =
      std::max(kLeastLongPause, microseconds(1000 * place_.nodes / kNodesPerPauseMs));
  microseconds pause{0};
  bool is_cast = false, foreign = false;
  while (!stopsWithin(pause)) {
    // Once the first node has given the step up, it never commits it.
    is_cast = is_cast || (foreign && place_.node == 0) || cast(ballot);
    if (store_->check({commitKey("outcome", ballot)})) {
      if (const auto found = opened(ballot, store_->get(commitKey("outcome", ballot)))) {
        const char what = (*found)[0];
        ballot.yes = what == kCommitted ? 1 : 0;
        ballot.cut = what == kInconsistentCut ? 1 : 0;
        ballot.replicas = what == kReplicasDiffer ? 1 : 0;
        ballot.proposal = what == kCommitted ? static_cast<uint8_t>((*found)[1]) : 0;
        ballot.plan_anew = static_cast<uint8_t>((*found)[2]);
        answered_[ballot.step] = ballot;
        if (answered_.size() > kRemembered) {
          answered_.erase(answered_.begin());
        }
        decided_(ballot);
        forget(ballot, what);
        return;
      }
      if (place_.node == 0) {  // no node that waits may wait for ever
        publish(ballot, {kDropped, 0, 0});
      }
      foreign = true;
      pause = longest;  // a long value is not read over and over
    }
    pause = std::clamp(pause * 3 / 2, kFirstPause, longest);
  }
}

// This node has read the outcome, and writes nothing more of this step. Counters carry no seal:
// they decide on nothing but when keys go.
void StoreCommit::Worker::forget(const wire::Ballot& ballot, char outcome) {
  if (outcome == kDropped) {
    forgetVotes(ballot, place_.node);
    if (place_.node > 0) {
      forgetVotes(ballot, (place_.node - 1) / kFanOut);
    }
  }
  if (store_->add(commitKey("read", ballot), 1) == place_.nodes) {
    for (const char* what : {"outcome", "read"}) {
      store_->deleteKey(commitKey(what, ballot));
    }
  }
}

// Of a dropped step, votes may be left that no node has added up. The last one of `above` and the
// nodes below it deletes theirs: no node its own, which the one above may be about to read.
void StoreCommit::Worker::forgetVotes(const wire::Ballot& ballot, int above) {
  const int first = above * kFanOut + 1, end = std::min(first + kFanOut, place_.nodes);
  const std::string counter = commitKey("left", ballot) + "/" + std::to_string(above);
  if (first < end && store_->add(counter, 1) == end - first + 1) {
    for (int node = first; node < end; ++node) {
      store_->deleteKey(voteKey(ballot, node));
    }
    store_->deleteKey(counter);
  }
}

// Waits for `pause`, or until stop() runs: then true.
bool StoreCommit::Worker::stopsWithin(microseconds pause) {
  const MutexLock lock(mutex_);
  return arrived_.wait_for(mutex_, pause, [this]() REQUIRES(mutex_) { return stopping_; });
}

void StoreCommit::Worker::run() {
  ::pthread_setname_np(::pthread_self(), "reft-commit");
  carry();
  // Here and not with the last reference, which may be dropped when these may no longer be used.
  store_.reset();
  decided_ = nullptr;
  const MutexLock lock(mutex_);
  over_ = true;
  ended_.notify_all();
}

void StoreCommit::Worker::carry() {
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
      await(ballot);
    } catch (const std::exception& error) {
      // The store lives in the launcher or in rank 0: without it the job ends or restarts.
      logWarn("backend", "commit of step ", ballot.step, ": the store failed: ", error.what());
    }
  }
}

StoreCommit::StoreCommit(const c10::intrusive_ptr<c10d::Store>& store,
                         std::shared_ptr<const ValueSeal> seal, Place place, Decided decided)
    : owner_(::getpid()),
      worker_(std::make_shared<Worker>(store, std::move(seal), place, std::move(decided))) {
  worker_->start();
}

StoreCommit::~StoreCommit() {
  if (::getpid() == owner_) {
    worker_->stop();
  }
}

void StoreCommit::vote(const wire::Ballot& node_vote) {
  worker_->vote(node_vote);
}

}  // namespace reft

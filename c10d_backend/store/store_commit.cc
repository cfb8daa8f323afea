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

// The outcome of all nodes' votes. A vote that is missing or not of its node counts as a no.
std::string outcomeOf(const std::vector<std::optional<wire::Ballot>>& votes) {
  bool known_cut = true;
  bool plan_anew = false;
  uint64_t cut = 0;
  uint64_t replicas = 0;
  uint8_t proposal = 0;
  for (const auto& vote : votes) {
    if (!vote || vote->yes == 0) {
      return {'0', 0, 0};
    }
    known_cut = known_cut && vote->cut != kUnknownCut;
    cut += vote->cut;
    replicas += vote->replicas;  // groups within a node add up to 0
    plan_anew = plan_anew || vote->plan_anew != 0;
    proposal = std::max(proposal, vote->proposal);  // of one node alone
  }
  const char what = known_cut && cut != 0 ? 'c' : replicas != 0 ? 'r' : '1';
  return {what, static_cast<char>(proposal), static_cast<char>(what == 'r' || plan_anew ? 1 : 0)};
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
  void cast(const wire::Ballot& ballot);
  void count(const wire::Ballot& ballot);
  void publish(const wire::Ballot& ballot, const std::string& outcome);
  std::optional<std::string> opened(const wire::Ballot& ballot,
                                    const std::vector<uint8_t>& value) const;
  void await(wire::Ballot ballot);
  void forget(const wire::Ballot& ballot);
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

void StoreCommit::Worker::cast(const wire::Ballot& ballot) {
  if (ballot.yes == 0) {
    publish(ballot, {'0', 0, static_cast<char>(ballot.plan_anew != 0 ? 1 : 0)});
    return;
  }
  const std::string key = voteKey(ballot, place_.node);
  const auto node = static_cast<uint32_t>(place_.node);
  store_->set(key, stored(seal_->seal(ValueKind::kVote, key, node,
                                      {reinterpret_cast<const char*>(&ballot), sizeof(ballot)})));
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

// The first node counts. The votes of all nodes are there before it reads one.
void StoreCommit::Worker::count(const wire::Ballot& ballot) {
  std::vector<std::string> keys;
  for (int node = 0; node < place_.nodes; ++node) {
    keys.push_back(voteKey(ballot, node));
  }
  if (!store_->check(keys)) {
    return;
  }
  std::vector<std::vector<uint8_t>> values;
  if (store_->hasExtendedApi()) {
    values = store_->multiGet(keys);
  } else {
    for (const std::string& key : keys) {
      values.push_back(store_->get(key));
    }
  }
  std::vector<std::optional<wire::Ballot>> votes;
  for (size_t node = 0; node < keys.size() && node < values.size(); ++node) {
    const auto vote = seal_->open(ValueKind::kVote, keys[node], static_cast<uint32_t>(node),
                                  viewOf(values[node]));
    votes.push_back(vote ? wire::decodeBallot(vote->payload) : std::nullopt);
  }
  publish(ballot, outcomeOf(votes));
}

void StoreCommit::Worker::await(wire::Ballot ballot) {
  const microseconds longest =
      std::max(kLeastLongPause, microseconds(1000 * place_.nodes / kNodesPerPauseMs));
  microseconds pause{0};
  bool foreign = false;
  while (!stopsWithin(pause)) {
    if (place_.node == 0 && ballot.yes != 0 && !foreign) {
      count(ballot);
    }
    if (store_->check({commitKey("outcome", ballot)})) {
      if (const auto found = opened(ballot, store_->get(commitKey("outcome", ballot)))) {
        const char what = (*found)[0];
        ballot.yes = what == '1' ? 1 : 0;
        ballot.cut = what == 'c' ? 1 : 0;
        ballot.replicas = what == 'r' ? 1 : 0;
        ballot.proposal = what == '1' ? static_cast<uint8_t>((*found)[1]) : 0;
        ballot.plan_anew = static_cast<uint8_t>((*found)[2]);
        answered_[ballot.step] = ballot;
        if (answered_.size() > kRemembered) {
          answered_.erase(answered_.begin());
        }
        decided_(ballot);
        forget(ballot);
        return;
      }
      if (place_.node == 0 && !foreign) {  // no node that waits may wait for ever
        publish(ballot, {'0', 0, 0});
      }
      foreign = true;
      pause = longest;  // a long value is not read over and over
    }
    pause = std::clamp(pause * 3 / 2, kFirstPause, longest);
  }
}

// This node has read the outcome. Every node writes before it reads, so nothing is written behind
// the last one. Counters carry no seal: this one decides on nothing but when keys go.
void StoreCommit::Worker::forget(const wire::Ballot& ballot) {
  store_->deleteKey(voteKey(ballot, place_.node));
  if (store_->add(commitKey("read", ballot), 1) == place_.nodes) {
    for (const char* what : {"outcome", "read"}) {
      store_->deleteKey(commitKey(what, ballot));
    }
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
      cast(ballot);
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

#include "c10d_backend/store/evidence_exchange.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "intercept/base/json.h"
#include "intercept/base/log.h"
#include "intercept/base/mutex.h"

namespace reft {

namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr milliseconds kAfterFailure{5000};
constexpr milliseconds kJoin{2000};
constexpr double kLongestGatherSec = 600;
constexpr int64_t kMostRequests = 64;  // newest requests handled after a pause of this rank
constexpr size_t kMostInbox = 64;
constexpr milliseconds kPatience{500};  // of one look at the requests, with those not yet written

template <typename Number>
Number number(const json& object, const char* key, Number otherwise) {
  const auto at = object.find(key);
  return at != object.end() && at->is_number() ? at->template get<Number>() : otherwise;
}

std::string dumped(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

class EvidenceExchange::Worker : public std::enable_shared_from_this<Worker> {
 public:
  Worker(const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<const ValueSeal> seal,
         Place place, Send send, Pace pace)
      : store_(store->clone()),
        seal_(std::move(seal)),
        place_(place),
        send_(std::move(send)),
        pace_(pace),
        prefix_("evidence/" + std::to_string(place.incarnation) + "/") {}

  void start() {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }

  void receive(wire::Type type, std::string payload) {
    {
      const MutexLock lock(mutex_);
      if (inbox_.size() >= kMostInbox) {
        return;
      }
      inbox_.emplace_back(type, std::move(payload));
    }
    arrived_.notify_all();
  }

  void stop() {
    const MutexLock lock(mutex_);
    stopping_ = true;
    arrived_.notify_all();
    if (!ended_.wait_for(mutex_, kJoin, [this]() REQUIRES(mutex_) { return over_; })) {
      logWarn("backend", "the store does not answer; abandoned the thread reft-evidence");
    }
  }

 private:
  struct Gathering {
    json id;  // the agent's
    int64_t number = 0;
    std::set<int> missing;
    SteadyTime deadline;
  };

  // An own request that is still in the store.
  struct Written {
    int64_t number = 0;
    SteadyTime until;
    std::set<int> late;  // nodes whose answers arrive too late to be read
  };

  std::string key(const char* what, int64_t number) const {
    return prefix_ + what + "/" + std::to_string(number);
  }
  std::string answerKey(int64_t number, int node) const {
    return key("answer", number) + "/" + std::to_string(node);
  }

  // A value that a rank of `node` has written; a discarded one if none has.
  json read(ValueKind kind, const std::string& name, uint32_t node) {
    const std::vector<uint8_t> bytes = store_->get(name);
    const auto opened =
        seal_->open(kind, name, node, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    return opened ? parseJson(opened->payload) : json(json::value_t::discarded);
  }
  void put(ValueKind kind, const std::string& name, const std::string& text) {
    const std::string value = seal_->seal(kind, name, static_cast<uint32_t>(place_.node), text);
    store_->set(name, std::vector<uint8_t>(value.begin(), value.end()));
  }

  void run() {
    ::pthread_setname_np(::pthread_self(), "reft-evidence");
    bool warned = false;
    auto next = std::chrono::steady_clock::now();
    while (true) {
      std::deque<std::pair<wire::Type, std::string>> messages;
      {
        const MutexLock lock(mutex_);
        arrived_.wait_until(mutex_, next,
                            [this]() REQUIRES(mutex_) { return stopping_ || !inbox_.empty(); });
        if (stopping_) {
          break;
        }
        messages.swap(inbox_);
      }
      try {
        for (const auto& [type, payload] : messages) {
          take(type, payload);
        }
        const auto now = std::chrono::steady_clock::now();
        if (now >= next_requests_) {
          requests();
          forget();
          next_requests_ = now + pace_.requests;
        }
        answers();
        next = gatherings_.empty()
                   ? next_requests_
                   : std::min(next_requests_, std::chrono::steady_clock::now() + pace_.answers);
        warned = false;
      } catch (const std::exception& error) {
        // The store lives in the launcher or in rank 0: without it the job ends or restarts.
        if (!warned) {
          logWarn("backend",
                  "evidence of hangs does not reach other nodes: the store failed: ", error.what());
        }
        warned = true;
        giveUp(error.what());
        next = next_requests_ = std::chrono::steady_clock::now() + kAfterFailure;
      }
    }
    // Here and not with the last reference, which may be dropped when these may no longer be used.
    store_.reset();
    send_ = nullptr;
    const MutexLock lock(mutex_);
    over_ = true;
    ended_.notify_all();
  }

  void take(wire::Type type, const std::string& payload) {
    const json message = parseJson(payload);
    if (!message.is_object()) {
      return;
    }
    if (type == wire::Type::kGather) {
      gather(message);
    } else if (type == wire::Type::kEvidence) {
      answer(message);
    }
  }

  // A request of this node's agent.
  void gather(const json& message) {
    const double seconds =
        std::clamp(number<double>(message, "seconds", 0), 0.0, kLongestGatherSec);
    Gathering gathering;
    gathering.id = message.value("id", json());
    gathering.deadline =
        std::chrono::steady_clock::now() + milliseconds(static_cast<int64_t>(seconds * 1000));
    for (int node = 0; seconds > 0 && node < place_.nodes; ++node) {
      if (node != place_.node) {
        gathering.missing.insert(node);
      }
    }
    // Listed before the first call to the store, so that a failure reaches the agent.
    gatherings_.push_back(gathering);
    const int64_t count = store_->add(prefix_ + "count", 1);
    put(ValueKind::kRequest, key("request", count),
        dumped({{"node", place_.node}, {"kind", message.value("kind", json())}}));
    written_.push_back({count, std::chrono::steady_clock::now() + pace_.kept, {}});
    gatherings_.back().number = count;
    if (seconds <= 0) {
      gatherings_.pop_back();  // no answer is wanted
    }
  }

  // Passes on the requests of other nodes.
  void requests() {
    const int64_t count = store_->add(prefix_ + "count", 0);
    if (count <= seen_) {
      return;
    }
    std::chrono::milliseconds patience = kPatience;
    seen_ = std::max(seen_, count - kMostRequests);
    while (seen_ < count) {
      const int64_t request = ++seen_;
      // The sender counts first and writes then: the request follows within moments.
      if (!there(key("request", request), patience)) {
        continue;
      }
      const json message = read(ValueKind::kRequest, key("request", request), ValueSeal::kAnyRank);
      const int node = message.is_object() ? number<int>(message, "node", -1) : -1;
      if (node < 0 || node == place_.node || store_->check({answerKey(request, place_.node)})) {
        continue;
      }
      send_(wire::Type::kEvidenceRequest,
            dumped({{"id", request}, {"node", node}, {"kind", message.value("kind", json())}}));
    }
  }

  // Waits for a key a short time, and no longer than `patience`, of which it takes that time off:
  // anybody can count up.
  bool there(const std::string& name, milliseconds& patience) {
    for (milliseconds pause : {milliseconds(20), milliseconds(200), milliseconds(0)}) {
      if (store_->check({name})) {
        return true;
      }
      pause = std::min(pause, patience);
      patience -= pause;
      const MutexLock lock(mutex_);
      arrived_.wait_for(mutex_, pause, [this]() REQUIRES(mutex_) { return stopping_; });
    }
    return false;
  }

  // This node's agent answers another.
  void answer(const json& message) {
    const auto request = number<int64_t>(message, "id", -1);
    const std::string value = dumped(message.value("answer", json()));
    const auto asked = key("request", request);
    if (request <= 0 || value.size() > wire::kMaxEvidence + (64u << 10) ||
        !store_->check({asked})) {
      return;
    }
    put(ValueKind::kAnswer, answerKey(request, place_.node), value);
    if (!store_->check({asked})) {
      store_->deleteKey(answerKey(request, place_.node));  // too late: the reader is gone
    }
  }

  void answers() {
    for (auto gathering = gatherings_.begin(); gathering != gatherings_.end();) {
      for (auto node = gathering->missing.begin(); node != gathering->missing.end();) {
        const auto name = answerKey(gathering->number, *node);
        if (!store_->check({name})) {
          ++node;
          continue;
        }
        json answer = read(ValueKind::kAnswer, name, static_cast<uint32_t>(*node));
        store_->deleteKey(name);
        if (!answer.is_object()) {  // not of that node, which may still answer
          ++node;
          continue;
        }
        send_(wire::Type::kGathered,
              dumped({{"id", gathering->id}, {"node", *node}, {"answer", std::move(answer)}}));
        node = gathering->missing.erase(node);
      }
      if (gathering->missing.empty() || std::chrono::steady_clock::now() >= gathering->deadline) {
        tellEnd(*gathering, "");
        for (Written& request : written_) {
          if (request.number == gathering->number) {
            request.late = gathering->missing;
          }
        }
        gathering = gatherings_.erase(gathering);
      } else {
        ++gathering;
      }
    }
  }

  void tellEnd(const Gathering& gathering, const std::string& problem) {
    send_(wire::Type::kGathered, dumped({{"id", gathering.id},
                                         {"silent", gathering.missing},
                                         {"error", problem.substr(0, 300)}}));
  }

  void giveUp(const std::string& why) {
    for (const Gathering& gathering : gatherings_) {
      tellEnd(gathering, "the job's store failed: " + why.substr(0, why.find('\n')));
    }
    gatherings_.clear();
  }

  void forget() {
    while (!written_.empty() && std::chrono::steady_clock::now() >= written_.front().until) {
      const Written request = std::move(written_.front());
      written_.pop_front();
      store_->deleteKey(key("request", request.number));
      for (const int node : request.late) {
        store_->deleteKey(answerKey(request.number, node));
      }
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const ValueSeal> seal_;
  const Place place_;
  Send send_;
  const Pace pace_;
  const std::string prefix_;
  Mutex mutex_;
  ConditionVariable arrived_, ended_;
  std::deque<std::pair<wire::Type, std::string>> inbox_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool over_ GUARDED_BY(mutex_) = false;
  // Used by the thread only.
  SteadyTime next_requests_ = std::chrono::steady_clock::now();
  int64_t seen_ = 0;
  std::vector<Gathering> gatherings_;
  std::deque<Written> written_;
};

EvidenceExchange::Pace EvidenceExchange::paceOf(int nodes) {
  Pace pace;
  pace.requests = std::clamp(milliseconds(nodes), pace.requests, milliseconds(2000));
  return pace;
}

EvidenceExchange::EvidenceExchange(const c10::intrusive_ptr<c10d::Store>& store,
                                   std::shared_ptr<const ValueSeal> seal, Place place, Send send,
                                   Pace pace)
    : owner_(::getpid()),
      worker_(std::make_shared<Worker>(store, std::move(seal), place, std::move(send), pace)) {
  worker_->start();
}

EvidenceExchange::~EvidenceExchange() {
  if (::getpid() == owner_) {
    worker_->stop();
  }
}

std::function<void(wire::Type, std::string)> EvidenceExchange::receiver() const {
  return [worker = worker_](wire::Type type, std::string payload) {
    worker->receive(type, std::move(payload));
  };
}

}  // namespace reft

#include "c10d_backend/store/evidence_exchange.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace reft {
namespace evidence_exchange_test {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr EvidenceExchange::Pace kQuick{milliseconds(5), milliseconds(5), milliseconds(3000)};

std::shared_ptr<const ValueSeal> sealOf(const char* attempt) {
  return std::make_shared<ValueSeal>(std::string(ValueSeal::kSecretBytes, 's'), attempt, 4);
}

// A rank that carries for its agent, which the test plays.
class Carrier {
 public:
  Carrier(const c10::intrusive_ptr<c10d::Store>& store, int node, int nodes,
          uint64_t incarnation = 7)
      : exchange_(
            store, sealOf("attempt"), {node, nodes, incarnation},
            [this](wire::Type type, std::string_view payload) {
              const std::lock_guard lock(mutex_);
              said_.emplace_back(type, json::parse(payload));
              arrived_.notify_all();
            },
            kQuick) {}

  void tell(wire::Type type, const json& message) { exchange_.receive(type, message.dump()); }
  void gather(int id, double seconds, const char* kind = "evidence") {
    tell(wire::Type::kGather, {{"id", id}, {"seconds", seconds}, {"kind", kind}});
  }
  // The next message to the agent; null after `timeout`.
  json next(wire::Type type, milliseconds timeout = milliseconds(60'000)) {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, timeout, [this] { return !said_.empty(); })) {
      return json();
    }
    const auto [said, message] = said_.front();
    said_.pop_front();
    EXPECT_EQ(said, type);
    return message;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::pair<wire::Type, json>> said_;
  EvidenceExchange exchange_;  // last: its thread uses the others
};

class Exchange : public ::testing::Test {
 protected:
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(Exchange, BringsTheEvidenceOfAllNodesToWhoAsks) {
  Carrier first(store_, 0, 3), second(store_, 1, 3), third(store_, 2, 3);
  first.gather(9, 600);
  for (Carrier* other : {&second, &third}) {
    const json request = other->next(wire::Type::kEvidenceRequest);
    EXPECT_EQ(request["node"], 0);
    EXPECT_EQ(request["kind"], "evidence");
    other->tell(wire::Type::kEvidence,
                {{"id", request["id"]}, {"answer", {{"of", other == &second ? 1 : 2}}}});
    const json answer = first.next(wire::Type::kGathered);
    EXPECT_EQ(answer["id"], 9);
    EXPECT_EQ(answer["answer"]["of"], answer["node"]);
  }
  const json end = first.next(wire::Type::kGathered);
  EXPECT_EQ(end["id"], 9);
  EXPECT_EQ(end["silent"], json::array());
  EXPECT_EQ(end["error"], "");
}

std::vector<uint8_t> bytesOf(const std::string& text) {
  return {text.begin(), text.end()};
}

TEST_F(Exchange, EvidenceOfAnOutsiderIsIgnoredAndTheNodeStillAnswers) {
  Carrier first(store_, 0, 2), second(store_, 1, 2);
  first.gather(9, 600);
  const json request = second.next(wire::Type::kEvidenceRequest);
  const std::string key = "evidence/7/answer/" + request["id"].dump() + "/1";
  const auto seal = sealOf("attempt");
  const uint64_t before = ValueSeal::refused();
  int forgeries = 0;
  for (const std::string& forged :
       {std::string(R"({"of": "nobody"})"), std::string(200'000, '['), std::string(8 << 20, ' '),
        seal->seal(ValueKind::kAnswer, key, 0, R"({"of": "another node"})"),
        sealOf("before")->seal(ValueKind::kAnswer, key, 1, R"({"of": "an earlier attempt"})"),
        seal->seal(ValueKind::kAnswer, key + "0", 1, R"({"of": "another key"})")}) {
    store_->set(key, bytesOf(forged));
    while (store_->check({key})) {  // until it is read
      std::this_thread::yield();
    }
    ++forgeries;
  }
  EXPECT_EQ(ValueSeal::refused(), before + forgeries);
  second.tell(wire::Type::kEvidence, {{"id", request["id"]}, {"answer", {{"of", 1}}}});
  EXPECT_EQ(first.next(wire::Type::kGathered)["answer"]["of"], 1);
}

TEST_F(Exchange, DeepJsonOfANodeItselfIsNotCopied) {
  Carrier first(store_, 0, 2), second(store_, 1, 2);
  first.gather(9, 2);
  const json request = second.next(wire::Type::kEvidenceRequest);
  const std::string key = "evidence/7/answer/" + request["id"].dump() + "/1";
  store_->set(
      key, bytesOf(sealOf("attempt")->seal(ValueKind::kAnswer, key, 1,
                                           std::string(200'000, '[') + std::string(200'000, ']'))));
  EXPECT_EQ(first.next(wire::Type::kGathered)["silent"], json({1}));
}

TEST_F(Exchange, ARequestOfAnOutsiderIsNotPassedOn) {
  Carrier first(store_, 0, 2), second(store_, 1, 2);
  store_->set("evidence/7/request/1", bytesOf(R"({"node": 0, "kind": "evidence"})"));
  store_->add("evidence/7/count", 1);
  first.gather(9, 600);
  EXPECT_EQ(second.next(wire::Type::kEvidenceRequest)["id"], 2);
}

TEST_F(Exchange, SaysWhoIsSilentWhenTimeIsOver) {
  Carrier first(store_, 0, 3), second(store_, 1, 3);
  first.gather(9, 5);
  const json request = second.next(wire::Type::kEvidenceRequest);
  second.tell(wire::Type::kEvidence, {{"id", request["id"]}, {"answer", {{"of", 1}}}});
  EXPECT_EQ(first.next(wire::Type::kGathered)["node"], 1);
  EXPECT_EQ(first.next(wire::Type::kGathered)["silent"], json({2}));
}

TEST_F(Exchange, AnotherRankOfTheNodeStepsIn) {
  Carrier first(store_, 0, 2), stopped(store_, 1, 2), other(store_, 1, 2);
  first.gather(1, 600);
  EXPECT_EQ(stopped.next(wire::Type::kEvidenceRequest)["node"],
            0);  // and its agent does not get an answer through
  const json request = other.next(wire::Type::kEvidenceRequest);
  other.tell(wire::Type::kEvidence, {{"id", request["id"]}, {"answer", {{"of", 1}}}});
  EXPECT_EQ(first.next(wire::Type::kGathered)["node"], 1);
}

TEST_F(Exchange, WhatNeedsNoAnswerIsPassedOnAndWaitsForNone) {
  Carrier first(store_, 0, 2), second(store_, 1, 2);
  second.gather(0, 0, "please");
  EXPECT_EQ(first.next(wire::Type::kEvidenceRequest)["kind"], "please");
  first.gather(0, 0, "hold");
  EXPECT_EQ(second.next(wire::Type::kEvidenceRequest)["kind"], "hold");
  EXPECT_TRUE(first.next(wire::Type::kGathered, milliseconds(50)).is_null());
}

TEST_F(Exchange, RequestsOfAnotherAttemptAreNotSeen) {
  Carrier before(store_, 0, 2, 6), second(store_, 1, 2, 7);
  before.gather(1, 0.1);
  EXPECT_EQ(before.next(wire::Type::kGathered)["silent"], json({1}));
  EXPECT_TRUE(second.next(wire::Type::kEvidenceRequest, milliseconds(50)).is_null());
}

TEST_F(Exchange, LeavesNothingButACounterInTheStore) {
  {
    Carrier first(store_, 0, 2), second(store_, 1, 2);
    first.gather(1, 0.05);
    const json request = second.next(wire::Type::kEvidenceRequest);
    EXPECT_EQ(first.next(wire::Type::kGathered)["silent"], json({1}));
    second.tell(wire::Type::kEvidence,
                {{"id", request["id"]}, {"answer", {{"of", 1}}}});  // too late
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (store_->getNumKeys() > 1 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  EXPECT_EQ(store_->getNumKeys(), 1);
}

// A store that breaks while it is asked for what `request` writes.
class BrokenStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  int64_t add(const std::string& key, int64_t value) override {
    if (broken) {
      throw std::runtime_error("connection reset\nby peer");
    }
    return HashStore::add(key, value);
  }
  std::atomic<bool> broken{false};
};

TEST(BrokenExchange, TellsTheAgentWhyOtherNodesAreSilent) {
  auto store = c10::make_intrusive<BrokenStore>();
  Carrier first(store, 0, 2);
  store->broken = true;
  first.gather(4, 600);
  const json end = first.next(wire::Type::kGathered);
  EXPECT_EQ(end["silent"], json({1}));
  EXPECT_EQ(end["error"], "the job's store failed: connection reset");
}

}  // namespace evidence_exchange_test
}  // namespace reft

// Two agents' meshes over this host's loopback, with and without TLS.
#include "agent/mesh/mesh.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "intercept/base/error.h"
#include "snapshot/vault/reader.h"
#include "tests/unit/agent/mesh/owner.h"

namespace reft::agent {
namespace mesh_tests {

using mesh_test::connectTo;
using mesh_test::eventually;
using mesh_test::fillOf;
using mesh_test::kWorld;
using mesh_test::Owner;
using mesh_test::withTls;

constexpr uint64_t kIncarnation = 7;
const MeshKey kKey{1, 2, 3};

// An agent's mesh, and what wakes the agent.
struct Node {
  UniqueFd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::unique_ptr<Mesh> mesh = std::make_unique<Mesh>("job", wake.get());
  uint16_t port = 0;
  std::vector<Mesh::Event> events;

  explicit Node(const MeshKey& key = kKey, uint16_t wanted = 0, bool tls = withTls()) {
    port = mesh->open(key, "127.0.0.1", wanted, tls);
  }
  // Whether a slot of a rank has been answered.
  bool heard(int rank, int64_t step, bool held = true) {
    for (const Mesh::Event& event : mesh->events()) {
      events.push_back(event);
    }
    return std::any_of(events.begin(), events.end(), [&](const Mesh::Event& event) {
      return event.rank == rank && event.key.step == step && event.held == held;
    });
  }
  void keep(uint16_t from, std::vector<int> ranks, uint64_t room = 1 << 30) const {
    mesh->keep({kIncarnation, kWorld, {{"127.0.0.1", from, std::move(ranks)}}, room, 0});
  }
  char fill(int rank, int64_t step) const {
    for (const Mesh::Copy& copy : mesh->copies()) {
      if (copy.rank == rank) {
        return fillOf(copy.vault->get(), step, kIncarnation);
      }
    }
    return '?';
  }
};

void say(const UniqueFd& socket, const std::string& bytes) {
  ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// Whether the other side has ended the connection; reads what it said.
bool isClosed(const UniqueFd& socket) {
  char bytes[4096];
  const ssize_t got = ::recv(socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

class MeshTest : public testing::TestWithParam<bool> {
 protected:
  void seal(Owner& owner, int rank, uint32_t slot, int64_t step, char fill) {
    owner.seal(slot, step, kIncarnation, fill);
    node_.mesh->sealed(rank, {step, kIncarnation});
  }
  Node node_;  // of the owner
};

TEST_P(MeshTest, ASealedSlotIsOnTheOtherNode) {
  Owner one(1), two(2);
  node_.mesh->vault(1, one.fd());
  node_.mesh->vault(2, two.fd());
  Node keeper;
  keeper.keep(node_.port, {1, 2});
  ASSERT_TRUE(eventually([&] { return keeper.mesh->status().connected == 1; }));
  seal(one, 1, 0, 3, 'a');
  seal(two, 2, 0, 3, 'b');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3) && node_.heard(2, 3); }));
  EXPECT_EQ(keeper.fill(1, 3), 'a');
  EXPECT_EQ(keeper.fill(2, 3), 'b');
  EXPECT_EQ(fillOf(keeper.mesh->copyOf(2, kWorld)->get(), 3, kIncarnation), 'b');
  EXPECT_EQ(keeper.mesh->copyOf(0, kWorld), nullptr);
  EXPECT_EQ(keeper.mesh->copyOf(2, kWorld + 1), nullptr);
  // A thread of the keeper's publishes what it has counted when it has answered.
  EXPECT_TRUE(
      eventually([&] { return keeper.mesh->status().taken_bytes > 2 * mesh_test::kPayload; }));
  EXPECT_EQ(node_.mesh->status().keepers, 1);
  EXPECT_EQ(node_.mesh->status().tls, withTls());
}

// A step is committed once the copies of all ranks are there: those of later steps must not come
// before them.
TEST_P(MeshTest, SlotsOfTheEarliestStepComeFirst) {
  Owner one(1), two(2);
  node_.mesh->vault(1, one.fd());
  node_.mesh->vault(2, two.fd());
  seal(one, 1, 0, 3, 'a');
  seal(one, 1, 1, 4, 'b');
  seal(two, 2, 0, 3, 'c');
  seal(two, 2, 1, 4, 'd');
  Node keeper;
  keeper.keep(node_.port, {1, 2});
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 4) && node_.heard(2, 4); }));
  std::vector<std::pair<int64_t, int>> order;
  for (const Mesh::Event& event : node_.events) {
    order.emplace_back(event.key.step, event.rank);
  }
  EXPECT_EQ(order, (std::vector<std::pair<int64_t, int>>{{3, 1}, {3, 2}, {4, 1}, {4, 2}}));
}

TEST_P(MeshTest, WhatAnEarlierAttemptLeftComesBeforeAllElse) {
  Owner one(1), two(2);
  node_.mesh->vault(1, one.fd());
  node_.mesh->vault(2, two.fd());
  node_.mesh->keep({kIncarnation, kWorld, {}, 0, 0});  // tells it which attempt is the present one
  seal(one, 1, 0, 3, 'a');
  two.seal(0, 6, kIncarnation - 1, 'b');
  Node keeper;
  keeper.keep(node_.port, {1, 2});
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3) && node_.heard(2, 6); }));
  EXPECT_EQ(node_.events.at(0).key, (CommitKey{6, kIncarnation - 1}));
}

TEST_P(MeshTest, ASlotOfManyMegabytesArrives) {
  Owner owner(1, 20'000'001);
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(node_.port, {1});
  seal(owner, 1, 0, 3, 'a');
  seal(owner, 1, 1, 4, 'b');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3) && node_.heard(1, 4); }));
  EXPECT_EQ(keeper.fill(1, 3), 'a');
  EXPECT_EQ(keeper.fill(1, 4), 'b');
}

// More comes at once than is read in one pass, and nothing comes afterwards.
TEST_P(MeshTest, ASmallBudgetLeavesNothingBehind) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.mesh = std::make_unique<Mesh>("job", keeper.wake.get(), SteadyClock::instance(), 1000);
  keeper.mesh->open(kKey, "127.0.0.1", 0, withTls());
  keeper.keep(node_.port, {1});
  seal(owner, 1, 0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3); }));
  EXPECT_EQ(keeper.fill(1, 3), 'a');
}

TEST_P(MeshTest, StepAfterStepArrives) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(node_.port, {1});
  for (int64_t step = 1; step <= 20; ++step) {
    seal(owner, 1, step % 2, step, static_cast<char>('a' + step));
    ASSERT_TRUE(eventually([&] { return node_.heard(1, step); })) << step;
    EXPECT_EQ(keeper.fill(1, step), 'a' + step);
    node_.mesh->committed({step, kIncarnation});
  }
}

TEST_P(MeshTest, WhatWasSealedBeforeTheKeeperCameArrivesToo) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  seal(owner, 1, 0, 3, 'a');
  seal(owner, 1, 1, 4, 'b');
  auto keeper = std::make_unique<Node>();
  keeper->keep(node_.port, {1});
  ASSERT_TRUE(eventually([&] { return keeper->fill(1, 3) == 'a' && keeper->fill(1, 4) == 'b'; }));
  keeper = std::make_unique<Node>();  // another one that has lost all
  keeper->keep(node_.port, {1});
  EXPECT_TRUE(eventually([&] { return keeper->fill(1, 3) == 'a' && keeper->fill(1, 4) == 'b'; }));
}

TEST_P(MeshTest, AKeeperFindsAnOwnersAgentThatWasStartedAgain) {
  Owner owner;
  auto first = std::make_unique<Node>();
  first->mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(first->port, {1});
  owner.seal(0, 3, kIncarnation, 'a');
  first->mesh->sealed(1, {3, kIncarnation});
  ASSERT_TRUE(eventually([&] { return first->heard(1, 3); }));
  const uint16_t port = first->port;
  first.reset();
  ASSERT_TRUE(eventually([&] { return keeper.mesh->status().connected == 0; }));
  EXPECT_FALSE(keeper.mesh->status().problem.empty());
  EXPECT_EQ(keeper.fill(1, 3), 'a') << "copies stay";
  Node second(kKey, port);
  ASSERT_EQ(second.port, port);
  second.mesh->vault(1, owner.fd());
  owner.seal(1, 4, kIncarnation, 'b');
  second.mesh->sealed(1, {4, kIncarnation});
  EXPECT_TRUE(eventually([&] { return second.heard(1, 4); }));
  EXPECT_EQ(keeper.fill(1, 4), 'b');
}

TEST_P(MeshTest, AKeeperOfAnotherJobGetsNothing) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  seal(owner, 1, 0, 3, 'a');
  Node other(MeshKey{9});
  other.keep(node_.port, {1});
  ASSERT_TRUE(eventually([&] {
    return !other.mesh->status().problem.empty() &&
           other.mesh->status().problem != "not connected yet";
  }));
  EXPECT_EQ(other.mesh->status().problem, "has not the key of this job");
  EXPECT_EQ(node_.mesh->status().keepers, 0);
  EXPECT_EQ(node_.mesh->status().sent_bytes, 0u);
  EXPECT_TRUE(other.mesh->copies().empty());
}

TEST_P(MeshTest, AnAgentThatHasAnotherSettingOfTlsGetsNothingAndBothFindOutWhy) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  seal(owner, 1, 0, 3, 'a');
  testing::internal::CaptureStderr();
  {
    Node other(kKey, 0, !withTls());
    other.keep(node_.port, {1});
    EXPECT_TRUE(eventually([&] {
      return other.mesh->status().problem.find("REFT_MESH_TLS differs") != std::string::npos;
    })) << other.mesh->status().problem;
    EXPECT_EQ(other.mesh->status().connected, 0);
    EXPECT_TRUE(other.mesh->copies().empty());
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find(
                "mesh: a connection: REFT_MESH_TLS differs between the nodes: set it to the same"),
            std::string::npos);
  EXPECT_EQ(node_.mesh->status().keepers, 0);
  EXPECT_EQ(node_.mesh->status().sent_bytes, 0u);
  Node keeper;
  keeper.keep(node_.port, {1});
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3); }));
  EXPECT_EQ(keeper.fill(1, 3), 'a');
}

TEST_P(MeshTest, AnotherSettingOfTlsEndsTheConnectionsBefore) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(node_.port, {1});
  ASSERT_TRUE(eventually([&] { return node_.mesh->status().keepers == 1; }));
  const uint16_t port = node_.mesh->open(kKey, "127.0.0.1", 0, !withTls());
  ASSERT_TRUE(eventually([&] { return node_.mesh->status().keepers == 0; }));
  EXPECT_TRUE(eventually([&] { return node_.mesh->status().tls == !withTls(); }));
  Node other(kKey, 0, !withTls());
  other.keep(port, {1});
  seal(owner, 1, 0, 3, 'a');
  EXPECT_TRUE(eventually([&] { return other.fill(1, 3) == 'a'; }));
}

TEST_P(MeshTest, StrangersDisturbNothing) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(connectTo(node_.port));
    switch (i % 4) {
      case 0: break;
      case 1: say(strangers.back(), std::string(4096, 'x')); break;
      case 2: say(strangers.back(), greetingOf(Nonce{1}) + std::string(100, 'y')); break;
      case 3: say(strangers.back(), greetingOf(Nonce{2}).substr(0, 20)); break;
    }
  }
  Node keeper;
  keeper.keep(node_.port, {1});
  seal(owner, 1, 0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3); }));
  EXPECT_EQ(keeper.fill(1, 3), 'a');
  EXPECT_TRUE(eventually([&] { return std::all_of(strangers.begin(), strangers.end(), isClosed); }))
      << "all are closed in the end";
  EXPECT_GE(node_.mesh->status().refused, 100u);
  EXPECT_EQ(node_.mesh->status().keepers, 1);
}

TEST_P(MeshTest, AKeeperWithoutMemorySaysSo) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(node_.port, {1}, 1000);
  seal(owner, 1, 0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3, false); }));
  EXPECT_EQ(keeper.fill(1, 3), '?');
}

TEST_P(MeshTest, ASlotThatMustWaitIsOfferedAgainAfterACommit) {
  Owner before;
  before.seal(0, 5, 1, 'a');
  before.seal(1, 6, 1, 'b');
  node_.mesh->vault(1, before.fd());
  Node keeper;
  keeper.keep(node_.port, {1});
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 5) && node_.heard(1, 6); }));
  Owner owner;  // of the next attempt
  node_.mesh->vault(1, owner.fd());
  seal(owner, 1, 0, 7, 'c');
  seal(owner, 1, 1, 8, 'd');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 7); }));
  EXPECT_EQ(keeper.fill(1, 7), 'c');
  node_.mesh->committed({7, kIncarnation});
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 8); }));
  EXPECT_EQ(keeper.fill(1, 8), 'd');
}

TEST_P(MeshTest, CopiesThatAreNoLongerItsToKeepGoWithTheFirstCommit) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(node_.port, {1});
  seal(owner, 1, 0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3); }));
  keeper.mesh->keep({kIncarnation + 1, kWorld, {}, 1 << 20, 0});
  EXPECT_EQ(keeper.fill(1, 3), 'a') << "the next restart may need it";
  keeper.mesh->committed({4, kIncarnation + 1});
  EXPECT_TRUE(eventually([&] { return keeper.mesh->copies().empty(); }));
}

TEST_P(MeshTest, WithoutMemoryForOthersAllCopiesGoAtOnce) {
  Owner owner;
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  keeper.keep(node_.port, {1});
  seal(owner, 1, 0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(1, 3); }));
  keeper.mesh->keep({kIncarnation, kWorld, {}, 0, 0});
  EXPECT_TRUE(eventually([&] { return keeper.mesh->copies().empty(); }));
}

// The outcome of a fetch.
Mesh::Fetched fetched(Node& keeper, std::vector<int> ranks, int world = kWorld) {
  const uint64_t number = keeper.mesh->fetch(world, std::move(ranks), 1 << 30);
  std::vector<Mesh::Fetched> found;
  EXPECT_TRUE(eventually([&] { return !(found = keeper.mesh->fetched()).empty(); }));
  EXPECT_EQ(found.at(0).number, number);
  return found.at(0);
}

// Remembers where a node is that has ranks 1 and 2.
void remember(Node& keeper, uint16_t port) {
  keeper.mesh->keep({kIncarnation, kWorld, {{"127.0.0.1", port, {1, 2}}}, 0, 0, true});
}

TEST_P(MeshTest, WhatANodeWithoutRanksHasIsFetchedOnDemand) {
  Owner one(1), two(2);
  node_.mesh->vault(1, one.fd());
  node_.mesh->vault(2, two.fd());
  Node keeper;
  remember(keeper, node_.port);
  seal(one, 1, 0, 3, 'a');
  seal(one, 1, 1, 4, 'b');
  seal(two, 2, 0, 4, 'c');
  one.began(11, 2);
  const Mesh::Fetched found = fetched(keeper, {0, 1, 7});
  EXPECT_EQ(found.ranks, std::vector<int>{1});
  EXPECT_EQ(found.problem, "");
  EXPECT_EQ(keeper.fill(1, 3), 'a');
  EXPECT_EQ(keeper.fill(1, 4), 'b');
  EXPECT_EQ(keeper.fill(2, 4), '?') << "nobody has asked for it";
  const auto copy = keeper.mesh->copyOf(1, kWorld);
  ASSERT_NE(copy, nullptr);
  const VaultReader reader(copy->get());
  EXPECT_EQ(reader.stats().incarnation.load(), 11u);
  EXPECT_EQ(reader.stats().restored_step.load(), 2u);
  EXPECT_TRUE(keeper.mesh->fetched().empty());
  EXPECT_EQ(fetched(keeper, {1, 2}).ranks, (std::vector<int>{1, 2})) << "that of rank 1 is there";
  EXPECT_EQ(keeper.fill(2, 4), 'c');
}

TEST_P(MeshTest, NothingIsCopiedBeforeItIsFetchedAndNothingStaysAfterACommit) {
  Owner owner(1);
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  remember(keeper, node_.port);
  seal(owner, 1, 0, 3, 'a');
  EXPECT_EQ(fetched(keeper, {2}).ranks, std::vector<int>{}) << "it has no vault of that rank";
  EXPECT_EQ(keeper.mesh->status().taken_bytes, 0u);
  EXPECT_EQ(fetched(keeper, {1}).ranks, std::vector<int>{1});
  remember(keeper, node_.port);
  EXPECT_EQ(keeper.fill(1, 3), 'a') << "the attempt has committed nothing yet";
  keeper.mesh->committed({5, kIncarnation});
  EXPECT_TRUE(eventually([&] { return keeper.mesh->copies().empty(); }));
}

TEST_P(MeshTest, AFetchEndsIfNobodyAnswers) {
  Node keeper;
  auto gone = std::make_unique<Node>();
  remember(keeper, gone->port);
  gone.reset();
  const Mesh::Fetched found = fetched(keeper, {1});
  EXPECT_EQ(found.ranks, std::vector<int>{});
  EXPECT_NE(found.problem.find("127.0.0.1: "), std::string::npos) << found.problem;
  EXPECT_EQ(fetched(keeper, {}).problem, "");
  EXPECT_EQ(fetched(keeper, {1}, kWorld + 1).problem, "") << "of another job";
}

TEST_P(MeshTest, ACommitOfAnAttemptThatRemembersNothingEndsWhatAnEarlierOneKept) {
  Owner owner(1);
  node_.mesh->vault(1, owner.fd());
  Node keeper;
  remember(keeper, node_.port);
  seal(owner, 1, 0, 3, 'a');
  EXPECT_EQ(fetched(keeper, {1}).ranks, std::vector<int>{1});
  keeper.mesh->committed({9, kIncarnation + 1});
  EXPECT_TRUE(eventually([&] { return keeper.mesh->copies().empty(); }));
  EXPECT_EQ(fetched(keeper, {1}).ranks, std::vector<int>{});
}

TEST_P(MeshTest, EachFetchHasItsOwnOutcome) {
  Owner owner(1);
  node_.mesh->vault(1, owner.fd());
  seal(owner, 1, 0, 3, 'a');
  Node keeper;
  remember(keeper, node_.port);
  const uint64_t first = keeper.mesh->fetch(kWorld, {2}, 1 << 30);
  const uint64_t second = keeper.mesh->fetch(kWorld, {1}, 1 << 30);
  std::vector<Mesh::Fetched> found;
  EXPECT_TRUE(eventually([&] {
    for (const Mesh::Fetched& one : keeper.mesh->fetched()) {
      found.push_back(one);
    }
    return found.size() == 2;
  }));
  EXPECT_EQ(found[0].number, first);
  EXPECT_EQ(found[1].number, second);
  EXPECT_EQ(found[1].ranks, std::vector<int>{1});
}

TEST_P(MeshTest, AFetchFromAnAgentOfAnotherJobEnds) {
  Node keeper;
  const Node other(MeshKey{9});
  remember(keeper, other.port);
  const Mesh::Fetched found = fetched(keeper, {1});
  EXPECT_EQ(found.ranks, std::vector<int>{});
  EXPECT_NE(found.problem, "");
}

TEST_P(MeshTest, AKeeperThatCopiesAllTheTimeFetchesNothing) {
  Node keeper;
  keeper.keep(node_.port, {1});
  ASSERT_TRUE(eventually([&] { return keeper.mesh->status().connected == 1; }));
  EXPECT_EQ(fetched(keeper, {1}).ranks, std::vector<int>{});
  EXPECT_EQ(keeper.mesh->status().connected, 1) << "and stays connected";
}

TEST_P(MeshTest, AnAddressOfNoHostHereIsAnError) {
  Node other;
  EXPECT_THROW(other.mesh->open(kKey, "192.0.2.77", 0), SystemError);
  EXPECT_THROW(other.mesh->open(kKey, "localhost", 0), Unavailable) << "no name is looked up";
}

INSTANTIATE_TEST_SUITE_P(Mesh, MeshTest, testing::Bool(), mesh_test::tlsName);

}  // namespace mesh_tests
}  // namespace reft::agent

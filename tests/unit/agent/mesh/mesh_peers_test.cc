// A mesh against peers that a test plays by hand, with and without TLS: what they see, and what
// they cannot do.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/mesh/channel.h"
#include "agent/mesh/copy_store.h"
#include "agent/mesh/frames.h"
#include "agent/mesh/handshake.h"
#include "agent/mesh/mesh.h"
#include "agent/mesh/tls.h"
#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/unique_fd.h"
#include "tests/unit/agent/mesh/owner.h"

namespace reft::agent {
namespace mesh_peers_test {

using mesh_test::eventually;
using mesh_test::fillOf;
using mesh_test::kWorld;
using mesh_test::Owner;
using mesh_test::withTls;

constexpr uint64_t kIncarnation = 7;
const MeshKey kKey{1, 2, 3};

// One side of a connection, played by hand. A call that waits for half a minute fails its test.
class Peer {
 public:
  Peer(UniqueFd socket, Tls::Side side) {
    ::signal(SIGPIPE, SIG_IGN);  // as in the agent
    ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
    channel_ =
        withTls() ? Tls(kKey).over(std::move(socket), side) : plainChannel(std::move(socket));
  }
  static Peer connectedTo(uint16_t port) {
    return {mesh_test::connectTo(port), Tls::Side::kClient};
  }

  void sayBytes(const std::string& bytes) const {
    for (size_t at = 0; at < bytes.size();) {
      const ptrdiff_t said = channel_->write(std::string_view(bytes).substr(at));
      ASSERT_NE(said, Channel::kOver);
      if (said == 0) {
        wait(channel_->wantsWrite(true) ? POLLOUT : POLLIN);
      }
      at += static_cast<size_t>(said);
    }
  }
  void say(MeshType type, const std::string& payload = "") {
    sayBytes(sealer_->seal(type, payload));
  }
  // The next bytes; fewer if the other side has ended the connection.
  std::string hearBytes(size_t count) const {
    std::string bytes(count, '\0');
    size_t have = 0;
    while (have < count && !testing::Test::HasFailure()) {
      const ptrdiff_t got =
          channel_->read(reinterpret_cast<std::byte*>(bytes.data()) + have, count - have);
      if (got == Channel::kOver) {
        break;
      }
      if (got == 0) {
        wait(channel_->wantsRead() ? POLLIN : POLLOUT);
      }
      have += static_cast<size_t>(got);
    }
    bytes.resize(have);
    return bytes;
  }
  // The next frame; one of no type if there is none any more.
  MeshFrame hear() {
    while (true) {
      const std::string bytes = hearBytes(reader_->wants());
      if (bytes.size() != reader_->wants()) {
        return {MeshType{}, ""};
      }
      if (auto frame = reader_->take(bytes)) {
        return *frame;
      }
    }
  }
  bool isEnded() {
    while (true) {
      if (hearBytes(1).empty()) {
        return !testing::Test::HasFailure();
      }
    }
  }

  void shakeAsKeeper() {
    const Nonce own = drawNonce();
    sayBytes(greetingOf(own));
    const auto owner = openAnswer(kKey, own, hearBytes(kAnswerBytes));
    ASSERT_TRUE(owner);
    sayBytes(proofOf(kKey, own, *owner));
    const SessionKeys keys = sessionKeysOf(kKey, own, *owner);
    sealer_.emplace(keys.of_keeper);
    reader_.emplace(keys.of_owner);
  }
  void shakeAsOwner() {
    const Nonce own = drawNonce();
    const auto keeper = openGreeting(hearBytes(kGreetingBytes));
    ASSERT_TRUE(keeper);
    sayBytes(answerOf(kKey, *keeper, own));
    ASSERT_TRUE(isProof(kKey, *keeper, own, hearBytes(kProofBytes)));
    const SessionKeys keys = sessionKeysOf(kKey, *keeper, own);
    sealer_.emplace(keys.of_owner);
    reader_.emplace(keys.of_keeper);
  }

 private:
  void wait(short events) const {
    pollfd socket{channel_->fd(), events, 0};
    EXPECT_GT(::poll(&socket, 1, 30'000), 0) << "nothing happens";
  }

  std::unique_ptr<Channel> channel_;
  std::optional<FrameSealer> sealer_;
  std::optional<FrameReader> reader_;
};

std::string heldOf(const SlotHead& head, Kept kept) {
  return payloadOf(HeldSlot{head.rank, kept, head.step, head.incarnation});
}

// An agent's mesh.
struct Node {
  explicit Node(const Clock& clock = SteadyClock::instance(), const MeshKey& key = kKey)
      : mesh("job", wake.get(), clock), port(mesh.open(key, "127.0.0.1", 0, withTls())) {}

  void keep(uint16_t from, uint64_t room = 1 << 30) {
    mesh.keep({kIncarnation, kWorld, {{"127.0.0.1", from, {1}}}, room, 0});
  }
  // Whether the fate of rank 1's slot is known.
  bool heard(int64_t step, bool held = true) {
    for (const Mesh::Event& event : mesh.events()) {
      events.push_back(event);
    }
    return std::any_of(events.begin(), events.end(), [&](const Mesh::Event& event) {
      return event.rank == 1 && event.key == CommitKey{step, kIncarnation} && event.held == held;
    });
  }
  char fill(int64_t step) const {
    for (const Mesh::Copy& copy : mesh.copies()) {
      return fillOf(copy.vault->get(), step, kIncarnation);
    }
    return '?';
  }

  UniqueFd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  Mesh mesh;
  uint16_t port = 0;
  std::vector<Mesh::Event> events;
};

// The mesh under test is the owner's; keepers are played.
class MeshKeepersTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { node_.mesh.vault(1, owner_.fd()); }
  void seal(uint32_t slot, int64_t step, char fill) {
    owner_.seal(slot, step, kIncarnation, fill);
    node_.mesh.sealed(1, {step, kIncarnation});
  }
  Peer keeper(std::vector<int> ranks = {1}) const {
    Peer peer = Peer::connectedTo(node_.port);
    peer.shakeAsKeeper();
    peer.say(MeshType::kWant, payloadOf(Want{kWorld, std::move(ranks)}));
    return peer;
  }
  static SlotHead offer(Peer& keeper) {
    MeshFrame frame = keeper.hear();
    while (frame.type == MeshType::kAll) {
      frame = keeper.hear();
    }
    EXPECT_EQ(frame.type, MeshType::kOffer);
    return frame.type == MeshType::kOffer ? slotHeadIn(frame.payload) : SlotHead{};
  }
  // Time passes for the owner's mesh: 1 s in each of so many passes of its loop.
  void pass(int seconds) {
    for (int i = 0; i < seconds; ++i) {
      clock_.advance(std::chrono::seconds(1));
      const uint64_t refused = node_.mesh.status().refused;
      { const Peer stranger = Peer::connectedTo(node_.port); }
      ASSERT_TRUE(eventually([&] { return node_.mesh.status().refused > refused; }));
    }
  }

  Owner owner_;
  ManualClock clock_;
  Node node_{clock_};
};

TEST_P(MeshKeepersTest, AKeeperGetsTheBytesThatTheOfferHasAnnounced) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  const SlotHead head = offer(peer);
  EXPECT_EQ(payloadOf(head), payloadOf(owner_.head(0)));
  peer.say(MeshType::kSend);
  ASSERT_EQ(peer.hear().type, MeshType::kBytes);
  EXPECT_EQ(peer.hearBytes(head.bytes()), owner_.bytes(0));
  EXPECT_FALSE(node_.heard(3)) << "only the keeper's word counts";
  peer.say(MeshType::kHeld, heldOf(head, Kept::kYes));
  EXPECT_TRUE(eventually([&] { return node_.heard(3); }));
  EXPECT_EQ(node_.mesh.status().sent_bytes, head.bytes());
}

TEST_P(MeshKeepersTest, AnOfferNamesTheSlotsThatTheRankStillHasAndWhetherAStepIsCommitted) {
  seal(0, 3, 'a');
  seal(1, 4, 'b');
  Peer peer = keeper();
  SlotHead head = offer(peer);
  EXPECT_EQ(head.step, 3);
  EXPECT_EQ(head.still_count, 2);
  EXPECT_EQ(head.has_committed, 0);
  node_.mesh.committed({3, kIncarnation});
  peer.say(MeshType::kHeld, heldOf(head, Kept::kYes));
  head = offer(peer);
  EXPECT_EQ(head.step, 4);
  EXPECT_EQ(head.has_committed, 1);
}

TEST_P(MeshKeepersTest, ASlotThatIsOverwrittenBeforeItIsSentIsNotTakenForWhole) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  const SlotHead head = offer(peer);
  owner_.seal(0, 4, kIncarnation, 'b');
  peer.say(MeshType::kSend);
  ASSERT_EQ(peer.hear().type, MeshType::kBytes);
  const std::string bytes = peer.hearBytes(head.bytes());
  ASSERT_EQ(bytes.size(), head.bytes());
  CopyStore store("job");
  Kept answer = Kept::kNo;
  const auto incoming = store.begin(head, answer);
  EXPECT_THROW(
      {
        for (size_t at = 0; !incoming->next().empty();) {
          const auto room = incoming->next();
          std::memcpy(room.data(), bytes.data() + at, room.size());
          at += room.size();
          incoming->took(room.size());
        }
      },
      Corruption);
}

TEST_P(MeshKeepersTest, ASlotThatIsOverwrittenBeforeItsOfferIsNotOffered) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  const SlotHead first = offer(peer);
  seal(1, 4, 'b');
  seal(1, 5, 'c');
  peer.say(MeshType::kHeld, heldOf(first, Kept::kYes));
  EXPECT_EQ(offer(peer).step, 5);
}

TEST_P(MeshKeepersTest, ASlotOfAnAbortedStepIsNotOffered) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  const SlotHead first = offer(peer);
  seal(1, 4, 'b');
  node_.mesh.aborted({4, kIncarnation});
  seal(0, 5, 'c');
  peer.say(MeshType::kHeld, heldOf(first, Kept::kYes));
  EXPECT_EQ(offer(peer).step, 5);
}

TEST_P(MeshKeepersTest, WhatMustWaitIsOfferedAgainAfterACommitAndNotBefore) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  const SlotHead head = offer(peer);
  peer.say(MeshType::kHeld, heldOf(head, Kept::kLater));
  uint64_t woken = 0;  // the answer is there once it has woken the agent
  ASSERT_TRUE(eventually([&] { return ::read(node_.wake.get(), &woken, sizeof(woken)) > 0; }));
  EXPECT_TRUE(node_.mesh.events().empty());
  seal(1, 4, 'b');
  node_.mesh.committed({3, kIncarnation});
  const SlotHead again = offer(peer);
  EXPECT_EQ(again.step, 3);
  EXPECT_EQ(again.has_committed, 1);
  peer.say(MeshType::kHeld, heldOf(again, Kept::kYes));
  EXPECT_EQ(offer(peer).step, 4);
}

TEST_P(MeshKeepersTest, WhatMustWaitForACommitThatCameSinceItsOfferIsOfferedAgainAtOnce) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  const SlotHead head = offer(peer);
  EXPECT_EQ(head.has_committed, 0);
  node_.mesh.committed({2, kIncarnation});
  peer.say(MeshType::kHeld, heldOf(head, Kept::kLater));
  const SlotHead again = offer(peer);
  EXPECT_EQ(again.step, 3);
  EXPECT_EQ(again.has_committed, 1);
}

TEST_P(MeshKeepersTest, FramesThatAreNotDueEndTheirConnectionOnly) {
  Node good;
  good.keep(node_.port);
  seal(0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(3); }));
  const SlotHead head = owner_.head(0);
  for (const auto& [type, payload] : std::vector<std::pair<MeshType, std::string>>{
           {MeshType::kBytes, ""},
           {MeshType::kOffer, payloadOf(head)},
           {MeshType::kHeld, payloadOf(HeldSlot{1, Kept::kYes, 99, kIncarnation})},
           {MeshType::kHeld, "x"},
           {MeshType::kWant, "x"}}) {
    Peer bad = keeper();
    offer(bad);
    bad.say(type, payload);
    EXPECT_TRUE(bad.isEnded()) << static_cast<int>(type) << " of " << payload.size();
  }
  Peer silent = Peer::connectedTo(node_.port);
  silent.shakeAsKeeper();
  silent.say(MeshType::kSend);  // of nothing
  EXPECT_TRUE(silent.isEnded());
  Peer half = keeper();
  half.sayBytes(FrameSealer(Sha256{}).seal(MeshType::kSend, std::string(100, 'x')).substr(0, 50));
  seal(1, 4, 'b');
  ASSERT_TRUE(eventually([&] { return node_.heard(4); }));
  EXPECT_EQ(good.fill(4), 'b');
  EXPECT_EQ(good.mesh.status().connected, 1);
}

TEST_P(MeshKeepersTest, AKeeperOfAnotherKeyIsCountedAndDisturbsNobody) {
  Node other(SteadyClock::instance(), MeshKey{9});
  other.keep(node_.port);
  ASSERT_TRUE(eventually([&] { return node_.mesh.status().refused > 0; }));
  EXPECT_EQ(other.mesh.status().connected, 0);
  Node good;
  good.keep(node_.port);
  seal(0, 3, 'a');
  EXPECT_TRUE(eventually([&] { return node_.heard(3); }));
  EXPECT_TRUE(other.mesh.copies().empty());
}

TEST_P(MeshKeepersTest, WhoStaysSilentIsDroppedAndAKeeperThatHasNothingToDoIsNot) {
  seal(0, 3, 'a');
  Peer peer = keeper();
  peer.say(MeshType::kHeld, heldOf(offer(peer), Kept::kYes));
  ASSERT_TRUE(eventually([&] { return node_.heard(3); }));
  Peer silent = Peer::connectedTo(node_.port);
  pass(15);
  EXPECT_TRUE(silent.isEnded());
  seal(1, 4, 'b');
  EXPECT_EQ(offer(peer).step, 4) << "on the same connection";
}

TEST_P(MeshKeepersTest, AnotherKeyEndsTheConnectionsUnderTheFirst) {
  Peer peer = keeper();
  const uint16_t port = node_.mesh.open(MeshKey{9}, "127.0.0.1", 0, withTls());
  EXPECT_TRUE(peer.isEnded());
  Node good(SteadyClock::instance(), MeshKey{9});
  good.keep(port);
  seal(0, 3, 'a');
  EXPECT_TRUE(eventually([&] { return node_.heard(3); }));
}

TEST_P(MeshKeepersTest, AKeeperWithRoomForOneSlotKeepsItAndSaysThatItHasNoMore) {
  Node keeper;
  keeper.keep(node_.port, 30'000);
  seal(0, 3, 'a');
  ASSERT_TRUE(eventually([&] { return node_.heard(3); }));
  seal(1, 4, 'b');
  ASSERT_TRUE(eventually([&] { return node_.heard(4, false); }));
  EXPECT_EQ(keeper.fill(3), 'a');
  EXPECT_EQ(keeper.fill(4), '?');
  EXPECT_EQ(node_.mesh.status().sent_bytes, owner_.head(0).bytes()) << "no byte of the second";
  EXPECT_EQ(keeper.mesh.status().connected, 1);
}

// The mesh under test is the keeper's; the owner is played.
class MeshOwnersTest : public testing::TestWithParam<bool> {
 protected:
  MeshOwnersTest() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(at);
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&at), bytes), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &bytes), 0);
    node_.keep(ntohs(at.sin_port));
    owner_.seal(0, 3, kIncarnation, 'a');
  }
  // The keeper connects again whenever its connection has ended.
  Peer owner() const {
    Peer peer(UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
              Tls::Side::kServer);
    peer.shakeAsOwner();
    const MeshFrame frame = peer.hear();
    EXPECT_EQ(frame.type, MeshType::kWant);
    EXPECT_EQ(wantIn(frame.payload).ranks, std::vector<int>{1});
    return peer;
  }
  static HeldSlot answer(Peer& peer) {
    const MeshFrame frame = peer.hear();
    EXPECT_EQ(frame.type, MeshType::kHeld);
    return frame.type == MeshType::kHeld ? heldSlotIn(frame.payload) : HeldSlot{};
  }

  UniqueFd listener_;
  Owner owner_;
  Node node_;
};

TEST_P(MeshOwnersTest, BytesThatDoNotMatchEndTheConnectionAndComeAgain) {
  const SlotHead head = owner_.head(0);
  const std::string bytes = owner_.bytes(0);
  for (const size_t at : {size_t{0}, head.table_bytes, bytes.size() - 1}) {
    Peer peer = owner();
    peer.say(MeshType::kOffer, payloadOf(head));
    ASSERT_EQ(peer.hear().type, MeshType::kSend);
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    peer.say(MeshType::kBytes);
    peer.sayBytes(changed);
    EXPECT_TRUE(peer.isEnded()) << at;
    EXPECT_EQ(node_.fill(3), '?') << at;
  }
  Peer peer = owner();
  peer.say(MeshType::kOffer, payloadOf(head));
  ASSERT_EQ(peer.hear().type, MeshType::kSend);
  peer.say(MeshType::kBytes);
  peer.sayBytes(bytes);
  EXPECT_EQ(answer(peer).kept, Kept::kYes);
  EXPECT_EQ(node_.fill(3), 'a');
  peer.say(MeshType::kOffer, payloadOf(head));
  EXPECT_EQ(answer(peer).kept, Kept::kYes) << "without its bytes";
}

TEST_P(MeshOwnersTest, AnOwnerThatEndsInTheMiddleLeavesNothingThatCounts) {
  const SlotHead head = owner_.head(0);
  const std::string bytes = owner_.bytes(0);
  for (const size_t count : {size_t{0}, size_t{1}, bytes.size() / 2, bytes.size() - 1}) {
    Peer peer = owner();
    peer.say(MeshType::kOffer, payloadOf(head));
    ASSERT_EQ(peer.hear().type, MeshType::kSend);
    peer.say(MeshType::kBytes);
    peer.sayBytes(bytes.substr(0, count));
  }
  Peer peer = owner();  // all before is over
  EXPECT_EQ(node_.fill(3), '?');
  peer.say(MeshType::kOffer, payloadOf(head));
  ASSERT_EQ(peer.hear().type, MeshType::kSend);
  peer.say(MeshType::kBytes);
  peer.sayBytes(bytes);
  EXPECT_EQ(answer(peer).kept, Kept::kYes);
}

TEST_P(MeshOwnersTest, OffersOfWhatNobodyAskedForEndTheConnection) {
  const SlotHead head = owner_.head(0);
  SlotHead foreign = head, other_world = head;
  foreign.rank = 2;
  ++other_world.world;
  for (const SlotHead& wrong : {foreign, other_world}) {
    Peer peer = owner();
    peer.say(MeshType::kOffer, payloadOf(wrong));
    EXPECT_TRUE(peer.isEnded());
  }
  Peer peer = owner();
  peer.say(MeshType::kOffer, payloadOf(head));
  ASSERT_EQ(peer.hear().type, MeshType::kSend);
  peer.say(MeshType::kOffer, payloadOf(head));  // a second one at a time
  EXPECT_TRUE(peer.isEnded());
  Peer early = owner();
  early.say(MeshType::kBytes);
  EXPECT_TRUE(early.isEnded());
  EXPECT_TRUE(eventually([&] { return node_.mesh.status().problem != ""; }));
}

TEST_P(MeshOwnersTest, ASlotForWhichThereIsNoMemoryIsRefusedAndTheNextIsTaken) {
  SlotHead huge = owner_.head(0);
  huge.step = 2;
  huge.payload_bytes = uint64_t{1} << 40;
  huge.chunk_count = huge.payload_bytes / huge.chunk_bytes;
  Peer peer = owner();
  peer.say(MeshType::kOffer, payloadOf(huge));
  const HeldSlot held = answer(peer);
  EXPECT_EQ(held.kept, Kept::kNo);
  EXPECT_EQ(held.step, 2);
  peer.say(MeshType::kOffer, payloadOf(owner_.head(0)));
  ASSERT_EQ(peer.hear().type, MeshType::kSend);
  peer.say(MeshType::kBytes);
  peer.sayBytes(owner_.bytes(0));
  EXPECT_EQ(answer(peer).kept, Kept::kYes);
}

// The owner is played, and asked once.
class MeshFetchTest : public MeshOwnersTest {
 protected:
  MeshFetchTest() {
    sockaddr_in at{};
    socklen_t bytes = sizeof(at);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &bytes);
    keeper_.mesh.keep({kIncarnation, kWorld, {{"127.0.0.1", ntohs(at.sin_port), {1}}}, 0, 0, true});
    // That of the node that keeps all the time; it connects before the fetch does.
    UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    node_.mesh.keep({kIncarnation, kWorld, {}, 0, 0});
  }
  Mesh::Fetched outcome() {
    std::vector<Mesh::Fetched> found;
    EXPECT_TRUE(eventually([&] {
      clock_.advance(std::chrono::milliseconds(200));
      keeper_.mesh.sealed(9, {});  // a pass
      found = keeper_.mesh.fetched();
      return !found.empty();
    }));
    return found.empty() ? Mesh::Fetched{} : found[0];
  }
  ManualClock clock_;
  Node keeper_{clock_};
};

TEST_P(MeshFetchTest, AnOwnerThatSaysNothingIsGivenUp) {
  keeper_.mesh.fetch(kWorld, {1}, 1 << 30);
  const Peer peer = owner();
  const Mesh::Fetched found = outcome();
  EXPECT_TRUE(found.ranks.empty());
  EXPECT_NE(found.problem.find("moved nothing for 10 s"), std::string::npos) << found.problem;
}

TEST_P(MeshFetchTest, WhatArrivedInPartIsNoCopy) {
  keeper_.mesh.fetch(kWorld, {1}, 1 << 30);
  {
    Peer peer = owner();
    const SlotHead head = owner_.head(0);
    peer.say(MeshType::kOffer, payloadOf(head));
    EXPECT_EQ(peer.hear().type, MeshType::kSend);
    peer.say(MeshType::kBytes);
    peer.sayBytes(owner_.bytes(0).substr(0, 100));
  }
  EXPECT_TRUE(outcome().ranks.empty());
  EXPECT_TRUE(keeper_.mesh.copies().empty());
}

TEST_P(MeshFetchTest, ACopyThatTheRoomIsTooSmallForIsRefusedAndNamed) {
  keeper_.mesh.fetch(kWorld, {1}, 1);
  {
    Peer peer = owner();
    peer.say(MeshType::kOffer, payloadOf(owner_.head(0)));
    EXPECT_EQ(answer(peer).kept, Kept::kNo);
  }
  const Mesh::Fetched found = outcome();
  EXPECT_TRUE(found.ranks.empty());
  EXPECT_EQ(found.problem.find("rank 1: "), 0u) << found.problem;
}

INSTANTIATE_TEST_SUITE_P(Mesh, MeshKeepersTest, testing::Bool(), mesh_test::tlsName);
INSTANTIATE_TEST_SUITE_P(Mesh, MeshOwnersTest, testing::Bool(), mesh_test::tlsName);
INSTANTIATE_TEST_SUITE_P(Mesh, MeshFetchTest, testing::Bool(), mesh_test::tlsName);

}  // namespace mesh_peers_test
}  // namespace reft::agent

// Both ends of a channel over a pair of sockets, with a relay between them that a test controls.
#include "agent/mesh/channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "agent/mesh/session.h"
#include "agent/mesh/tls.h"
#include "intercept/base/error.h"
#include "tests/unit/agent/mesh/owner.h"

namespace reft::agent {
namespace channel_test {

using mesh_test::withTls;

const MeshKey kKey{1, 2, 3};
constexpr int kMostRounds = 200'000;

std::pair<UniqueFd, UniqueFd> sockets() {
  ::signal(SIGPIPE, SIG_IGN);  // as in the agent
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  for (const int fd : fds) {  // little room, so that writes get stuck
    const int bytes = 4096;
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  }
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

std::string randomBytes(size_t count) {
  std::minstd_rand generator(7);
  std::string bytes(count, '\0');
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(generator()); });
  return bytes;
}

UniqueFd fileOf(const std::string& bytes) {
  UniqueFd file(::memfd_create("channel_test", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(file.get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  return file;
}

// What has come by now, read up to `most` bytes at a time.
struct Reader {
  explicit Reader(Channel& of, size_t most = 100'000) : channel(of), room(most, '\0') {}
  Channel& channel;
  std::string room, got;
  bool over = false;
  void read() {
    ptrdiff_t count = 1;
    while (!over && count > 0) {
      count = channel.read(reinterpret_cast<std::byte*>(room.data()), room.size());
      over = count == Channel::kOver;
      got.append(room.data(), static_cast<size_t>(std::max<ptrdiff_t>(count, 0)));
    }
  }
};

// Writes as far as it goes; takes off what is written. False: the connection is over.
bool push(Channel& channel, std::string_view& bytes) {
  while (!bytes.empty()) {
    const ptrdiff_t count = channel.write(bytes);
    if (count <= 0) {
      return count == 0;
    }
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Carries what two ends send each other, and notes it. A test changes, cuts or slows it.
class Relay {
 public:
  Relay(UniqueFd client, UniqueFd server) : ends_{std::move(client), std::move(server)} {}

  size_t most = 1u << 20;                    // bytes of one carry()
  std::array<std::string, 2> carried;        // from the client, from the server
  std::function<void(std::string&)> change;  // of what the client sends

  void carry() {
    for (const int from : {0, 1}) {
      std::string bytes(most - std::min(most, waiting_[from].size()), '\0');
      const ssize_t got =
          bytes.empty() ? 0 : ::recv(ends_[from].get(), bytes.data(), bytes.size(), 0);
      bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
      carried[from] += bytes;
      if (from == 0 && change && !bytes.empty()) {
        change(bytes);
      }
      waiting_[from] += bytes;
      const ssize_t sent = ::send(ends_[1 - from].get(), waiting_[from].data(),
                                  std::min(most, waiting_[from].size()), MSG_NOSIGNAL);
      waiting_[from].erase(0, static_cast<size_t>(std::max<ssize_t>(sent, 0)));
    }
  }

 private:
  std::array<UniqueFd, 2> ends_;
  std::array<std::string, 2> waiting_;
};

struct Ends {
  std::unique_ptr<Channel> client, server;
};

// With TLS, or in the clear.
Ends endsOver(UniqueFd client, UniqueFd server, bool tls, const MeshKey& other = kKey) {
  if (!tls) {
    return {plainChannel(std::move(client)), plainChannel(std::move(server))};
  }
  return {Tls(kKey).over(std::move(client), Tls::Side::kClient),
          Tls(other).over(std::move(server), Tls::Side::kServer)};
}

class ChannelTest : public testing::TestWithParam<bool> {
 protected:
  ChannelTest() {
    auto [client, server] = sockets();
    ends_ = endsOver(std::move(client), std::move(server), withTls());
  }
  // Both sides know each other then.
  void meet() {
    std::string_view hello = "hello";
    Reader reader(*ends_.server);
    for (int i = 0; i < kMostRounds && reader.got != "hello"; ++i) {
      push(*ends_.client, hello);
      reader.read();
    }
    ASSERT_EQ(reader.got, "hello");
  }
  Ends ends_;
};

TEST_P(ChannelTest, BytesArriveBothWaysAtOnce) {
  const std::string there = randomBytes(300'000), back = randomBytes(200'001);
  std::string_view to_server = there, to_client = back;
  Reader server(*ends_.server), client(*ends_.client, 999);
  for (int i = 0; i < kMostRounds; ++i) {
    client.read();
    ASSERT_TRUE(push(*ends_.client, to_server));
    server.read();
    ASSERT_TRUE(push(*ends_.server, to_client));
    if (server.got.size() == there.size() && client.got.size() == back.size()) {
      break;
    }
  }
  EXPECT_EQ(server.got, there);
  EXPECT_EQ(client.got, back);
  EXPECT_GE(ends_.client->crossed(), there.size() + back.size());
}

TEST_P(ChannelTest, ANetworkThatCarriesOneByteAtATimeLosesNone) {
  auto [client, near] = sockets();
  auto [server, far] = sockets();
  ends_ = endsOver(std::move(client), std::move(server), withTls());
  Relay relay(std::move(near), std::move(far));
  relay.most = 1;
  const std::string sent = randomBytes(20'000);
  std::string_view left = sent;
  Reader reader(*ends_.server, 1), other(*ends_.client);
  for (int i = 0; i < kMostRounds && reader.got.size() < sent.size(); ++i) {
    other.read();
    ASSERT_TRUE(push(*ends_.client, left));
    relay.carry();
    reader.read();
  }
  EXPECT_EQ(reader.got, sent);
}

TEST_P(ChannelTest, AFileArrivesWholeInPiecesOfAnySize) {
  const std::string bytes = randomBytes(3'000'001);
  const UniqueFd file = fileOf(bytes);
  Reader server(*ends_.server, 50'000), client(*ends_.client);
  uint64_t at = 1000;
  const uint64_t end = bytes.size() - 1;
  size_t piece = 1;
  for (int i = 0; i < kMostRounds && server.got.size() < end - 1000; ++i) {
    client.read();
    ptrdiff_t count = 1;
    while (at < end && count > 0) {
      count = ends_.client->writeFile(file.get(), at, std::min<uint64_t>(end - at, piece));
      ASSERT_NE(count, Channel::kOver);
      ASSERT_LE(at + static_cast<uint64_t>(count), end);
      at += static_cast<uint64_t>(count);
      piece = count == 0 ? 1 : piece % 300'000 + 70'001;
    }
    server.read();
  }
  EXPECT_EQ(server.got.size(), end - 1000);
  EXPECT_TRUE(server.got == bytes.substr(1000, end - 1000));
}

TEST_P(ChannelTest, AFileThatEndsEarlyEndsTheConnection) {
  meet();
  const UniqueFd file = fileOf("short");
  Reader reader(*ends_.server);
  ptrdiff_t count = 0;
  for (uint64_t at = 0; at < 10 && count >= 0; at += static_cast<uint64_t>(count)) {
    count = ends_.client->writeFile(file.get(), at, 10 - at);
  }
  EXPECT_EQ(count, Channel::kOver);
}

TEST_P(ChannelTest, ASideThatHasClosedIsOverAfterWhatItSent) {
  meet();
  std::string_view last = "last words";
  ASSERT_TRUE(push(*ends_.client, last));
  ::shutdown(ends_.client->fd(), SHUT_WR);
  Reader reader(*ends_.server);
  reader.read();
  EXPECT_EQ(reader.got, "last words");
  EXPECT_TRUE(reader.over);
  reader.over = false;
  reader.read();
  EXPECT_TRUE(reader.over) << "and stays so";
}

TEST_P(ChannelTest, WritingToASideThatIsGoneIsOverAndNoSignal) {
  meet();
  ends_.server.reset();
  const std::string bytes(100'000, 'x');
  std::string_view left = bytes;
  EXPECT_FALSE(push(*ends_.client, left));
}

TEST_P(ChannelTest, ASideThatClosesBeforeItSaysAnythingIsOver) {
  ends_.client.reset();
  Reader reader(*ends_.server);
  reader.read();
  EXPECT_TRUE(reader.over);
  EXPECT_EQ(reader.got, "");
}

TEST_P(ChannelTest, WhatIsStuckAsksForTheSocket) {
  meet();
  EXPECT_TRUE(ends_.client->wantsRead());
  EXPECT_FALSE(ends_.client->wantsWrite(false));
  const std::string bytes(1'000'000, 'x');
  std::string_view left = bytes;
  ASSERT_TRUE(push(*ends_.client, left));
  EXPECT_FALSE(left.empty());
  EXPECT_TRUE(ends_.client->wantsWrite(true));
}

INSTANTIATE_TEST_SUITE_P(Mesh, ChannelTest, testing::Bool(), mesh_test::tlsName);

// What a channel fails with while it reads; "": it has got bytes, or nothing happens any more.
std::string refusal(Channel& channel) {
  try {
    Reader reader(channel);
    reader.read();
    EXPECT_EQ(reader.got, "");
    return reader.over ? "over" : "";
  } catch (const Corruption& error) {
    return error.what();
  }
}

class TlsTest : public testing::Test {
 protected:
  TlsTest() {
    auto [client, near] = sockets();
    auto [server, far] = sockets();
    relay_ = std::make_unique<Relay>(std::move(near), std::move(far));
    ends_ = endsOver(std::move(client), std::move(server), true);
  }
  // What arrives if the client sends `text`.
  std::string sent(std::string_view text) {
    const size_t count = text.size();
    Reader reader(*ends_.server), other(*ends_.client);
    for (int i = 0; i < 1000 && reader.got.size() < count; ++i) {
      other.read();
      push(*ends_.client, text);
      relay_->carry();
      reader.read();
    }
    return reader.got;
  }
  std::unique_ptr<Relay> relay_;
  Ends ends_;
};

TEST_F(TlsTest, NoByteOfWhatIsSentCanBeReadOnTheWire) {
  const std::string text(1000, 'q');
  EXPECT_EQ(sent(text), text);
  const std::string& wire = relay_->carried[0];
  EXPECT_GT(wire.size(), text.size());
  EXPECT_EQ(wire.find("qqqq"), std::string::npos);
  EXPECT_TRUE(Tls::isHello(wire));
}

TEST_F(TlsTest, AnotherKeyIsRefusedByBothSides) {
  auto [client, server] = sockets();
  ends_ = endsOver(std::move(client), std::move(server), true, MeshKey{9});
  EXPECT_EQ(refusal(*ends_.client), "");
  EXPECT_EQ(refusal(*ends_.server), "has not the key of this job");
  EXPECT_EQ(refusal(*ends_.client), "has not the key of this job");
  EXPECT_EQ(refusal(*ends_.server), "over");
  std::string_view bytes = "x";
  EXPECT_FALSE(push(*ends_.server, bytes));
}

TEST_F(TlsTest, TheSameKeyWithoutTlsIsRefusedWithWhatToDo) {
  auto [client, server] = sockets();
  ends_ = endsOver(std::move(client), std::move(server), true);
  const std::string greeting = greetingOf(Nonce{1});
  ::send(ends_.client->fd(), greeting.data(), greeting.size(), 0);
  EXPECT_EQ(refusal(*ends_.server), kTlsDiffers);
}

TEST_F(TlsTest, AnAgentWithoutTlsRefusesOneThatHasItWithWhatToDo) {
  auto [client, server] = sockets();
  const auto keeper = Tls(kKey).over(std::move(client), Tls::Side::kClient);
  EXPECT_EQ(refusal(*keeper), "");
  Session owner(plainChannel(std::move(server)), kKey, 0);
  size_t budget = 1000;
  try {
    owner.receive(budget, 0);
    ADD_FAILURE() << "was not refused";
  } catch (const Corruption& error) {
    EXPECT_EQ(error.what(), kTlsDiffers);
  }
}

TEST_F(TlsTest, BytesThatAreNoTlsAreRefused) {
  const std::string noise = randomBytes(5000);
  for (const std::string& bytes :
       {noise, std::string("GET / HTTP/1.1\r\n\r\n"), std::string(5000, '\0'),
        std::string("\x16\x03\x01\x02\x00", 5) + noise, std::string("\x16\x03\x01\xff\xff", 5),
        std::string("\x15\x03\x03\x00\x02\x02\x28", 7),
        std::string("\x17\x03\x03\x00\x05hello", 10)}) {
    for (const bool is_server : {true, false}) {
      auto [client, server] = sockets();
      ends_ = endsOver(std::move(client), std::move(server), true);
      Channel& tested = is_server ? *ends_.server : *ends_.client;
      ::send((is_server ? *ends_.client : *ends_.server).fd(), bytes.data(), bytes.size(), 0);
      EXPECT_NE(refusal(tested), "") << bytes.substr(0, 5) << is_server;
      EXPECT_EQ(refusal(tested), "over");
    }
  }
}

TEST_F(TlsTest, WhatWasRecordedProvesNothing) {
  ASSERT_EQ(sent("a secret"), "a secret");
  const std::string recorded = relay_->carried[0];
  const std::string answered = relay_->carried[1];
  for (const bool is_server : {true, false}) {
    auto [client, server] = sockets();
    ends_ = endsOver(std::move(client), std::move(server), true);
    Channel& tested = is_server ? *ends_.server : *ends_.client;
    const std::string& bytes = is_server ? recorded : answered;
    ::send((is_server ? *ends_.client : *ends_.server).fd(), bytes.data(), bytes.size(), 0);
    EXPECT_NE(refusal(tested), "") << is_server;
  }
  // The first flight alone is answered, and nothing more comes of it.
  auto [client, server] = sockets();
  ends_ = endsOver(std::move(client), std::move(server), true);
  const size_t length =
      5 + static_cast<unsigned char>(recorded[3]) * 256u + static_cast<unsigned char>(recorded[4]);
  ::send(ends_.client->fd(), recorded.data(), length, 0);
  EXPECT_EQ(refusal(*ends_.server), "");
  std::string_view bytes = "x";
  EXPECT_TRUE(push(*ends_.server, bytes));
  EXPECT_EQ(bytes.size(), 1u) << "nothing is sent to who has not shown the key";
}

TEST_F(TlsTest, AByteThatIsChangedUnderwayEndsTheConnection) {
  ASSERT_EQ(sent("first"), "first");
  relay_->change = [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); };
  std::string_view text = "second";
  ASSERT_TRUE(push(*ends_.client, text));
  relay_->carry();
  EXPECT_NE(refusal(*ends_.server).find("TLS: "), std::string::npos);
}

TEST_F(TlsTest, KeysChangeAfterSoManyRecords) {
  uint64_t crossed[2];
  for (const bool often : {false, true}) {
    auto [client, near] = sockets();
    auto [server, far] = sockets();
    relay_ = std::make_unique<Relay>(std::move(near), std::move(far));
    ends_.client = Tls(kKey, often ? 3 : 1000).over(std::move(client), Tls::Side::kClient);
    ends_.server = Tls(kKey).over(std::move(server), Tls::Side::kServer);
    for (int i = 0; i < 100; ++i) {
      const std::string text = "record " + std::to_string(i);
      ASSERT_EQ(sent(text), text);
    }
    crossed[often ? 1 : 0] = ends_.client->crossed();
  }
  EXPECT_EQ(crossed[1] - crossed[0], 33u * (5 + 5 + 1 + 16)) << "33 records with a change of keys";
}

TEST_F(TlsTest, BytesThatNoBudgetWasLeftForComeWithoutTheSocket) {
  const std::string text = randomBytes(16'000);
  auto [client, server] = sockets();
  const int room = 1 << 20;
  ::setsockopt(client.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
  ends_ = endsOver(std::move(client), std::move(server), true);
  std::string_view left = text;
  std::string got;
  Reader other(*ends_.client);
  for (int i = 0; i < 10 && !left.empty(); ++i) {
    refusal(*ends_.server);
    other.read();
    push(*ends_.client, left);
  }
  std::array<std::byte, 100> room_for_few;
  ASSERT_EQ(ends_.server->read(room_for_few.data(), 100), 100);
  pollfd socket{ends_.server->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&socket, 1, 0), 0) << "the whole record has been taken from the socket";
  Reader rest(*ends_.server, 100);
  rest.read();
  EXPECT_EQ(rest.got, text.substr(100));
}

// -- peers that OpenSSL plays without the key

using Context = std::unique_ptr<SSL_CTX, decltype(&::SSL_CTX_free)>;
using Connection = std::unique_ptr<SSL, decltype(&::SSL_free)>;

// A certificate for any name, which the peer has signed itself.
void certify(SSL_CTX* context) {
  const std::unique_ptr<EVP_PKEY, decltype(&::EVP_PKEY_free)> key(EVP_EC_gen("P-256"),
                                                                  &::EVP_PKEY_free);
  const std::unique_ptr<X509, decltype(&::X509_free)> certificate(::X509_new(), &::X509_free);
  ::X509_gmtime_adj(X509_getm_notBefore(certificate.get()), 0);
  ::X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 3600);
  ::X509_set_pubkey(certificate.get(), key.get());
  ASSERT_GT(::X509_sign(certificate.get(), key.get(), ::EVP_sha256()), 0);
  ASSERT_EQ(::SSL_CTX_use_certificate(context, certificate.get()), 1);
  ASSERT_EQ(::SSL_CTX_use_PrivateKey(context, key.get()), 1);
}

TEST_F(TlsTest, AServerThatHasACertificateInsteadOfTheKeyIsRefused) {
  const Context context(::SSL_CTX_new(::TLS_server_method()), &::SSL_CTX_free);
  certify(context.get());
  auto [client, server] = sockets();
  const auto tested = Tls(kKey).over(std::move(client), Tls::Side::kClient);
  const Connection peer(::SSL_new(context.get()), &::SSL_free);
  ::SSL_set_fd(peer.get(), server.get());
  std::string why;
  for (int i = 0; i < 10 && why.empty(); ++i) {
    why = refusal(*tested);
    ::SSL_accept(peer.get());
  }
  EXPECT_NE(why.find("certificate verify failed"), std::string::npos) << why;
}

TEST_F(TlsTest, AClientWithoutTheKeyIsRefusedInEveryVersionOfTls) {
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    const Context context(::SSL_CTX_new(::TLS_client_method()), &::SSL_CTX_free);
    ::SSL_CTX_set_max_proto_version(context.get(), version);
    certify(context.get());
    auto [client, server] = sockets();
    const auto tested = Tls(kKey).over(std::move(server), Tls::Side::kServer);
    const Connection peer(::SSL_new(context.get()), &::SSL_free);
    ::SSL_set_fd(peer.get(), client.get());
    std::string why;
    for (int i = 0; i < 10 && why.empty(); ++i) {
      EXPECT_LE(::SSL_connect(peer.get()), 0);
      why = refusal(*tested);
    }
    EXPECT_NE(why.find("TLS: "), std::string::npos) << why;
  }
}

}  // namespace channel_test
}  // namespace reft::agent

#include "intercept/link/agent_client.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft {
namespace agent_client_test {

using std::chrono::milliseconds;
using wire::Type;

constexpr milliseconds kPatience{10000};

bool eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

// The agent's end of one socket path, driven by the test step by step.
class FakeAgent {
 public:
  explicit FakeAgent(std::string path) : path_(std::move(path)) { listen(); }
  ~FakeAgent() { ::unlink(path_.c_str()); }

  void listen() {
    ::unlink(path_.c_str());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    listener_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(::listen(listener_.get(), 8), 0);
  }
  void die() {
    connection_.reset();
    listener_.reset();
    ::unlink(path_.c_str());
  }
  void hangUp() { connection_.reset(); }
  // Whether a connection waits to be accepted.
  bool hasCaller() const {
    pollfd poller{listener_.get(), POLLIN, 0};
    return ::poll(&poller, 1, 0) > 0;
  }
  // Accepts, reads hello, answers.
  void welcome(Type answer = Type::kWelcome, const std::string& payload = "{\"agent_pid\":1}") {
    connection_.reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_TRUE(connection_);
    decoder_ = wire::FrameDecoder();
    const wire::Frame hello = receive();
    EXPECT_EQ(hello.type, Type::kHello);
    EXPECT_EQ(hello.payload, "{\"rank\":0}");
    send(answer, payload);
  }
  void send(Type type, std::string_view payload) {
    wire::sendFrame(connection_.get(), type, payload);
  }
  void send(Type type, const wire::Ballot& ballot) {
    send(type, std::string_view(reinterpret_cast<const char*>(&ballot), sizeof(ballot)));
  }
  wire::Frame receive() { return wire::receiveFrame(connection_.get(), decoder_, kPatience); }

 private:
  std::string path_;
  UniqueFd listener_, connection_;
  wire::FrameDecoder decoder_;
};

class AgentClientTest : public testing::Test {
 protected:
  AgentClientTest() : agent_(path()) {}

  static std::string path() { return "/tmp/reft-agent-client-test-" + std::to_string(::getpid()); }
  static AgentClient::Options options() {
    AgentClient::Options result;
    result.socket_path = path();
    result.hello = "{\"rank\":0}";
    result.connect_timeout = kPatience;
    return result;
  }
  std::unique_ptr<AgentClient> connect() {
    std::thread accepting([this] { agent_.welcome(); });
    auto client = std::make_unique<AgentClient>(options());
    accepting.join();
    return client;
  }

  FakeAgent agent_;
};

TEST_F(AgentClientTest, SaysHelloAndKeepsTheWelcome) {
  const auto client = connect();
  EXPECT_TRUE(client->connected());
  EXPECT_EQ(client->welcome(), "{\"agent_pid\":1}");
  EXPECT_FALSE(agent_.hasCaller()) << "one connection is enough";
}

TEST_F(AgentClientTest, HandsOverTheVaultNowAndAfterAReconnect) {
  const auto client = connect();
  UniqueFd memory(::memfd_create("vault", MFD_CLOEXEC));
  ASSERT_EQ(::write(memory.get(), "bytes", 5), 5);
  client->putVault(memory.get(), "{\"rank\":0,\"bytes\":5}");
  memory.reset();  // the client keeps a duplicate
  for (int round = 0; round < 2; ++round) {
    const wire::Frame frame = agent_.receive();
    EXPECT_EQ(frame.type, Type::kVaultPut);
    EXPECT_EQ(frame.payload, "{\"rank\":0,\"bytes\":5}");
    char bytes[5];
    ASSERT_EQ(::pread(frame.fd.get(), bytes, 5, 0), 5);
    EXPECT_EQ(std::string(bytes, 5), "bytes");
    if (round == 0) {
      agent_.die();
      agent_.listen();
      agent_.welcome(Type::kWelcome, "{\"agent_pid\":2}");
    }
  }
  EXPECT_TRUE(eventually([&] { return client->welcome() == "{\"agent_pid\":2}"; }));
  EXPECT_TRUE(client->connected());
  EXPECT_FALSE(agent_.hasCaller()) << "one connection is enough";
}

TEST_F(AgentClientTest, RepeatsVotesWithoutAnOutcome) {
  const auto client = connect();
  std::promise<void> first_outcome;
  client->handle(Type::kOutcome, [&](const wire::Frame&) { first_outcome.set_value(); });
  client->vote({1, 42, 0, 0, 1, 0, 0, {}});
  client->vote({2, 42, 0, 0, 1, 0, 0, {}});
  agent_.receive();
  agent_.receive();
  agent_.send(Type::kOutcome, wire::Ballot{1, 42, 0, 0, 1, 0, 0, {}});
  ASSERT_EQ(first_outcome.get_future().wait_for(kPatience), std::future_status::ready);
  agent_.hangUp();
  agent_.welcome();
  const wire::Frame frame = agent_.receive();
  EXPECT_EQ(frame.type, Type::kVote);
  EXPECT_EQ(wire::decodeBallot(frame.payload)->step, 2);
}

TEST_F(AgentClientTest, StartsAnAgentWhenNobodyListens) {
  agent_.die();
  auto asked = options();
  int starts = 0;
  std::thread accepting;
  asked.start_agent = [&] {
    if (starts++ == 0) {
      agent_.listen();
      accepting = std::thread([this] { agent_.welcome(); });
    }
  };
  const AgentClient client(asked);
  accepting.join();
  EXPECT_EQ(starts, 1);
  EXPECT_TRUE(client.connected());
}

TEST_F(AgentClientTest, NobodyListeningIsATimeout) {
  agent_.die();
  auto asked = options();
  asked.connect_timeout = milliseconds(50);
  EXPECT_THROW(AgentClient{asked}, Timeout);
}

TEST_F(AgentClientTest, AnAgentThatDoesNotAnswerHelloIsATimeout) {
  auto asked = options();
  asked.connect_timeout = milliseconds(50);
  EXPECT_THROW(AgentClient{asked}, Timeout);  // the connection waits in the backlog
}

TEST_F(AgentClientTest, ARefusalSaysWhy) {
  std::thread accepting([this] { agent_.welcome(Type::kError, "{\"what\":\"another job\"}"); });
  try {
    const AgentClient client(options());
    ADD_FAILURE() << "connected";
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("another job"), std::string::npos);
  }
  accepting.join();
}

TEST_F(AgentClientTest, RequestsWaitForTheirAnswer) {
  const auto client = connect();
  auto answer = std::async(std::launch::async, [&] {
    return client->request(Type::kStatusRequest, "{}", Type::kStatus, kPatience).payload;
  });
  EXPECT_EQ(agent_.receive().type, Type::kStatusRequest);
  agent_.send(Type::kStatus, "status");
  EXPECT_EQ(answer.get(), "status");
}

TEST_F(AgentClientTest, ARequestEndsWithTheConnectionAndWithAnError) {
  const auto client = connect();
  auto lost = std::async(std::launch::async, [&] {
    client->request(Type::kVaultGet, "{}", Type::kVaultFd, kPatience);
  });
  agent_.receive();
  agent_.hangUp();
  EXPECT_THROW(lost.get(), PeerFailure);
  agent_.welcome();
  auto refused = std::async(std::launch::async, [&] {
    client->request(Type::kVaultGet, "{}", Type::kVaultFd, kPatience);
  });
  agent_.receive();
  agent_.send(Type::kError, "{\"what\":\"no such vault\"}");
  EXPECT_THROW(refused.get(), PeerFailure);
}

TEST_F(AgentClientTest, ALateAnswerIsNotTakenForTheNext) {
  const auto client = connect();
  EXPECT_THROW(client->request(Type::kStatusRequest, "{}", Type::kStatus, milliseconds(30)),
               Timeout);
  agent_.receive();
  try {
    agent_.send(Type::kStatus, "late");
  } catch (const Error&) {  // the client may have closed already
  }
  std::thread accepting([this] {
    agent_.welcome();
    agent_.receive();
    agent_.send(Type::kStatus, "fresh");
  });
  EXPECT_EQ(client->request(Type::kStatusRequest, "{}", Type::kStatus, kPatience).payload, "fresh");
  accepting.join();
}

TEST_F(AgentClientTest, AfterHandleReturnsTheOldHandlerIsOver) {
  const auto client = connect();
  std::promise<void> entered;
  std::atomic<bool> left{false};
  client->handle(Type::kStackRequest, [&](const wire::Frame&) {
    entered.set_value();
    std::this_thread::sleep_for(milliseconds(50));
    left = true;
  });
  agent_.send(Type::kStackRequest, "{}");
  entered.get_future().wait();
  client->handle(Type::kStackRequest, [](const wire::Frame&) {});
  EXPECT_TRUE(left);
}

TEST_F(AgentClientTest, AStoppedAgentDoesNotStopTheSender) {
  const auto client = connect();
  const auto begin = std::chrono::steady_clock::now();
  const std::string large(1 << 20, 'x');
  bool sent = true;
  for (int i = 0; i < 20 && sent; ++i) {
    sent = client->send(Type::kStackReply, large);  // nobody reads
  }
  EXPECT_FALSE(sent);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kPatience);
}

TEST_F(AgentClientTest, GoodByeCanBeSaidWhenTheClientIsGone) {
  auto client = connect();
  UniqueFd connection = client->connection();
  client.reset();
  ASSERT_TRUE(connection);
  wire::sendFrame(connection.get(), Type::kBye, "{}");
  EXPECT_EQ(agent_.receive().type, Type::kBye);
  connection.reset();
  EXPECT_THROW(agent_.receive(), PeerFailure);
}

TEST_F(AgentClientTest, OneThatIsClosedComesNotBackWhileOthersStillHaveIt) {
  const auto client = connect();
  client->close();
  client->close();
  EXPECT_FALSE(client->connected());
  EXPECT_FALSE(client->send(Type::kVote, "late"));
  EXPECT_THROW(client->request(Type::kVaultGet, "{}", Type::kVaultFd, kPatience), PeerFailure);
  EXPECT_THROW(agent_.receive(), PeerFailure) << "the connection has ended";
  EXPECT_FALSE(agent_.hasCaller());
}

TEST_F(AgentClientTest, AForkedChildLeavesTheConnectionAlone) {
  auto client = connect();
  const pid_t child = ::fork();
  if (child == 0) {
    bool good = !client->send(Type::kVote, "");
    client->vote({1, 1, 0, 0, 1, 0, 0, {}});
    good = good && !client->connection();
    try {
      client->request(Type::kStatusRequest, "{}", Type::kStatus, milliseconds(10));
      good = false;
    } catch (const PeerFailure&) {
    }
    client.reset();
    ::_exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(client->send(Type::kStackReply, "parent"));
  EXPECT_EQ(agent_.receive().payload,
            "parent");  // the first frame since hello: the child sent nothing
}

TEST_F(AgentClientTest, AForkedChildEndsWhileAThreadOfTheParentWaitsForAnAnswer) {
  auto client = connect();
  auto answer = std::async(std::launch::async, [&] {
    return client->request(Type::kStatusRequest, "{}", Type::kStatus, kPatience).payload;
  });
  EXPECT_EQ(agent_.receive().type, Type::kStatusRequest);
  client->welcome();  // takes the lock that the request gives up when it begins to wait
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    client.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "a signal of 14: it hung";
  agent_.send(Type::kStatus, "status");
  EXPECT_EQ(answer.get(), "status");
}

}  // namespace agent_client_test
}  // namespace reft

#include "intercept/base/agent_client.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstBackoff{20};
constexpr milliseconds kLastBackoff{1000};
constexpr size_t kMostOpenVotes = 16;

UniqueFd tryConnect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw InvalidArgument("socket path", "'" + path + "'",
                          "at most " + std::to_string(sizeof(address.sun_path) - 1) +
                              " bytes; set REFT_RUN_DIR to a shorter directory or REFT_JOB_ID to a shorter name");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) {
    throw SystemError("socket");
  }
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return {};
  }
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != ::geteuid()) {
    throw PeerFailure("the socket " + path + " belongs to user " + std::to_string(peer.uid) +
                      ", not to this one; set REFT_RUN_DIR to a directory of your own");
  }
  return socket;
}

}  // namespace

AgentClient::AgentClient(Options options) : options_(std::move(options)) {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) {
    throw SystemError("eventfd");
  }
  connectOnce(options_.connect_timeout);
  thread_ = std::thread([this] { run(); });
}

AgentClient::~AgentClient() {
  stopping_.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) {
    thread_.join();
  }
}

// Leaves a socket that said hello and was welcomed.
void AgentClient::connectOnce(milliseconds timeout) {
  const Clock& clock = SteadyClock::instance();
  const int64_t deadline = clock.nowNs() + std::chrono::nanoseconds(timeout).count();
  milliseconds backoff = kFirstBackoff;
  bool started = false;
  std::string why = "nobody listens";
  while (!stopping_.load()) {
    try {
      UniqueFd socket = tryConnect(options_.socket_path);
      if (!socket && !started && options_.start_agent) {
        started = true;
        options_.start_agent();
        socket = tryConnect(options_.socket_path);
      }
      if (socket) {
        wire::FrameDecoder decoder;
        wire::sendFrame(socket.get(), wire::Type::kHello, options_.hello);
        const int64_t left = std::max<int64_t>(1, (deadline - clock.nowNs()) / 1'000'000);
        wire::Frame frame = wire::receiveFrame(socket.get(), decoder, milliseconds(left));
        if (frame.type == wire::Type::kError) {
          throw Unavailable("the agent refuses this rank: " + frame.payload);
        }
        if (frame.type != wire::Type::kWelcome) {
          throw Corruption("the agent answered hello with message " + std::to_string(static_cast<int>(frame.type)));
        }
        const std::lock_guard lock(mutex_);
        welcome_ = std::move(frame.payload);
        socket_ = std::move(socket);
        if (vault_) {
          wire::sendFrame(socket_.get(), wire::Type::kVaultPut, vault_payload_, vault_.get());
        }
        for (const wire::Ballot& ballot : open_votes_) {
          wire::sendFrame(socket_.get(), wire::Type::kVote, {reinterpret_cast<const char*>(&ballot), sizeof(ballot)});
        }
        connected_.store(true);
        return;
      }
    } catch (const PeerFailure& error) {  // an agent that is just ending, or that died between connect and welcome
      why = error.what();
    }
    if (clock.nowNs() >= deadline) {
      throw Timeout("no agent at " + options_.socket_path + " after " + std::to_string(timeout.count()) + " ms (" + why + ")");
    }
    pollfd waiting{wake_.get(), POLLIN, 0};
    ::poll(&waiting, 1, static_cast<int>(backoff.count()));
    backoff = std::min(backoff * 2, kLastBackoff);
  }
  throw PeerFailure("stopping");
}

void AgentClient::handle(wire::Type type, Handler handler) {
  const std::lock_guard lock(mutex_);
  handlers_[type] = std::move(handler);
}

bool AgentClient::send(wire::Type type, std::string_view payload) {
  const std::lock_guard lock(mutex_);
  if (!connected_.load()) {
    return false;
  }
  try {
    wire::sendFrame(socket_.get(), type, payload);
    return true;
  } catch (const Error&) {
    return false;  // the receiving thread notices the end of the stream and connects again
  }
}

void AgentClient::putVault(int fd, const std::string& payload) {
  const std::lock_guard lock(mutex_);
  vault_.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!vault_) {
    throw SystemError("duplicating the vault's descriptor");
  }
  vault_payload_ = payload;
  if (connected_.load()) {
    try {
      wire::sendFrame(socket_.get(), wire::Type::kVaultPut, vault_payload_, vault_.get());
    } catch (const Error&) {  // handed over after the reconnect
    }
  }
}

void AgentClient::vote(const wire::Ballot& ballot) {
  const std::lock_guard lock(mutex_);
  open_votes_.push_back(ballot);
  if (open_votes_.size() > kMostOpenVotes) {
    open_votes_.erase(open_votes_.begin());
  }
  if (connected_.load()) {
    try {
      wire::sendFrame(socket_.get(), wire::Type::kVote, {reinterpret_cast<const char*>(&ballot), sizeof(ballot)});
    } catch (const Error&) {  // repeated after the reconnect
    }
  }
}

wire::Frame AgentClient::request(wire::Type type, std::string_view payload, wire::Type answer, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  ++waiting_[answer];
  answers_.erase(answer);
  answers_.erase(wire::Type::kError);
  try {
    if (!connected_.load()) {
      throw PeerFailure("the agent is not connected");
    }
    wire::sendFrame(socket_.get(), type, payload);
    const bool came = answered_.wait_for(lock, timeout, [&] {
      return answers_.count(answer) > 0 || answers_.count(wire::Type::kError) > 0 || !connected_.load();
    });
    if (!came) {
      throw Timeout("the agent did not answer message " + std::to_string(static_cast<int>(type)) + " in " +
                    std::to_string(timeout.count()) + " ms");
    }
    if (answers_.count(answer) == 0) {
      const auto error = answers_.find(wire::Type::kError);
      throw PeerFailure(error != answers_.end() ? "the agent answered: " + error->second.payload : "the agent is gone");
    }
    wire::Frame frame = std::move(answers_.at(answer));
    answers_.erase(answer);
    --waiting_[answer];
    return frame;
  } catch (...) {
    --waiting_[answer];
    throw;
  }
}

void AgentClient::bye() {
  stopping_.store(true);
  send(wire::Type::kBye, "{}");
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

std::string AgentClient::welcome() const {
  const std::lock_guard lock(mutex_);
  return welcome_;
}

void AgentClient::dispatch(wire::Frame frame) {
  Handler handler;
  {
    const std::lock_guard lock(mutex_);
    if (frame.type == wire::Type::kOutcome) {
      if (const auto ballot = wire::decodeBallot(frame.payload)) {
        std::erase_if(open_votes_, [&](const wire::Ballot& open) {
          return open.step == ballot->step && open.incarnation == ballot->incarnation;
        });
      }
    }
    const auto waiting = waiting_.find(frame.type);
    if (frame.type == wire::Type::kError || (waiting != waiting_.end() && waiting->second > 0)) {
      answers_[frame.type] = std::move(frame);
      answered_.notify_all();
      return;
    }
    const auto found = handlers_.find(frame.type);
    if (found != handlers_.end()) {
      handler = found->second;
    }
  }
  if (handler) {
    handler(frame);
  }
}

void AgentClient::run() {
  ::pthread_setname_np(::pthread_self(), "reft-agent-io");
  wire::FrameDecoder decoder;
  while (!stopping_.load()) {
    int socket = -1;
    {
      const std::lock_guard lock(mutex_);
      socket = socket_.get();
    }
    pollfd waiting[2] = {{socket, POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (::poll(waiting, 2, -1) < 0 && errno != EINTR) {
      return;
    }
    if (stopping_.load()) {
      return;
    }
    if (waiting[0].revents == 0) {
      continue;
    }
    bool alive = false;
    try {
      alive = wire::receiveInto(socket, decoder);
      while (auto frame = decoder.next()) {
        dispatch(std::move(*frame));
      }
    } catch (const std::exception& error) {
      logWarn("intercept", "connection to the agent: ", error.what());
      alive = false;
    }
    if (alive) {
      continue;
    }
    connected_.store(false);
    answered_.notify_all();
    decoder = {};
    while (!stopping_.load()) {
      try {
        connectOnce(options_.connect_timeout);
        reconnects_.fetch_add(1);
        logInfo("intercept", "connected to a new agent");
        break;
      } catch (const std::exception& error) {
        if (!stopping_.load()) {
          logWarn("intercept", "no agent: ", error.what(), "; snapshots are not committed meanwhile");
        }
      }
    }
  }
}

}  // namespace reft

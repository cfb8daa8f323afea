#include "intercept/link/agent_client.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/base/log.h"

namespace reft {

namespace {

using Milliseconds = std::chrono::milliseconds;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr Milliseconds kFirstBackoff{20};
constexpr Milliseconds kLongestBackoff{1000};
// connect() waits while the backlog of a stopped agent is full.
constexpr timeval kConnectTimeout{1, 0};
constexpr size_t kMostOpenVotes = 64;

// The client whose handler runs on this thread.
thread_local const AgentClient* dispatching_client = nullptr;

Milliseconds until(SteadyTime deadline) {
  return std::max(Milliseconds(0),
                  std::chrono::ceil<Milliseconds>(deadline - std::chrono::steady_clock::now()));
}

// The process that listened at the other end of a connected socket.
ucred listenerOf(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    throw SystemError("getsockopt SO_PEERCRED");
  }
  return peer;
}

// The agent's refusal, {"what", "hint"}, as a sentence.
std::string refusalText(const std::string& payload) {
  const auto fields = parseJson(payload);
  if (!fields.is_object() || !fields.contains("what") || !fields["what"].is_string()) {
    return payload;
  }
  std::string text = fields["what"].get<std::string>();
  if (fields.contains("hint") && fields["hint"].is_string() &&
      !fields["hint"].get_ref<const std::string&>().empty()) {
    text += "; " + fields["hint"].get<std::string>();
  }
  return text;
}

// Returns an empty descriptor if no agent listens (yet).
UniqueFd tryConnect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  UniqueFd directory;
  std::string name = path;
  if (name.size() >= sizeof(address.sun_path)) {  // too long for the kernel: through its folder
    const size_t slash = path.rfind('/');
    directory.reset(::open(path.substr(0, slash).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!directory) {
      return UniqueFd();  // not made yet
    }
    name = "/proc/self/fd/" + std::to_string(directory.get()) + path.substr(slash);
  }
  std::memcpy(address.sun_path, name.c_str(), name.size() + 1);
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) {
    throw SystemError("socket");
  }
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &kConnectTimeout, sizeof(kConnectTimeout));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) {
      return UniqueFd();
    }
    throw SystemError("connect " + path);
  }
  const ucred peer = listenerOf(socket.get());
  if (peer.uid != ::geteuid()) {
    throw Corruption(path + ": the listener runs as user " + std::to_string(peer.uid) +
                     ", expected " + std::to_string(::geteuid()));
  }
  return socket;
}

}  // namespace

AgentClient::AgentClient(Options options) : options_(std::move(options)), owner_(::getpid()) {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) {
    throw SystemError("eventfd");
  }
  connectOnce(options_.connect_timeout);
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "reft-agent-io");
}

AgentClient::~AgentClient() {
  if (!ownProcess()) {
    // The threads stayed in the parent: nothing to join here, and a condition's destructor would
    // wait for those that waited at the fork.
    std::construct_at(&thread_);
    std::construct_at(&answered_);
    return;
  }
  close();
}

void AgentClient::close() {
  if (!ownProcess()) {
    return;
  }
  stopping_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) {
    thread_.join();
  }
}

bool AgentClient::ownProcess() const {
  return ::getpid() == owner_;
}

void AgentClient::handle(wire::Type type, Handler handler) {
  if (!ownProcess()) {
    return;
  }
  if (dispatching_client == this) {  // a handler that registers handlers holds the lock already
    setHandler(type, std::move(handler));
    return;
  }
  const MutexLock running(dispatching_);
  setHandler(type, std::move(handler));
}

void AgentClient::setHandler(wire::Type type, Handler handler) {
  const MutexLock lock(mutex_);
  handlers_[type] = std::move(handler);
}

bool AgentClient::sendLocked(wire::Type type, std::string_view payload, int fd) {
  if (!connected_ || !socket_) {
    return false;
  }
  try {
    wire::sendFrame(socket_.get(), type, payload, fd);
    return true;
  } catch (const Error& error) {
    // Part of the frame may be out, so the stream is useless. `reft-agent-io` sees its end and
    // connects again.
    logDebug("intercept", "closed the connection to the agent: ", error.what());
    ::shutdown(socket_.get(), SHUT_RDWR);
    connected_ = false;
    return false;
  }
}

bool AgentClient::send(wire::Type type, std::string_view payload) {
  if (!ownProcess()) {
    return false;
  }
  const MutexLock lock(mutex_);
  return sendLocked(type, payload);
}

void AgentClient::putVault(int fd, const std::string& payload) {
  if (!ownProcess()) {
    return;
  }
  UniqueFd duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!duplicate) {
    throw SystemError("fcntl F_DUPFD_CLOEXEC");
  }
  const MutexLock lock(mutex_);
  vault_ = std::move(duplicate);
  vault_payload_ = payload;
  sendLocked(wire::Type::kVaultPut, vault_payload_, vault_.get());
}

void AgentClient::keepSaying(wire::Type type, const std::string& payload) {
  if (!ownProcess()) {
    return;
  }
  const MutexLock lock(mutex_);
  said_[type] = payload;
  sendLocked(type, payload);
}

void AgentClient::vote(const wire::Ballot& ballot) {
  if (!ownProcess()) {
    return;
  }
  const MutexLock lock(mutex_);
  if (open_votes_.size() == kMostOpenVotes) {
    open_votes_.erase(open_votes_.begin());
  }
  open_votes_.push_back(ballot);
  sendLocked(wire::Type::kVote,
             std::string_view(reinterpret_cast<const char*>(&ballot), sizeof(ballot)));
}

wire::Frame AgentClient::request(wire::Type type, std::string_view payload, wire::Type answer,
                                 Milliseconds timeout) {
  if (!ownProcess()) {
    throw PeerFailure("the connection to the agent belongs to the parent process");
  }
  const SteadyTime deadline = std::chrono::steady_clock::now() + timeout;
  const MutexLock lock(mutex_);
  // Answers carry no id, so one request per type of answer is in flight at a time.
  if (!answered_.wait_until(mutex_, deadline, [&]() REQUIRES(mutex_) {
        return stopping_ || (connected_ && waiting_[answer] == 0);
      })) {
    throw Timeout("no connection to the agent within " + std::to_string(timeout.count()) + " ms");
  }
  answers_.erase(wire::Type::kError);
  if (stopping_ || !sendLocked(type, payload)) {
    throw PeerFailure("the connection to the agent is down");
  }
  waiting_[answer] = 1;
  const uint64_t connection = connections_;
  const bool ended = answered_.wait_until(mutex_, deadline, [&]() REQUIRES(mutex_) {
    return answers_.count(answer) != 0 || answers_.count(wire::Type::kError) != 0 || stopping_ ||
           !connected_ || connections_ != connection;
  });
  waiting_[answer] = 0;
  auto node = answers_.extract(answer);
  const auto refusal = answers_.extract(wire::Type::kError);
  if (!node && !ended && connected_) {
    // A late answer would be taken for the answer to the next request: start a new stream.
    ::shutdown(socket_.get(), SHUT_RDWR);
    connected_ = false;
  }
  answered_.notify_all();
  if (node) {
    return std::move(node.mapped());
  }
  if (!ended) {
    throw Timeout("the agent did not answer within " + std::to_string(timeout.count()) + " ms");
  }
  throw PeerFailure(refusal ? "the agent answered: " + refusalText(refusal.mapped().payload)
                            : "the agent left before it answered");
}

UniqueFd AgentClient::connection() const {
  if (!ownProcess()) {
    return {};
  }
  const MutexLock lock(mutex_);
  return UniqueFd(connected_ && socket_ ? ::fcntl(socket_.get(), F_DUPFD_CLOEXEC, 3) : -1);
}

std::string AgentClient::welcome() const {
  if (!ownProcess()) {
    return "";
  }
  const MutexLock lock(mutex_);
  return welcome_;
}

// Connects, sends hello, waits for the welcome, and hands over vault and open votes. Throws after
// `timeout`.
void AgentClient::connectOnce(Milliseconds timeout) {
  const SteadyTime deadline = std::chrono::steady_clock::now() + timeout;
  std::string why = "no agent listens";
  for (Milliseconds backoff = kFirstBackoff;; backoff = std::min(backoff * 2, kLongestBackoff)) {
    try {
      UniqueFd socket = tryConnect(options_.socket_path);
      if (!socket && options_.start_agent) {
        options_.start_agent();
        socket = tryConnect(options_.socket_path);
      }
      if (socket && greet(std::move(socket), std::max(until(deadline), kFirstBackoff))) {
        return;
      }
    } catch (const PeerFailure& error) {  // an agent that ends, or died before its welcome
      why = error.what();
    }
    if (until(deadline).count() == 0) {
      throw Timeout("no agent at " + options_.socket_path + " after " +
                    std::to_string(timeout.count()) + " ms: " + why);
    }
    pollfd poller{wake_.get(), POLLIN, 0};
    ::poll(&poller, 1, static_cast<int>(std::min(backoff, until(deadline)).count()));
    if (stopping_) {
      throw PeerFailure("stopped while connecting");
    }
  }
}

// Returns false if the new connection broke before everything was handed over.
bool AgentClient::greet(UniqueFd socket, Milliseconds timeout) {
  decoder_ = wire::FrameDecoder();
  wire::sendFrame(socket.get(), wire::Type::kHello, options_.hello);
  wire::Frame frame{};
  try {
    frame = wire::receiveFrame(socket.get(), decoder_, timeout);
  } catch (const Timeout&) {
    const std::string pid = std::to_string(listenerOf(socket.get()).pid);
    throw Timeout("the agent at " + options_.socket_path + " (pid " + pid +
                  ") does not answer; if it is stopped, `kill -CONT " + pid + "` continues it");
  }
  if (frame.type == wire::Type::kError) {
    throw Unavailable("the agent refuses this rank: " + refusalText(frame.payload));
  }
  if (frame.type != wire::Type::kWelcome) {
    throw Corruption("the agent at " + options_.socket_path + " answered hello with message " +
                     std::to_string(static_cast<int>(frame.type)) + ", expected welcome (2)");
  }
  const MutexLock lock(mutex_);
  welcome_ = std::move(frame.payload);
  socket_ = std::move(socket);
  answers_.clear();
  connected_ = true;
  bool whole = true;
  for (const auto& [type, payload] : said_) {
    whole = whole && sendLocked(type, payload);
  }
  whole = whole && (!vault_ || sendLocked(wire::Type::kVaultPut, vault_payload_, vault_.get()));
  for (const wire::Ballot& ballot : open_votes_) {
    whole = whole &&
            sendLocked(wire::Type::kVote,
                       std::string_view(reinterpret_cast<const char*>(&ballot), sizeof(ballot)));
  }
  if (!whole) {
    socket_.reset();
  } else {
    ++connections_;
  }
  answered_.notify_all();
  return whole;
}

int AgentClient::socket() const {
  const MutexLock lock(mutex_);
  return socket_.get();
}

void AgentClient::disconnect() {
  {
    const MutexLock lock(mutex_);
    connected_ = false;
    socket_.reset();
  }
  answered_.notify_all();
}

void AgentClient::run() {
  Milliseconds backoff = kFirstBackoff;
  bool warned = false;  // one line for one outage
  while (!stopping_) {
    try {
      if (socket() < 0) {
        connectOnce(options_.connect_timeout);
        logInfo("intercept", "connected to the agent again");
        warned = false;
      }
      while (auto frame = decoder_.next()) {
        backoff = kFirstBackoff;
        dispatch(std::move(*frame));
      }
      pollfd pollers[2] = {{socket(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      if (::poll(pollers, 2, -1) < 0 && errno != EINTR) {
        throw SystemError("poll");
      }
      if (stopping_) {
        break;
      }
      if ((pollers[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0 &&
          !wire::receiveInto(pollers[0].fd, decoder_)) {
        throw PeerFailure("the agent closed the connection");
      }
    } catch (const std::exception& error) {
      if (stopping_) {
        break;
      }
      dispatching_client = nullptr;  // a handler may have thrown
      logAt("intercept", warned ? LogLevel::kDebug : LogLevel::kWarn,
            "no connection to the agent: ", error.what(),
            "; no snapshot is committed until it is back");
      warned = true;
      disconnect();
      pollfd poller{wake_.get(), POLLIN, 0};
      ::poll(&poller, 1, static_cast<int>(backoff.count()));
      backoff = std::min(backoff * 2, kLongestBackoff);
    }
  }
  disconnect();
}

void AgentClient::dispatch(wire::Frame frame) {
  const MutexLock running(dispatching_);
  Handler handler;
  {
    const MutexLock lock(mutex_);
    if (frame.type == wire::Type::kOutcome) {
      if (const auto outcome = wire::decodeBallot(frame.payload)) {
        // A commit settles older votes, too: their slots may be reused, whatever their outcome.
        std::erase_if(open_votes_, [&](const wire::Ballot& vote) {
          return vote.incarnation == outcome->incarnation &&
                 (vote.step == outcome->step || (outcome->yes != 0 && vote.step < outcome->step));
        });
      }
    }
    const auto waiting = waiting_.find(frame.type);
    if (frame.type == wire::Type::kError || (waiting != waiting_.end() && waiting->second > 0)) {
      answers_[frame.type] = std::move(frame);
      answered_.notify_all();
      return;
    }
    if (const auto found = handlers_.find(frame.type); found != handlers_.end()) {
      handler = found->second;
    }
  }
  if (handler) {
    dispatching_client = this;
    handler(frame);
    dispatching_client = nullptr;
  }
}

}  // namespace reft

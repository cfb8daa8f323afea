#include "agent/agent.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft::agent {

namespace {

enum Token : uint64_t { kListener = 1, kTimer = 2, kWake = 3, kMetrics = 4, kFirstFree = 16 };

constexpr size_t kMaxPeers = 4096;
constexpr int kMaxAccepts = 64;  // in one pass of the loop
constexpr int64_t kTickNs = kSecond / 4;
// A rank that crashes while it exits is started again by then, with whatever it imports.
constexpr int64_t kAfterByeNs = 30 * kSecond;
// The rank that started the agent needs a moment to connect, whatever the linger time is.
constexpr int64_t kFirstWaitNs = 30 * kSecond;

Investigation::Settings settingsOf(const AgentOptions& options) {
  Investigation::Settings settings;
  settings.job = options.job;
  settings.node = options.node;
  settings.suspect_sec = options.hang_suspect_sec;
  settings.abort_on_hang = options.abort_on_hang;
  settings.tick_ns = kTickNs;
  settings.boot = bootId();
  return settings;
}

void drain(const UniqueFd& fd) {
  uint64_t count;
  [[maybe_unused]] const auto got = ::read(fd.get(), &count, sizeof(count));
}

}  // namespace

Agent::Agent(AgentOptions options, UniqueFd listener, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      listener_(std::move(listener)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      spare_(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
      next_token_(kFirstFree),
      ranks_(options_.job, options_.vault_dir),
      investigation_(settingsOf(options_), options_.directory(), ranks_, connections_, wake_.get()),
      dispatch_(
          options_, ranks_, connections_, investigation_,
          [this](RankState& rank, uint64_t old_connection) { joined(rank, old_connection); },
          clock.nowNs()),
      metrics_http_(options_.metrics_port, [this] { return dispatch_.metrics(); }),
      empty_since_ns_(clock.nowNs()) {
  if (!epoll_ || !timer_ || !wake_) {
    throw SystemError("epoll, timerfd or eventfd");
  }
  const itimerspec every{{0, kTickNs}, {0, kTickNs}};
  if (::timerfd_settime(timer_.get(), 0, &every, nullptr) != 0) {
    throw SystemError("timerfd_settime");
  }
  watch(listener_.get(), kListener, false, true);
  watch(timer_.get(), kTimer, false, true);
  watch(wake_.get(), kWake, false, true);
  if (metrics_http_.fd() >= 0) {
    watch(metrics_http_.fd(), kMetrics, false, true);
  }
  ranks_.adoptVaultFiles();
}

Agent::~Agent() = default;

void Agent::watch(int fd, uint64_t token, bool write, bool add, bool read) {
  epoll_event event{};
  event.events =
      (read ? static_cast<uint32_t>(EPOLLIN) : 0u) | (write ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) != 0 && add) {
    throw SystemError("epoll_ctl");
  }
}

void Agent::stop() {
  stopping_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

Agent::End Agent::run() {
  std::array<epoll_event, 128> events;
  while (!stopping_) {
    const int count =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    if (count < 0 && errno != EINTR) {
      throw SystemError("epoll_wait");
    }
    for (int i = 0; i < count; ++i) {
      const auto& event = events[static_cast<size_t>(i)];
      handle(event.data.u64, event.events);
    }
    sweep();
    investigation_.step(clock_.nowNs());
    dispatch_.sendNativeStacks();
    if (const auto over = end()) {
      return *over;
    }
  }
  return End::kStopped;
}

void Agent::handle(uint64_t token, uint32_t events) {
  if (token == kListener) {
    acceptPeers();
  } else if (token == kTimer) {
    drain(timer_);
    tick();
  } else if (token == kWake) {
    drain(wake_);
  } else if (token == kMetrics) {
    metrics_http_.serve(clock_.nowNs());
  } else if (auto* peer = connections_.find(token)) {
    serve(*peer, events);
  } else if (const auto dead = pidfd_ranks_.find(token); dead != pidfd_ranks_.end()) {
    if (auto* rank = ranks_.find(dead->second); rank != nullptr && RankTable::ended(*rank)) {
      ended(*rank);
    }
    pidfd_ranks_.erase(dead);
  }
}

// Why the agent is no longer needed; nullopt while it is.
std::optional<Agent::End> Agent::end() {
  const auto now = clock_.nowNs();
  const auto linger = static_cast<int64_t>(options_.linger_sec * 1e9);
  if (ranks_.allSaidBye()) {
    for (auto& [id, peer] : connections_.all()) {
      peer->flush();
    }
    if (all_bye_since_ns_ == 0) {
      all_bye_since_ns_ = now;
    }
    if (!ranks_.mayComeBack() || now - all_bye_since_ns_ >= std::min(linger, kAfterByeNs)) {
      ranks_.deleteVaultFiles();
      return End::kClean;
    }
  } else {
    all_bye_since_ns_ = 0;
  }
  if (ranks_.anyLive()) {
    empty_since_ns_ = 0;
    came_ = true;
    return std::nullopt;
  }
  if (empty_since_ns_ == 0) {
    empty_since_ns_ = now;
  }
  if (now - empty_since_ns_ >= (came_ ? linger : std::max(linger, kFirstWaitNs))) {
    return End::kAbandoned;
  }
  return std::nullopt;
}

void Agent::acceptPeers() {
  for (int i = 0; i < kMaxAccepts; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) {
        // Accept it and close it at once, else the loop would spin on it.
        spare_.reset();
        UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
        spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        logWarn("agent", "out of file descriptors: refused a connection");
      }
      return;
    }
    ucred peer{};
    socklen_t length = sizeof(peer);
    const bool known = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
    const auto token = next_token_++;
    const int fd = socket.get();
    auto connection = std::make_unique<Connection>(token, std::move(socket), peer.pid);
    if (!known || peer.uid != ::geteuid()) {
      dispatch_.refuse(*connection,
                       "this agent serves user " + std::to_string(::geteuid()) + " only",
                       "run as that user");
      continue;
    }
    if (connections_.size() >= kMaxPeers) {
      dispatch_.refuse(*connection, "the agent has " + std::to_string(kMaxPeers) + " connections",
                       "close some");
      continue;
    }
    watch(fd, token, false, true);
    connections_.add(std::move(connection));
  }
}

void Agent::serve(Connection& peer, uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    peer.flush();
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0 || peer.gone()) {
    return;
  }
  if (peer.closing()) {
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
      peer.drop();
    }
    return;
  }
  const bool open = peer.receive();
  try {
    while (!peer.closing() && !peer.gone()) {
      auto frame = peer.next();
      if (!frame) {
        break;
      }
      logDebug("agent", "connection ", peer.id(), " sent message ", static_cast<int>(frame->type),
               " of ", frame->payload.size(), " bytes");
      dispatch_.handle(peer, std::move(*frame), clock_.nowNs());
    }
  } catch (const Corruption& error) {
    dispatch_.refuse(peer, error.what(), "is the peer of the same version of reft?");
  } catch (const std::exception& error) {
    dispatch_.refuse(peer, error.what(), "");
  }
  if (!open) {
    peer.drop();
  }
}

void Agent::joined(RankState& rank, uint64_t old_connection) {
  if (auto* old = connections_.find(old_connection);
      old != nullptr && old_connection != rank.connection) {
    old->drop();
  }
  std::erase_if(pidfd_ranks_, [&](const auto& entry) { return entry.second == rank.hello.rank; });
  if (rank.pidfd) {
    const auto token = next_token_++;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, rank.pidfd.get(), nullptr);
    watch(rank.pidfd.get(), token, false, true);
    pidfd_ranks_[token] = rank.hello.rank;
  }
}

void Agent::ended(RankState& rank) {
  if (!rank.alive) {
    return;
  }
  rank.alive = false;
  investigation_.rankEnded(rank, clock_.nowNs());
  if (rank.pidfd) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, rank.pidfd.get(), nullptr);
    rank.pidfd.reset();
  }
}

void Agent::sweep() {
  auto& all = connections_.all();
  for (auto it = all.begin(); it != all.end();) {
    auto& peer = *it->second;
    if (!peer.gone()) {
      watch(peer.fd(), peer.id(), peer.wantsWrite(), false, !peer.closing());
      ++it;
      continue;
    }
    if (auto* rank = ranks_.ofConnection(peer.id())) {
      rank->connection = 0;
      if (RankTable::ended(*rank)) {
        ended(*rank);
      }
    }
    it = all.erase(it);
  }
}

void Agent::tick() {
  const auto now = clock_.nowNs();
  dispatch_.tick();
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.alive && RankTable::ended(rank)) {
      ended(rank);
    }
  }
  investigation_.tick(now);
  metrics_http_.tick(now);
}

}  // namespace reft::agent

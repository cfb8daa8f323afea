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
#include <string>
#include <utility>
#include <vector>

#include "agent/peers/admission.h"
#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft::agent {

namespace {

enum Token : uint64_t {
  kListener = 1,
  kTimer = 2,
  kWake = 3,
  kMetrics = 4,
  kClaim = 5,
  kHealth = 6,
  kFirstFree = 16
};

constexpr int kMaxAccepts = 64;  // in one pass of the loop
// What tools may ask for until the next tick, so that a flood of them leaves the processor to
// ranks.
constexpr int kToolFramesPerTick = 100;
constexpr int64_t kHelloNs = 3 * kSecond;
// For a refused peer to take the reason, and for a tool to take its answer.
constexpr int64_t kRefusalNs = 3 * kSecond;
constexpr int64_t kAnswerNs = 30 * kSecond;
constexpr int64_t kTickNs = kSecond / 4;
// A rank that crashes while it exits is started again by then, with whatever it imports.
constexpr int64_t kAfterByeNs = 30 * kSecond;
// The rank that started the agent needs a moment to connect, whatever the linger time is.
constexpr int64_t kFirstWaitNs = 30 * kSecond;
// For the ranks that a living launcher may start again.
constexpr int64_t kAwaitedNs = 3600 * kSecond;

Investigation::Settings settingsOf(const AgentOptions& options) {
  Investigation::Settings settings;
  settings.job = options.job;
  settings.node = options.node;
  settings.suspect_sec = options.hang_suspect_sec;
  settings.abort_on_hang = options.abort_on_hang;
  settings.crash_loop_limit = options.crash_loop_limit;
  settings.tick_ns = kTickNs;
  settings.boot = bootId();
  return settings;
}

void drain(const UniqueFd& fd) {
  uint64_t count;
  [[maybe_unused]] const auto got = ::read(fd.get(), &count, sizeof(count));
}

}  // namespace

Agent::Agent(const AgentOptions& options, RunPlace& place, const Clock& clock)
    : options_(options),
      place_(place),
      log_file_(!options.foreground),
      clock_(clock),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      spare_(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
      next_token_(kFirstFree),
      ranks_(options_.job, options_.vault_dir),
      hardware_(health_program_, options_.hardware_counters),
      investigation_(settingsOf(options_), place.directory(), options_.directory(), ranks_,
                     connections_, hardware_, wake_.get()),
      dispatch_(
          options_, ranks_, connections_, investigation_, hardware_,
          [this](RankState& rank, uint64_t old_connection) { joined(rank, old_connection); },
          wake_.get(), clock.nowNs()),
      metrics_http_(options_.metrics_port, [this] { return dispatch_.metrics(); }),
      empty_since_ns_(clock.nowNs()),
      tool_frames_left_(kToolFramesPerTick) {
  if (!epoll_ || !timer_ || !wake_) {
    throw SystemError("epoll, timerfd or eventfd");
  }
  const itimerspec every{{0, kTickNs}, {0, kTickNs}};
  if (::timerfd_settime(timer_.get(), 0, &every, nullptr) != 0) {
    throw SystemError("timerfd_settime");
  }
  watch(place_.listener(), kListener, false, true);
  watchClaim();
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

// Once place_ has a claim. Ends the wait of one that was knocked on.
void Agent::watchClaim() {
  if (place_.claim() >= 0) {
    watch(place_.claim(), kClaim, false, !std::exchange(claim_watched_, true));
  }
}

// Once a health program has been started. The kernel forgets it with its descriptor. If it cannot
// be watched, its lines are taken at the next tick.
void Agent::watchHealth() {
  if (health_program_.fd() >= 0 &&
      std::exchange(health_watched_, health_program_.starts()) != health_program_.starts()) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kHealth;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, health_program_.fd(), &event);
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
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), more_ ? 0 : -1);
    if (count < 0 && errno != EINTR) {
      throw SystemError("epoll_wait");
    }
    for (int i = 0; i < count; ++i) {
      const auto& event = events[static_cast<size_t>(i)];
      handle(event.data.u64, event.events);
    }
    more_ = false;
    sweep();
    hardware_.step(clock_.nowNs());
    investigation_.step(clock_.nowNs());
    watchHealth();
    dispatch_.sendNativeStacks();
    dispatch_.takeCopies();
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
  } else if (token == kHealth) {
    hardware_.step(clock_.nowNs());
  } else if (token == kClaim) {
    place_.answerKnocks();
    // Any user may knock, and without descriptors no knock can be answered: until the next tick the
    // claim waits, else the loop would spin on it.
    watch(place_.claim(), kClaim, false, false, false);
    keepPlace();
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
  const int64_t empty_ns = now - empty_since_ns_;
  if (empty_ns < (came_ ? linger : std::max(linger, kFirstWaitNs))) {
    return std::nullopt;
  }
  // A launcher that starts the ranks again may take longer than that, and so may what a script does
  // before it connects.
  const bool awaited = empty_ns < kAwaitedNs && ranks_.mayComeBack();
  return awaited ? std::nullopt : std::optional(End::kAbandoned);
}

void Agent::acceptPeers() {
  for (int i = 0; i < kMaxAccepts; ++i) {
    UniqueFd socket(::accept4(place_.listener(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      admit(std::move(socket));
      continue;
    }
    if (errno == EMFILE || errno == ENFILE) {
      // Accept one and close it, so that it knows; then leave the others until the next tick, else
      // the loop would spin on them.
      spare_.reset();
      UniqueFd(::accept4(place_.listener(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
      spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      dispatch_.noteNoDescriptors();
      accepting_ = false;
      watch(place_.listener(), kListener, false, false, false);
    }
    return;
  }
}

void Agent::admit(UniqueFd socket) {
  const auto token = next_token_++;
  const int fd = socket.get();
  auto process = peerOf(fd);
  const bool ours = process.known && process.uid == ::geteuid();
  auto connection =
      std::make_unique<Connection>(token, std::move(socket), std::move(process), clock_.nowNs());
  if (!ours) {
    dispatch_.refuse(*connection, "this agent serves user " + std::to_string(::geteuid()) + " only",
                     "run as that user");
    return;
  }
  watch(fd, token, false, true);
  auto& peer = *connection;
  connections_.add(std::move(connection));
  // A rank has said hello by now, and takes no place of a stranger.
  serve(peer, EPOLLIN);
  makeRoom();
}

// Ends the connections that are too many of their kind.
void Agent::makeRoom() {
  std::vector<Seat> strangers, tools;
  for (auto& [id, peer] : connections_.all()) {
    if (!peer->gone() && peer->rank() < 0) {
      (peer->greeted() ? tools : strangers).push_back({id, peer->process().pid, peer->heardNs()});
    }
  }
  // A rank whose connection ends before it is greeted tries again; an error would end its attempt.
  if (auto* peer = connections_.find(surplus(strangers, kMostStrangers))) {
    dispatch_.note(*peer, "dropped: too many connections before hello");
    peer->drop();
  }
  if (auto* peer = connections_.find(surplus(tools, kMostTools))) {
    dispatch_.refuse(*peer, "too many tools are connected", "close some");
    peer->drop();
  }
}

// Tools wait for each other, and for their own answers to be taken; ranks do not.
bool Agent::mayAct(const Connection& peer) const {
  return !peer.closing() && !peer.gone() &&
         (!peer.greeted() || peer.rank() >= 0 || (tool_frames_left_ > 0 && !peer.wantsWrite()));
}

void Agent::serve(Connection& peer, uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    peer.flush();
  }
  if (peer.gone()) {
    return;
  }
  if (!mayAct(peer) && (events & (EPOLLHUP | EPOLLERR)) != 0) {
    peer.drop();
    return;
  }
  const bool readable = (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
  const bool open = !readable || !mayAct(peer) || peer.full() || peer.receive(clock_.nowNs());
  handleFrames(peer);
  if (!open) {
    peer.drop();
  }
}

void Agent::handleFrames(Connection& peer) {
  try {
    while (mayAct(peer)) {
      auto frame = peer.next();
      if (!frame) {
        break;
      }
      const bool tool = peer.greeted() && peer.rank() < 0;
      tool_frames_left_ -= tool;
      logDebug("agent", "connection ", peer.id(), " sent message ", static_cast<int>(frame->type),
               " of ", frame->payload.size(), " bytes");
      dispatch_.handle(peer, std::move(*frame), clock_.nowNs());
      if (tool) {  // one at a time: ranks come in between
        more_ = true;
        break;
      }
    }
  } catch (const Corruption& error) {
    dispatch_.refuse(peer, error.what(), "is the peer of the same version of reft?");
  } catch (const std::exception& error) {
    dispatch_.refuse(peer, error.what(), "");
  }
}

void Agent::joined(RankState& rank, uint64_t old_connection) {
  if (auto* old = connections_.find(old_connection);
      old != nullptr && old_connection != rank.connection) {
    old->drop();
  }
  if (!rank.hello.secret.empty()) {
    place_.usesSecret(rank.hello.secret);
  }
  hardware_.joined(rank.hello.incarnation, clock_.nowNs());
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
  if (auto* peer = connections_.find(rank.connection)) {
    // All that it has said. The stream may not end yet: its children have it, too.
    while (!peer->gone() && peer->hasBytes() && peer->receive(clock_.nowNs())) {
      handleFrames(*peer);
    }
  }
  if (rank.pid_is_own) {
    addExitStatus(rank.ending, exitStatusOf(rank.pidfd, rank.pid));
  }
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
    if (peer.greeted() && peer.rank() < 0) {
      handleFrames(peer);  // what was left
    }
    if (!peer.gone()) {
      watch(peer.fd(), peer.id(), peer.wantsWrite(), false, mayAct(peer) && !peer.full());
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

void Agent::dropSlow(int64_t now_ns) {
  for (auto& [id, peer] : connections_.all()) {
    const int64_t stalled = peer->stalledNs(now_ns);
    if (peer->closing() ? stalled >= kRefusalNs : peer->rank() < 0 && stalled >= kAnswerNs) {
      peer->drop();
    } else if (!peer->greeted() && !peer->closing() && now_ns - peer->heardNs() >= kHelloNs) {
      dispatch_.note(*peer, "dropped: no hello within 3 s");
      peer->drop();
    }
  }
}

void Agent::keepPlace() {
  switch (place_.keep()) {
    case RunPlace::Kept::kSame: log_file_.tend(place_.directory()); return;
    case RunPlace::Kept::kLost: return;
    case RunPlace::Kept::kMoved:
      log_file_.open(place_.directory());
      logWarn("agent",
              "the run directory was removed or replaced; recreated it: ", options_.directory());
      investigation_.setDirectory(place_.directory(), options_.directory());
      watch(place_.listener(), kListener, false, true);  // closing the old one has removed it
      accepting_ = true;
  }
}

void Agent::tick() {
  const auto now = clock_.nowNs();
  tool_frames_left_ = kToolFramesPerTick;
  if (!accepting_) {
    accepting_ = true;
    watch(place_.listener(), kListener, false, false);
  }
  keepPlace();
  watchClaim();
  dropSlow(now);
  dispatch_.tick(now);
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.alive && RankTable::ended(rank)) {
      ended(rank);
    }
  }
  ranks_.tendVaultFiles(now);
  hardware_.tick(ranks_.anyLive(), now);
  investigation_.tick(now);
  metrics_http_.tick(now);
}

}  // namespace reft::agent

#include "agent/agent.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <set>

#include "hang_detect/evidence/oom_kills.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/rank/verdict_notice.h"
#include "hang_detect/report/wrap.h"
#include "hang_detect/stacks/stacks.h"
#include "hang_detect/verdict/verdict.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "snapshot/cost/cadence.h"

namespace reft::agent {

namespace {

enum Token : uint64_t { kListener = 1, kTimer = 2, kWake = 3, kHttpListener = 4, kFirstFree = 16 };

constexpr size_t kMaxPeers = 4096;
constexpr size_t kMaxHttp = 64;
constexpr size_t kMaxHttpRequest = 8192;
constexpr size_t kMaxStackReply = 4u << 20;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kTickNs = kSecond / 4;
constexpr int64_t kStackWaitNs = 2 * kSecond;
constexpr int64_t kOutsideNs = kSecond;  // for the memory of those that have not answered by then
// A launcher ends or restarts the others within this time after a death, and then there is nothing
// to tell.
constexpr int64_t kDeathNs = 2 * kSecond;
// torchrun looks at its processes each 100 ms.
constexpr int64_t kAfterCrashNs = kSecond / 5;
// A rank that crashes while it exits is started again by then, with whatever it imports.
constexpr int64_t kAfterByeNs = 30'000'000'000;
// A rank that was told to end and has not by then is stopped, or its threads do not run.
constexpr int64_t kAbortNs = 5 * kSecond;
constexpr size_t kMaxChildStacks = 32;    // processes of a rank whose stacks are read
constexpr size_t kToldDisagreements = 8;  // later ones are counted only
// Nodes that did not answer are asked so many times more.
constexpr int kLooksForSilent = 3;
// The rank that started the agent needs a moment to connect, whatever the linger time is.
constexpr int64_t kFirstWaitNs = 30 * kSecond;

// Whether it is there, and with `durably` on disk; the reason why not is logged.
bool writeWhole(const std::string& path, const std::string& text, bool durably) {
  const UniqueFd file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
  size_t done = 0;
  while (file && done < text.size()) {
    const ssize_t count = ::write(file.get(), text.data() + done, text.size() - done);
    if (count <= 0) {
      break;
    }
    done += static_cast<size_t>(count);
  }
  if (!file || done < text.size() || (durably && ::fsync(file.get()) != 0)) {
    logWarn("agent", "cannot write ", path, ": ", std::strerror(errno));
    return false;
  }
  return true;
}

std::string utcName() {
  const auto now = std::chrono::system_clock::now();
  const auto seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 48> text{};
  const auto length = std::strftime(text.data(), text.size(), "%Y%m%dT%H%M%S", &parts);
  std::snprintf(text.data() + length, text.size() - length, ".%03dZ", static_cast<int>(ms));
  return text.data();
}

}  // namespace

Agent::Agent(Options options, UniqueFd listener, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      listener_(std::move(listener)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      spare_(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
      next_token_(kFirstFree),
      ranks_(options_.job, options_.vault_dir),
      ledger_([this](int rank, const CommitKey& key) -> std::optional<CommitLedger::Held> {
        auto* state = ranks_.find(rank);
        if (state == nullptr || state->readable() == nullptr) {
          return std::nullopt;
        }
        const auto keys = ranks_.sealed(*state);
        const auto found = std::find_if(keys.begin(), keys.end(),
                                        [&](const auto& entry) { return entry.first == key; });
        return found == keys.end() ? CommitLedger::Held{} : found->second;
      }),
      hang_watch_(static_cast<int64_t>(options_.hang_suspect_sec * 1e9), kTickNs),
      abort_policy_(options_.abort_on_hang, static_cast<int64_t>(options_.hang_suspect_sec * 1e9)),
      turn_(options_.node, static_cast<int64_t>(options_.hang_suspect_sec * 1e9)),
      empty_since_ns_(clock.nowNs()) {
  if (!epoll_ || !timer_ || !wake_) {
    throw SystemError("epoll, timerfd or eventfd");
  }
  const itimerspec every{{0, kTickNs}, {0, kTickNs}};
  if (::timerfd_settime(timer_.get(), 0, &every, nullptr) != 0) {
    throw SystemError("timerfd_settime");
  }
  counters_.started_ns = clock_.nowNs();
  watch(listener_.get(), kListener, false, true);
  watch(timer_.get(), kTimer, false, true);
  watch(wake_.get(), kWake, false, true);
  ranks_.adoptVaultFiles();
  openMetricsPort();
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

void Agent::openMetricsPort() {
  if (options_.metrics_port == 0) {
    return;
  }
  http_listener_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(options_.metrics_port));
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::setsockopt(http_listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(http_listener_.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) != 0 ||
      ::listen(http_listener_.get(), 16) != 0) {
    logWarn("agent", "metrics port ", options_.metrics_port,
            " is not served: ", std::strerror(errno));
    http_listener_.reset();
    return;
  }
  watch(http_listener_.get(), kHttpListener, false, true);
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
      const auto token = events[static_cast<size_t>(i)].data.u64;
      if (token == kListener) {
        acceptPeers();
      } else if (token == kTimer) {
        uint64_t expirations;
        [[maybe_unused]] const auto got = ::read(timer_.get(), &expirations, sizeof(expirations));
        tick();
      } else if (token == kWake) {
        uint64_t times;
        [[maybe_unused]] const auto got = ::read(wake_.get(), &times, sizeof(times));
      } else if (token == kHttpListener) {
        acceptHttp();
      } else if (const auto peer = peers_.find(token); peer != peers_.end()) {
        serve(*peer->second, events[static_cast<size_t>(i)].events);
      } else if (const auto http = http_.find(token); http != http_.end()) {
        serveHttp(token, http->second);
      } else if (const auto dead = pidfd_ranks_.find(token); dead != pidfd_ranks_.end()) {
        if (auto* rank = ranks_.find(dead->second); rank != nullptr && RankTable::ended(*rank)) {
          lost(*rank);
        }
        pidfd_ranks_.erase(dead);
      }
    }
    sweep();
    finishCollections();
    sendNative();
    const auto linger = static_cast<int64_t>(options_.linger_sec * 1e9);
    if (ranks_.allSaidBye()) {
      for (auto& [id, peer] : peers_) {
        peer->flush();
      }
      if (all_bye_since_ns_ == 0) {
        all_bye_since_ns_ = clock_.nowNs();
      }
      if (!ranks_.mayComeBack() ||
          clock_.nowNs() - all_bye_since_ns_ >= std::min(linger, kAfterByeNs)) {
        ranks_.deleteVaultFiles();
        return End::kClean;
      }
    } else {
      all_bye_since_ns_ = 0;
    }
    const bool somebody = ranks_.anyLive();
    if (somebody) {
      empty_since_ns_ = 0;
      came_ = true;
    } else if (empty_since_ns_ == 0) {
      empty_since_ns_ = clock_.nowNs();
    }
    if (!somebody &&
        clock_.nowNs() - empty_since_ns_ >= (came_ ? linger : std::max(linger, kFirstWaitNs))) {
      return End::kAbandoned;
    }
  }
  return End::kStopped;
}

void Agent::acceptPeers() {
  for (int i = 0; i < 64; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) {
        // Take it and close it at once, else the loop would spin on it.
        spare_.reset();
        UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
        spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        logWarn("agent", "out of file descriptors; a connection was refused");
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
      refuse(*connection, "this agent serves user " + std::to_string(::geteuid()) + " only",
             "run as that user");
      continue;
    }
    if (peers_.size() >= kMaxPeers) {
      refuse(*connection, "the agent has " + std::to_string(kMaxPeers) + " connections",
             "close some");
      continue;
    }
    watch(fd, token, false, true);
    peers_.emplace(token, std::move(connection));
  }
}

void Agent::refuse(Connection& peer, const std::string& what, const std::string& hint) {
  ++counters_.refused_peers;
  logWarn("agent", "connection ", peer.id(), " of pid ", peer.pid(), " refused: ", what);
  peer.send(wire::Type::kError, errorPayload(what, hint));
  peer.closeAfterFlush();
}

void Agent::serve(Connection& peer, uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    peer.flush();
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !peer.gone()) {
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
        handle(peer, std::move(*frame));
      }
    } catch (const InvalidArgument& error) {
      refuse(peer, error.what(), "");
    } catch (const Corruption& error) {
      refuse(peer, error.what(), "is the peer of the same version of reft?");
    } catch (const Error& error) {
      refuse(peer, error.what(), "");
    } catch (const std::exception& error) {
      refuse(peer, error.what(), "");
    }
    if (!open) {
      peer.drop();
    }
  }
}

void Agent::handle(Connection& peer, wire::Frame frame) {
  if (!peer.greeted) {
    if (frame.type != wire::Type::kHello) {
      throw InvalidArgument("first message", std::to_string(static_cast<int>(frame.type)),
                            "hello (1)");
    }
    hello(peer, frame);
    return;
  }
  if (auto* rank = peer.rank >= 0 ? ranks_.ofConnection(peer.id()) : nullptr) {
    fromRank(peer, *rank, frame);
  } else {
    fromAnybody(peer, frame);
  }
}

void Agent::hello(Connection& peer, const wire::Frame& frame) {
  const auto hello = parseHello(frame.payload);
  if (hello.job != options_.job || hello.node != options_.node) {
    refuse(peer,
           "this is the agent of job " + options_.job + ", node " + std::to_string(options_.node),
           "set REFT_JOB_ID and REFT_RUN_DIR alike on all ranks");
    return;
  }
  std::vector<CommitLedger::Action> actions;
  if (hello.is_rank) {
    const auto* before = ranks_.find(hello.rank);
    const auto old_connection = before == nullptr ? 0 : before->connection;
    try {
      ranks_.join(hello, peer.pid() > 0 ? peer.pid() : hello.pid, peer.id());
    } catch (const InvalidArgument& error) {
      const auto* live = ranks_.find(hello.rank);
      refuse(peer,
             "job id '" + options_.job + "' is already used by a live job (pid " +
                 std::to_string(live == nullptr ? 0 : live->pid) + " is its rank " +
                 std::to_string(hello.rank) + ")",
             "if that is another job, set REFT_JOB_ID to different names; if it is what is left of "
             "this one, end it");
      return;
    }
    if (const auto old = peers_.find(old_connection);
        old != peers_.end() && old_connection != peer.id()) {
      old->second->drop();
    }
    peer.rank = hello.rank;
    auto& rank = *ranks_.find(hello.rank);
    rank.notes.clear();
    rank.pid_is_own = peer.pid() > 0;
    std::erase_if(pidfd_ranks_, [&](const auto& entry) { return entry.second == hello.rank; });
    if (rank.pidfd) {
      const auto token = next_token_++;
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, rank.pidfd.get(), nullptr);
      watch(rank.pidfd.get(), token, false, true);
      pidfd_ranks_[token] = hello.rank;
    }
    actions = ledger_.expect(hello.incarnation, hello.local_world, hello.world > hello.local_world);
    logInfo("agent", "rank ", hello.rank, " joined, pid ", rank.pid, " attempt ", hello.attempt);
  }
  peer.greeted = true;
  peer.send(wire::Type::kWelcome, dumpJson({{"agent_pid", ::getpid()},
                                            {"version", kAgentVersion},
                                            {"run_dir", options_.directory()},
                                            {"linger_sec", options_.linger_sec}}));
  if (hello.is_rank && kill_due_ns_ != 0 && hello.incarnation == aborted_incarnation_) {
    peer.send(wire::Type::kAbort, "{}");  // it was not connected when the others were told
  }
  act(actions);
}

void Agent::fromRank(Connection& peer, RankState& rank, wire::Frame& frame) {
  switch (frame.type) {
    case wire::Type::kVaultPut: {
      ranks_.putVault(rank, parseVaultPut(frame.payload), std::move(frame.fd));
      peer.send(wire::Type::kVaultAck, dumpJson({{"rank", rank.hello.rank}}));
      act(ledger_.vaultHolds(rank.hello.rank, ranks_.sealed(rank)));
      return;
    }
    case wire::Type::kVote:
    case wire::Type::kJobOutcome: {
      const auto ballot = wire::decodeBallot(frame.payload);
      if (!ballot || ballot->step < 0 || ballot->yes > 1 || ballot->wish > Cadence::kMostWish) {
        throw InvalidArgument(
            "ballot", std::to_string(frame.payload.size()) + " bytes",
            "32 bytes, step 0 or more, yes 0|1, wish 0.." + std::to_string(Cadence::kMostWish));
      }
      const CommitKey key{ballot->step, ballot->incarnation};
      if (frame.type == wire::Type::kVote) {
        if (ballot->incarnation != rank.hello.incarnation) {
          throw InvalidArgument("incarnation of a vote", std::to_string(ballot->incarnation),
                                "that of hello");
        }
        act(ledger_.vote(rank.hello.rank, key, ballot->yes != 0, ballot->cut, ballot->wish));
        // With its first snapshot a rank has begun to print what it is told.
        if (rank.hello.local_rank == 0 && rank.hello.incarnation != untold_incarnation_ &&
            !untold_.empty()) {
          peer.send(wire::Type::kVerdict,
                    verdictNoticeJson("reft: why the ranks ended before:\n" + untold_));
          untold_.clear();
        }
      } else if (rank.hello.local_rank != 0) {
        throw InvalidArgument("job_outcome",
                              "from local rank " + std::to_string(rank.hello.local_rank),
                              "local rank 0");
      } else {
        act(ledger_.jobOutcome(key, ballot->yes != 0, ballot->cut, ballot->wish));
      }
      return;
    }
    case wire::Type::kStackReply: {
      if (frame.payload.size() > kMaxStackReply) {
        throw InvalidArgument("stack_reply", std::to_string(frame.payload.size()) + " bytes",
                              "up to 4 MiB");
      }
      const auto id = parseStackReplyId(frame.payload);
      for (auto& collection : collections_) {
        const auto waiting = collection.replies.find(rank.hello.rank);
        if (collection.id == id && waiting != collection.replies.end() && !waiting->second) {
          waiting->second = std::move(frame.payload);
          break;
        }
      }
      return;
    }
    case wire::Type::kNotes: rank.notes = parseNotes(frame.payload); return;
    case wire::Type::kEvidenceRequest:
      evidenceRequested(peer, parseEvidenceRequest(frame.payload));
      return;
    case wire::Type::kGathered: gathered(peer, parseGathered(frame.payload)); return;
    case wire::Type::kBye:
      rank.said_bye = true;
      logInfo("agent", "rank ", rank.hello.rank, " said bye");
      return;
    default: fromAnybody(peer, frame);
  }
}

void Agent::fromAnybody(Connection& peer, wire::Frame& frame) {
  switch (frame.type) {
    case wire::Type::kVaultList:
      peer.send(wire::Type::kVaultInventory, inventoryJson(ranks_));
      return;
    case wire::Type::kVaultGet: {
      const int number = parseVaultGet(frame.payload);
      auto* rank = ranks_.find(number);
      const auto* vault = rank == nullptr ? nullptr : rank->readable();
      if (vault == nullptr) {
        // Not the peer's fault: the rank may be new, so the connection stays.
        peer.send(wire::Type::kError,
                  errorPayload("no vault of rank " + std::to_string(number) + " is here", ""));
        return;
      }
      peer.send(wire::Type::kVaultFd, dumpJson({{"rank", number}, {"bytes", vault->bytes()}}),
                rank->vault_fd.get());
      return;
    }
    case wire::Type::kStatusRequest:
      counters_.connections = peers_.size();
      peer.send(wire::Type::kStatus,
                statusJson(options_, ranks_, ledger_, counters_, clock_.nowNs()));
      return;
    case wire::Type::kMetricsRequest:
      counters_.connections = peers_.size();
      peer.send(wire::Type::kMetrics, metricsText(options_, ranks_, ledger_, counters_));
      return;
    case wire::Type::kStacksRequest: {
      const auto request = parseStacksRequest(frame.payload);
      if (request.native) {
        readNative(peer, request.ranks[0]);
      } else {
        collectStacks(peer.id(), request.ranks);
      }
      return;
    }
    default:
      throw InvalidArgument("message type", std::to_string(static_cast<int>(frame.type)),
                            "those of a " + std::string(peer.rank >= 0 ? "rank" : "tool"));
  }
}

Connection* Agent::connectionOf(const RankState& rank) {
  const auto found = peers_.find(rank.connection);
  return rank.connection == 0 || found == peers_.end() ? nullptr : found->second.get();
}

void Agent::act(const std::vector<CommitLedger::Action>& actions) {
  for (const auto& action : actions) {
    const wire::Ballot ballot{action.key.step, action.key.incarnation,
                              action.cut,      static_cast<uint8_t>(action.yes),
                              action.wish,     {}};
    for (auto& [number, rank] : ranks_.all()) {
      const bool meant = action.kind == CommitLedger::Action::kNodeVote ? rank.hello.local_rank == 0
                         : action.kind == CommitLedger::Action::kAnswer ? number == action.rank
                                                                        : true;
      auto* peer =
          meant && rank.hello.incarnation == action.key.incarnation ? connectionOf(rank) : nullptr;
      if (peer != nullptr) {
        peer->send(action.kind == CommitLedger::Action::kNodeVote ? wire::Type::kNodeVote
                                                                  : wire::Type::kOutcome,
                   ballot);
      }
    }
  }
}

void Agent::lost(RankState& rank) {
  if (!rank.alive) {
    return;
  }
  rank.alive = false;
  gone_ns_[rank.hello.rank] = clock_.nowNs();
  if (!rank.said_bye) {
    const bool told = rank.hello.incarnation == aborted_incarnation_;
    if (death_due_ns_ == 0 && !told && rank.hello.incarnation != crash_incarnation_) {
      death_due_ns_ = clock_.nowNs() + kDeathNs;
      // At once: those that are started in their place begin new op logs.
      collectStacks(0, {}, Why::kCrash);
    }
    std::string oom;
    if (rank.oomKillsSince() > 0) {
      oom = std::string("; ") + kOomKillText;
      untold_ =
          wrapText("reft: rank " + std::to_string(rank.hello.rank) + " pid " +
                       std::to_string(rank.pid) + " is gone" + oom +
                       ": give the ranks of this node more host memory, or let them need less",
                   2) +
          "\n";
      untold_incarnation_ = rank.hello.incarnation;
    }
    logWarn("agent", "rank ", rank.hello.rank, " pid ", rank.pid, " is gone without a clean end",
            oom, "; its vault is kept");
  }
  if (rank.pidfd) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, rank.pidfd.get(), nullptr);
    rank.pidfd.reset();
  }
}

void Agent::sweep() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    auto& peer = *it->second;
    if (peer.gone()) {
      if (auto* rank = ranks_.ofConnection(peer.id())) {
        rank->connection = 0;
        if (RankTable::ended(*rank)) {
          lost(*rank);
        }
      }
      it = peers_.erase(it);
    } else {
      watch(peer.fd(), peer.id(), peer.wantsWrite(), false, !peer.closing());
      ++it;
    }
  }
}

void Agent::tick() {
  const auto now = clock_.nowNs();
  std::map<int, Progress> live;
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.alive && RankTable::ended(rank)) {
      lost(rank);
    }
    if (rank.live()) {
      if (const auto progress = readProgress(rank)) {
        live[number] = *progress;
      }
    }
  }
  compareOps(now);
  hang_watch_.look(now);
  // The answers to an earlier look may still be on their way.
  if (!looking() && hang_watch_.suspect(live, now) && turn_.suspect(ranks_.nodes(), now)) {
    logInfo("agent", "no rank made progress for ", options_.hang_suspect_sec,
            " s: collecting stacks");
    collectStacks(0, {});
  }
  watchNodes(now);
  if (hang_watch_.halfway(now)) {
    noteUsed(now);
  }
  if (hang_watch_.early(now)) {
    collectStacks(0, {}, Why::kEarly);
  }
  checkAbort(now);
  if (death_due_ns_ != 0 && now >= death_due_ns_) {
    death_due_ns_ = 0;
    if (ranks_.anyLive()) {  // else the launcher has ended the job, and says why
      collectStacks(0, {});
    }
  }
  std::erase_if(http_, [now](const auto& entry) { return entry.second.deadline_ns < now; });
}

// Says when ranks of this node disagree about an op: where it does not hang, it makes wrong values.
void Agent::compareOps(int64_t now) {
  if (compared_incarnation_ != ranks_.incarnation()) {
    compared_incarnation_ = ranks_.incarnation();
    agreement_watch_.reset();
    counters_.disagreements.clear();
  }
  for (auto& [number, rank] : ranks_.all()) {
    const auto* vault =
        rank.live() && rank.hello.incarnation == compared_incarnation_ ? rank.readable() : nullptr;
    if (vault == nullptr) {
      continue;
    }
    try {
      const OpLogReader log(vault->opLogArea(), vault->opLogBytes());
      if (log.writerPid() ==
          static_cast<uint32_t>(rank.hello.pid)) {  // else it is an earlier attempt's
        agreement_watch_.read(number, log, now);
      }
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): no op log; a report says so
    }
  }
  counters_.op_disagreements = agreement_watch_.count();
  while (const auto found = agreement_watch_.next(now)) {
    // A report of ranks that died of it says more.
    if (!found->text.empty() && counters_.disagreements.size() < kToldDisagreements &&
        crash_incarnation_ != compared_incarnation_) {
      const auto text = "ranks disagree about an op: " + found->text;
      logWarn("agent", text);
      counters_.disagreements.push_back(*found);
      if (auto* peer = speaker({})) {
        peer->send(
            wire::Type::kVerdict,
            verdictNoticeJson(
                wrapText("reft: job " + options_.job + ": " + text, 2) +
                "\nreft: it need not hang, but what they get is wrong (said once for a group)\n"));
      }
    }
  }
}

// Whether the watch itself waits for answers.
bool Agent::looking() const {
  return std::any_of(collections_.begin(), collections_.end(), [](const StackCollection& open) {
    return open.requester == 0 && !open.early;
  });
}

void Agent::noteUsed(int64_t now) {
  noted_.clear();
  for (const auto& [number, rank] : ranks_.all()) {
    if (rank.live()) {
      noted_[number] = {now, processCounters(rank.pid)};
    }
  }
}

StackCollection* Agent::collectStacks(uint64_t requester, const std::vector<int>& wanted, Why why) {
  // The watch itself asks once at a time, and has nobody to tell that it may not.
  if (requester != 0 && collections_.size() >= kMaxCollections) {
    throw InvalidArgument("stacks_request",
                          "the " + std::to_string(kMaxCollections) + "th at a time", "fewer");
  }
  StackCollection collection;
  collection.outside = OutsideStacks(wake_.get());
  collection.id = next_collection_++;
  collection.requester = requester;
  collection.confirms = why == Why::kConfirm;
  collection.crash = why == Why::kCrash;
  collection.early = why == Why::kEarly;
  collection.incarnation = ranks_.incarnation();
  const auto now = clock_.nowNs();
  collection.deadline_ns =
      now + (collection.crash   ? 0
             : collection.early ? std::min(kStackWaitNs, hang_watch_.earlyWaitNs())
                                : kStackWaitNs);
  const std::set<int> only(wanted.begin(), wanted.end());
  const auto request = dumpJson({{"id", collection.id}});
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.pid <= 0 || rank.said_bye || (!only.empty() && only.count(number) == 0)) {
      continue;
    }
    if (why == Why::kCrash && rank.hello.incarnation != collection.incarnation) {
      continue;  // what it did in an earlier attempt is not to be compared
    }
    collection.replies[number];
    collection.used[number] = {now, processCounters(rank.pid)};
    auto* peer = connectionOf(rank);
    if (collection.crash) {
      continue;
    }
    if (peer != nullptr) {
      peer->send(wire::Type::kStackRequest, request);
    }
    if (rank.alive && (peer == nullptr || processIsStopped(rank.pid))) {
      collection.outside.read({rank.pid});  // it will not answer
    }
    if (rank.alive && !collection.early) {
      auto children = childrenOf(rank.pid);
      children.resize(std::min(children.size(), kMaxChildStacks));
      collection.outside.read(children);
    }
  }
  if (requester == 0 && !collection.crash && !collection.early) {
    askNodes(collection);
  }
  return &collections_.emplace_back(std::move(collection));
}

void Agent::readNative(Connection& peer, int number) {
  const auto* rank = ranks_.find(number);
  if (rank == nullptr || !rank->alive || rank->pid <= 0) {
    peer.send(wire::Type::kStacks,
              dumpJson({{"error", rank == nullptr ? "not a rank of this node" : "it has ended"}}));
  } else {
    native_readers_.start(peer.id(), rank->pid);
  }
}

void Agent::sendNative() {
  for (const auto& [requester, answer] : native_readers_.finished()) {
    if (const auto peer = peers_.find(requester); peer != peers_.end()) {
      peer->second->send(wire::Type::kStacks, answer);
    }
  }
}

// Who has not answered in time may hang in C, or have no time.
void Agent::askOutside(StackCollection& collection) {
  collection.asked_outside = true;
  collection.deadline_ns = clock_.nowNs() + kOutsideNs;
  for (const auto& [number, reply] : collection.replies) {
    const auto* rank = ranks_.find(number);
    if (!reply && rank != nullptr && rank->alive) {
      collection.outside.read({rank->pid});
    }
  }
}

void Agent::finishCollections() {
  const auto now = clock_.nowNs();
  hang_watch_.look(now);  // answers may come before the first tick after the machine stood still
  for (auto it = collections_.begin(); it != collections_.end();) {
    // Ranks that cannot answer are not waited for.
    const bool answered =
        std::all_of(it->replies.begin(), it->replies.end(), [this, it](const auto& reply) {
          const auto* rank = ranks_.find(reply.first);
          return reply.second || rank == nullptr || it->outside.of(rank->pid) ||
                 (rank->connection == 0 && !it->outside.asked(rank->pid));
        });
    if (!answered && now >= it->deadline_ns && !it->asked_outside && !it->crash && !it->early) {
      askOutside(*it);
    }
    const bool nodes_left = it->nodes.wanted && !it->nodes.over && now < it->nodes.deadline_ns;
    // At a crash, the logs of those who are left are waited for.
    const bool waits = it->crash ? ranks_.anyLive() : !answered || !it->outside.done();
    if ((waits && now < it->deadline_ns) || nodes_left) {
      ++it;
      continue;
    }
    const bool of_watch = it->requester == 0;
    if ((of_watch || it->node_request != 0) && it->incarnation != ranks_.incarnation()) {
      logInfo("agent", "the ranks were started again while evidence was collected");
      it = collections_.erase(it);
      continue;
    }
    const bool asked = of_watch || it->node_request != 0;
    auto evidence =
        nodeEvidence(ranks_, *it, options_.job, options_.node,
                     of_watch && !it->crash ? options_.hang_suspect_sec : 0, now,
                     asked ? noted_ : std::map<int, Noted>{}, gone_ns_, hang_watch_.awayNs());
    if (asked && !it->crash && !it->early) {
      noteUsed(now);  // for the next look
    }
    if (it->node_request != 0) {
      answerNode(*it, evidence);
      it = collections_.erase(it);
      continue;
    }
    if (it->early) {
      hang_watch_.lookedEarly(decide(evidence));
      it = collections_.erase(it);
      continue;
    }
    addNodes(evidence, *it);
    const auto report = judge(evidence);
    if (!of_watch) {
      if (const auto peer = peers_.find(it->requester); peer != peers_.end()) {
        peer->second->send(wire::Type::kStacks, report.json);
      }
    } else if (it->crash && !it->looked &&
               (!report.disagreement || report.confidence == Confidence::kUndecidable)) {
      // The others may be about to begin the op, and the launcher has not ended them yet.
      it->looked = true;
      it->deadline_ns = now + kAfterCrashNs;
      ++it;
      continue;
    } else {
      concluded(*it, report, now);
    }
    it = collections_.erase(it);
  }
}

// A look of the watch is over.
void Agent::concluded(StackCollection& collection, const Report& report, int64_t now) {
  if (collection.confirms) {
    abort_policy_.lookedAgain(report);
    logInfo("agent", "second look:\n", report.screen);
  } else if (collection.crash && !report.disagreement) {
    logInfo("agent", "the ranks did not disagree about an op when one of them ended");
  } else if (!hang_watch_.credible(report)) {
    logInfo("agent",
            report.state == VerdictState::kHang
                ? "perhaps a hang, if the next look finds it, too:\n"
                : "no hang:\n",
            report.screen);
  } else if (hang_watch_.reportedStillNs(now) > 0 &&
             report.confidence == Confidence::kUndecidable) {
    logInfo("agent", "looked again, and nobody can be named yet:\n", report.screen);
  } else {
    hang_watch_.reported(
        report.silent && report.confidence == Confidence::kUndecidable ? kLooksForSilent : 0);
    if (collection.crash) {
      death_due_ns_ = 0;
      crash_incarnation_ = collection.incarnation;
    }
    ++counters_.hang_reports;
    reportHang(report, collection);
  }
}

// Who is to speak for the job: the first rank that has shown that its threads run; else the first.
Connection* Agent::speaker(const StackCollection& collection) {
  Connection* silent = nullptr;
  for (auto& [number, rank] : ranks_.all()) {
    const auto reply = collection.replies.find(number);
    auto* peer = collection.replies.empty() || reply != collection.replies.end()
                     ? connectionOf(rank)
                     : nullptr;
    if (peer != nullptr && reply != collection.replies.end() && reply->second) {
      return peer;
    }
    silent = silent == nullptr ? peer : silent;
  }
  return silent;
}

void Agent::reportHang(const Report& report, const StackCollection& collection) {
  const auto folder = options_.directory() + "/verdicts";
  ::mkdir(folder.c_str(), 0700);
  const auto path = folder + "/" + utcName();
  // On disk before anybody acts on it.
  const bool written = writeWhole(path + ".json", report.json, options_.abort_on_hang);
  writeWhole(path + ".txt", report.text, false);
  logWarn("agent", "hang report written: ", path, ".txt\n", report.screen);
  const auto action =
      written ? abort_policy_.reported(report, collection.incarnation, clock_.nowNs()) : "";
  const auto notice = terminalText(report.screen, path + ".txt", action);
  if (auto* peer = speaker(collection)) {
    speaker_ = peer->id();
    peer->send(wire::Type::kVerdict, verdictNoticeJson(notice));
  }
  if (collection.crash) {
    untold_ = notice;  // whoever is left may be gone before it prints
    untold_incarnation_ = collection.incarnation;
  }
}

void Agent::abortRanks(uint64_t incarnation, const std::string& why) {
  const auto text = "the ranks end now, to be started again (REFT_HANG_ACTION=abort): " + why;
  logWarn("agent", text);
  aborted_incarnation_ = incarnation;
  kill_due_ns_ = clock_.nowNs() + kAbortNs;
  for (auto& [number, rank] : ranks_.all()) {
    auto* peer =
        rank.live() && rank.hello.incarnation == incarnation ? connectionOf(rank) : nullptr;
    if (peer != nullptr) {
      if (peer->id() == speaker_) {
        peer->send(wire::Type::kVerdict,
                   verdictNoticeJson("reft: job " + options_.job + ": " + text + "\n"));
      }
      peer->send(wire::Type::kAbort, "{}");
    }
  }
}

// Whether a debugger or tracer is attached to a rank of this node.
bool Agent::debugged() {
  return std::any_of(ranks_.all().begin(), ranks_.all().end(), [](const auto& entry) {
    return entry.second.live() && tracerOf(entry.second.pid) > 0;
  });
}

void Agent::killStayers() {
  for (auto& [number, rank] : ranks_.all()) {
    if (!rank.live() || rank.hello.incarnation != aborted_incarnation_) {
      continue;
    }
    if (!rank.pidfd || !rank.pid_is_own || tracerOf(rank.pid) > 0) {
      logWarn("agent", "rank ", number, " pid ", rank.pid,
              " has not ended when told to and is left alone: ",
              tracerOf(rank.pid) > 0 ? "it is traced" : "its process is not known for certain");
      continue;
    }
    logWarn("agent", "rank ", number, " pid ", rank.pid,
            " has not ended when told to and is killed");
    ::syscall(SYS_pidfd_send_signal, rank.pidfd.get(), SIGKILL, nullptr, 0);
  }
}

void Agent::checkAbort(int64_t now) {
  const auto still_ns = hang_watch_.reportedStillNs(now);
  switch (abort_policy_.tick(now, still_ns, ranks_.incarnation(),
                             still_ns > 0 && options_.abort_on_hang && debugged())) {
    case AbortPolicy::Act::kNothing: break;
    case AbortPolicy::Act::kLookAgain: collectStacks(0, {}, Why::kConfirm); break;
    case AbortPolicy::Act::kAbort:
      abortRanks(abort_policy_.incarnation(), abort_policy_.why());
      break;
  }
  if (kill_due_ns_ != 0 && now >= kill_due_ns_) {
    kill_due_ns_ = 0;
    killStayers();
  }
}

void Agent::acceptHttp() {
  UniqueFd socket(::accept4(http_listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket || http_.size() >= kMaxHttp) {
    return;
  }
  const auto token = next_token_++;
  watch(socket.get(), token, false, true);
  http_[token] = {std::move(socket), "", "", clock_.nowNs() + 5 * kSecond};
}

void Agent::serveHttp(uint64_t token, Http& http) {
  bool done = false;
  if (http.out.empty()) {
    std::array<char, 4096> bytes;
    const ssize_t count = ::recv(http.socket.get(), bytes.data(), bytes.size(), 0);
    if (count > 0) {
      http.in.append(bytes.data(), static_cast<size_t>(count));
    }
    done = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR) ||
           http.in.size() > kMaxHttpRequest;
    if (!done && http.in.find("\r\n\r\n") != std::string::npos) {
      const bool known = http.in.rfind("GET /metrics ", 0) == 0 || http.in.rfind("GET / ", 0) == 0;
      counters_.connections = peers_.size();
      const auto body =
          known ? metricsText(options_, ranks_, ledger_, counters_) : std::string("GET /metrics\n");
      http.out =
          std::string("HTTP/1.1 ") + (known ? "200 OK" : "404 Not Found") +
          "\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\nContent-Length: " +
          std::to_string(body.size()) + "\r\n\r\n" + body;
      watch(http.socket.get(), token, true, false);
    }
  }
  if (!done && !http.out.empty()) {
    const ssize_t count =
        ::send(http.socket.get(), http.out.data(), http.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      http.out.erase(0, static_cast<size_t>(count));
    }
    done = http.out.empty() || (count < 0 && errno != EAGAIN && errno != EINTR);
  }
  if (done) {
    http_.erase(token);
  }
}

}  // namespace reft::agent

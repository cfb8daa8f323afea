#include "agent/mesh/mesh.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "agent/mesh/channel.h"
#include "agent/mesh/copy_store.h"
#include "agent/mesh/session.h"
#include "agent/mesh/tcp.h"
#include "agent/mesh/tls.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/base/mutex.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"

namespace reft::agent {

namespace {

enum Token : uint64_t { kListener = 1, kWake = 2, kFirstSession = 16 };

constexpr int kTickMs = 250;
constexpr int64_t kShakeNs = 5 * kSecond;
// A session in the middle of a slot that moves no byte for so long is over.
constexpr int64_t kStillNs = 10 * kSecond;
// While the thread itself is away, to touch memory, others are not silent: of the time between two
// passes, so much counts.
constexpr int64_t kLongestPassNs = kSecond;
constexpr int64_t kRetryNs = kSecond / 2;
constexpr size_t kMostStrangers = 32;
constexpr size_t kMostSessions = 1024;
constexpr int kMostLines = 20;  // about strangers, each minute
constexpr int64_t kLinesNs = 60 * kSecond;
constexpr const char* kEndedEarly =
    "ended the connection before it had shown that it is of this job (if REFT_MESH_TLS differs "
    "between the nodes, set it to the same value on all of them)";

}  // namespace

class Mesh::Worker {
 public:
  Worker(std::string job, int wake_agent, const Clock& clock, size_t budget)
      : clock_(clock),
        budget_(budget),
        wake_agent_(wake_agent),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        store_(std::move(job)),
        clock_ns_(clock.nowNs()),
        now_ns_(clock_ns_) {
    if (!epoll_ || !wake_) {
      throw SystemError("epoll or eventfd");
    }
    watch(wake_.get(), kWake, EPOLLIN, true);
    thread_ = std::thread([this] { run(); });
  }

  ~Worker() {
    post([this] { stopping_ = true; });
    thread_.join();
  }

  void post(std::function<void()> task) {
    {
      const MutexLock lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  }

  // The socket and what encrypts are made by the caller, so that their errors are the caller's.
  void listen(const MeshKey& key, std::optional<Tls> tls, UniqueFd listener) {
    auto shared = std::make_shared<UniqueFd>(std::move(listener));
    post([this, key, tls = std::move(tls), shared]() mutable {
      beginListening(key, std::move(tls), std::move(*shared));
    });
  }

  void keep(Plan plan) {
    post([this, plan = std::move(plan)]() mutable { beginKeeping(std::move(plan)); });
  }

  void fetch(uint64_t number, int world, std::vector<int> ranks, uint64_t room) {
    post([this, number, world, ranks = std::move(ranks), room] {
      beginFetch(number, world, ranks, room);
    });
  }

  std::vector<Fetched> fetched() {
    const MutexLock lock(mutex_);
    return std::exchange(fetched_, {});
  }

  void vault(int rank, UniqueFd fd) {
    auto shared = std::make_shared<UniqueFd>(std::move(fd));
    post([this, rank, shared] { vaults_[rank] = OwnVault{std::move(*shared), nullptr}; });
  }

  void sealed(int rank, const CommitKey& key) {
    post([this, rank, key] {
      for (auto& [token, peer] : peers_) {
        if (peer.serving && peer.serving->ranks.contains(rank)) {
          auto& pending = peer.serving->pending[rank];
          const auto& offer = peer.serving->offer;
          const bool offered = offer && offer->head.rank == rank && offer->head.key() == key;
          if (!offered && std::find(pending.begin(), pending.end(), key) == pending.end()) {
            pending.push_back(key);
            if (pending.size() > kMaxSlots) {
              pending.pop_front();  // no vault has it any more
            }
          }
          offerNext(peer);
        }
      }
    });
  }

  void committed(const CommitKey& key) {
    post([this, key] {
      if (committed_.incarnation != key.incarnation || committed_.step < key.step) {
        committed_ = key;
      }
      ++outcomes_;
      if (key.incarnation == plan_.incarnation) {
        dropOldCopies();
      } else if (plan_.on_demand && !fetch_) {
        // The attempt has sent no plan: this one is of an earlier attempt.
        plan_ = {};
        store_.keepOnly({});
      }
      for (auto& [token, peer] : peers_) {
        if (peer.serving) {
          peer.serving->later.clear();
          offerNext(peer);
        }
      }
    });
  }

  void aborted(const CommitKey& key) {
    post([this, key] {
      ++outcomes_;
      for (auto& [token, peer] : peers_) {
        if (peer.serving) {
          for (auto& [rank, pending] : peer.serving->pending) {
            std::erase(pending, key);
          }
          peer.serving->later.clear();  // a keeper that waits for room may have some now
          offerNext(peer);
        }
      }
    });
  }

  std::vector<Event> events() {
    const MutexLock lock(mutex_);
    return std::exchange(events_, {});
  }
  std::vector<Copy> copies() const {
    const MutexLock lock(mutex_);
    return copies_;
  }
  Status status() const {
    const MutexLock lock(mutex_);
    return status_;
  }

 private:
  // A vault of a rank of this node.
  struct OwnVault {
    UniqueFd fd;
    std::unique_ptr<VaultReader> reader;
  };

  // Where the parts of an offered slot are in its vault.
  struct Offer {
    SlotHead head;
    UniqueFd fd;
    std::array<std::pair<uint64_t, uint64_t>, 4> parts;  // offset, bytes
    uint64_t outcomes = 0;                               // that this agent knew of
    bool said = false, sending = false;
  };

  // What a session wants of this owner, and how far that is.
  struct Serving {
    std::set<int> ranks;
    int world = 0;
    std::map<int, std::deque<CommitKey>> pending;  // by rank
    std::set<int> later;                           // ranks that wait for a commit
    std::optional<Offer> offer;
    bool said_all = false;
  };

  struct Peer {
    explicit Peer(std::unique_ptr<Session> of) : session(std::move(of)) {}
    std::unique_ptr<Session> session;
    bool noted = false;              // why it ends
    std::optional<SlotHead> taking;  // keeper: the slot that comes
    std::optional<Serving> serving;  // owner
  };

  struct Dialing {
    Mesh::Source source;
    uint64_t token = 0;  // of its session; 0: none
    int64_t retry_ns = 0;
    std::string problem;
    bool done = false;  // of a fetch: it is not connected to again
  };

  struct Fetch {
    uint64_t number = 0;
    std::set<int> wanted, taken, refused;  // ranks
    std::string problem;                   // why the first was refused
  };

  void run() {
    ::pthread_setname_np(::pthread_self(), "reft-mesh");
    sigset_t broken;  // sendfile() has no MSG_NOSIGNAL, and OpenSSL uses write()
    ::sigemptyset(&broken);
    ::sigaddset(&broken, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &broken, nullptr);
    std::array<epoll_event, 64> events;
    while (!stopping_) {
      const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                     unread_.empty() ? kTickMs : 0);
      std::set<uint64_t> unread = std::exchange(unread_, {});
      passTime();
      runTasks();
      for (int i = 0; i < count; ++i) {
        const auto& event = events[static_cast<size_t>(i)];
        const uint64_t token = event.data.u64;  // packed there: no reference to it may be taken
        unread.erase(token);
        guarded(token, [&] { handle(token, event.events); });
      }
      for (const uint64_t token : unread) {
        guarded(token, [&] { handle(token, 0); });
      }
      tick();
      sweep();
      if (fetch_ && std::ranges::all_of(dialing_, &Dialing::done)) {
        endFetch();
      }
      publish();
    }
  }

  void passTime() {
    const int64_t now = clock_.nowNs();
    now_ns_ += std::min(now - clock_ns_, kLongestPassNs);
    clock_ns_ = now;
  }

  // Nothing leaves the thread: what fails with a peer ends its session.
  template <typename Fn>
  void guarded(uint64_t token, Fn fn) {
    try {
      fn();
    } catch (const std::exception& error) {
      const auto found = peers_.find(token);
      if (found == peers_.end()) {
        logWarn("agent", "mesh: ", error.what());
        return;
      }
      end(found->second, error.what());
    }
  }

  void runTasks() {
    uint64_t count;  // before the tasks are taken: one that comes later wakes the thread again
    [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof(count));
    std::deque<std::function<void()>> tasks;
    {
      const MutexLock lock(mutex_);
      tasks.swap(tasks_);
    }
    for (auto& task : tasks) {
      guarded(0, task);
    }
  }

  void end(Peer& peer, const std::string& what) {
    Session& session = *peer.session;
    session.drop();
    peer.noted = true;
    if (session.isKeeper()) {
      dialing_.at(session.source()).problem = what;
    }
    if (lines_left_ > 0) {
      --lines_left_;
      logWarn("agent",
              "mesh: ", session.isKeeper() ? "a node to copy from: " : "a connection: ", what);
    }
  }

  void watch(int fd, uint64_t token, uint32_t events, bool add) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = token;
    if (::epoll_ctl(epoll_.get(), add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) != 0 && add) {
      throw SystemError("epoll_ctl");
    }
  }

  // -- from the agent's loop

  void beginListening(const MeshKey& key, std::optional<Tls> tls, UniqueFd listener) {
    if (key != key_ || tls.has_value() != tls_.has_value()) {
      for (auto& [token, peer] : peers_) {
        peer.session->drop();
      }
    }
    key_ = key;
    tls_ = std::move(tls);
    if (tls_) {
      logInfo("agent", "mesh: connections between agents are encrypted (TLS 1.3)");
    }
    listener_ = std::move(listener);
    watch(listener_.get(), kListener, EPOLLIN, true);
    accept_again_ns_ = 0;
    port_ = tcp::portOf(listener_.get());
  }

  void beginKeeping(Plan plan) {
    for (auto& [token, peer] : peers_) {
      if (peer.session->isKeeper()) {
        peer.session->drop();
      } else {
        tcp::limitRate(peer.session->fd(), plan.rate);
      }
    }
    sweep();
    plan_ = std::move(plan);
    std::set<int> asked;  // of one node only: two could write to the same copy
    for (Source& source : plan_.sources) {
      std::erase_if(source.ranks, [&](int rank) { return !asked.insert(rank).second; });
    }
    dialing_.clear();
    if (plan_.on_demand) {
      return;
    }
    for (const Source& source : plan_.sources) {
      dialing_.push_back({source, 0, 0, "not connected yet"});
    }
    if (plan_.room == 0) {
      store_.keepOnly({});
    }
    limitTo(plan_.room);
    tick();
  }

  void limitTo(uint64_t room) {
    store_.limit([this, room](uint64_t bytes) { return store_.bytes() + bytes <= room; });
  }

  void beginFetch(uint64_t number, int world, const std::vector<int>& ranks, uint64_t room) {
    if (fetch_) {
      endFetch();
    }
    fetch_ = Fetch{number, {ranks.begin(), ranks.end()}, {}, {}, {}};
    if (!plan_.on_demand || plan_.world != world) {
      endFetch();
      return;
    }
    limitTo(room);
    for (Source source : plan_.sources) {
      std::erase_if(source.ranks, [&](int rank) { return !fetch_->wanted.contains(rank); });
      if (!source.ranks.empty()) {
        dialing_.push_back({std::move(source), 0, 0, "does not answer"});
      }
    }
    tick();
  }

  // All sources have said what they have, or will not.
  void endFetch() {
    Fetched found{fetch_->number, {fetch_->taken.begin(), fetch_->taken.end()}, fetch_->problem};
    if (plan_.on_demand) {  // else connections are those of copies that are kept all the time
      for (const Dialing& dialing : dialing_) {
        if (!dialing.problem.empty() && found.problem.empty()) {
          found.problem = dialing.source.address + ": " + dialing.problem;
        }
      }
      for (auto& [token, peer] : peers_) {
        if (peer.session->isKeeper()) {
          peer.session->drop();
        }
      }
      sweep();
      dialing_.clear();
      store_.dropEmpty();  // of a connection that broke: the next fetch begins it again
    }
    fetch_.reset();
    {
      const MutexLock lock(mutex_);
      fetched_.push_back(std::move(found));
    }
    publish();  // the copies that it tells of
    wakeAgent();
  }

  // A step of this attempt is committed: copies of ranks that this node no longer keeps go.
  void dropOldCopies() {
    std::set<CopyStore::Owner> kept;
    if (!plan_.on_demand) {
      for (const Source& source : plan_.sources) {
        for (const int rank : source.ranks) {
          kept.insert({rank, plan_.world});
        }
      }
    }
    for (auto& [token, peer] : peers_) {  // those under way are of these
      if (peer.taking && !kept.contains({peer.taking->rank, peer.taking->world})) {
        peer.session->drop();
      }
    }
    sweep();
    store_.keepOnly(kept);
  }

  // -- connections

  void handle(uint64_t token, uint32_t events) {
    if (token == kWake) {
      return;  // runTasks() has read it
    }
    if (token == kListener) {
      accept();
      return;
    }
    const auto found = peers_.find(token);
    if (found == peers_.end()) {
      return;
    }
    Peer& peer = found->second;
    Session& session = *peer.session;
    if (session.isConnecting() && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) {
      int error = 0;
      socklen_t bytes = sizeof(error);
      ::getsockopt(session.fd(), SOL_SOCKET, SO_ERROR, &error, &bytes);
      if (error != 0) {
        dialing_.at(session.source()).problem = std::strerror(error);
        peer.noted = true;
        session.drop();
        return;
      }
      session.connected();
    }
    const bool was_open = session.isOpen();
    size_t budget = budget_;
    while (!session.gone()) {
      auto frame = session.receive(budget, now_ns_);
      if (session.hasWholeSlot()) {
        endSlot(peer);
        continue;
      }
      if (!frame) {
        break;
      }
      take(peer, *frame);
    }
    if (budget == 0) {
      unread_.insert(token);  // what TLS has decrypted already, epoll does not tell of
    }
    if (!was_open && session.isOpen()) {
      opened(peer);
    }
    if (!session.gone()) {
      session.flush(budget_, now_ns_);
    }
  }

  void accept() {
    for (int i = 0; i < 16; ++i) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
          watch(listener_.get(), kListener, 0, false);  // for a while, else the loop spins
          accept_again_ns_ = now_ns_ + kRetryNs;
        }
        return;
      }
      tcp::tune(socket.get());
      tcp::limitRate(socket.get(), plan_.rate);
      const int fd = socket.get();
      auto channel = channelOver(std::move(socket), Tls::Side::kServer);
      add(std::make_unique<Session>(std::move(channel), key_, now_ns_), fd, EPOLLIN);
      makeRoom();
    }
  }

  std::unique_ptr<Channel> channelOver(UniqueFd socket, Tls::Side side) const {
    return tls_ ? tls_->over(std::move(socket), side) : plainChannel(std::move(socket));
  }

  uint64_t add(std::unique_ptr<Session> session, int fd, uint32_t events) {
    const uint64_t token = next_token_++;
    watch(fd, token, events, true);
    peers_.emplace(token, Peer(std::move(session)));
    return token;
  }

  // Strangers give way to newer ones, and never to each other's number.
  void makeRoom() {
    size_t strangers = 0;
    Peer* oldest = nullptr;
    for (auto& [token, peer] : peers_) {  // in the order in which they came
      const Session& session = *peer.session;
      if (!session.isKeeper() && !session.isOpen() && !session.gone()) {
        ++strangers;
        oldest = oldest == nullptr ? &peer : oldest;
      }
    }
    if (strangers > kMostStrangers || (oldest != nullptr && peers_.size() > kMostSessions)) {
      end(*oldest, "too many connections wait to show who they are");
    }
  }

  void dial(Dialing& dialing, size_t index) {
    dialing.retry_ns = now_ns_ + kRetryNs;
    UniqueFd socket = tcp::connectTo(dialing.source.address, dialing.source.port);
    const int fd = socket.get();
    auto channel = channelOver(std::move(socket), Tls::Side::kClient);
    dialing.token = add(std::make_unique<Session>(std::move(channel), key_, index, now_ns_), fd,
                        EPOLLIN | EPOLLOUT);
  }

  void tick() {
    if (now_ns_ - lines_since_ns_ >= kLinesNs) {
      lines_since_ns_ = now_ns_;
      lines_left_ = kMostLines;
    }
    if (accept_again_ns_ != 0 && now_ns_ >= accept_again_ns_) {
      accept_again_ns_ = 0;
      watch(listener_.get(), kListener, EPOLLIN, false);
    }
    for (auto& [token, peer] : peers_) {
      Session& session = *peer.session;
      if (session.gone()) {
        continue;
      }
      if (!session.isOpen() && now_ns_ - session.sinceNs() >= kShakeNs) {
        end(peer, "did not show who it is within 5 s");
      } else if (!session.isBusy() && !(session.isOpen() && session.isKeeper() && fetch_)) {
        session.rest(now_ns_);  // in a fetch, the owner has always something to say
      } else if (session.isOpen() && now_ns_ - session.movedNs() >= kStillNs) {
        end(peer, "has moved nothing for 10 s");
      }
    }
    for (size_t i = 0; i < dialing_.size(); ++i) {
      Dialing& dialing = dialing_[i];
      if (dialing.token == 0 && !dialing.done && now_ns_ >= dialing.retry_ns) {
        try {
          dial(dialing, i);
        } catch (const Error& error) {
          dialing.problem = error.what();
          dialing.done = plan_.on_demand;
        }
      }
    }
  }

  void sweep() {
    for (auto it = peers_.begin(); it != peers_.end();) {
      Session& session = *it->second.session;
      if (!session.gone()) {
        watch(session.fd(), it->first,
              (session.wantsRead() ? EPOLLIN : 0u) | (session.wantsWrite() ? EPOLLOUT : 0u), false);
        ++it;
        continue;
      }
      if (session.isKeeper()) {
        for (Dialing& dialing : dialing_) {
          if (dialing.token == it->first) {
            dialing.token = 0;
            if (!session.isOpen() && !it->second.noted) {
              dialing.problem = kEndedEarly;
            } else if (dialing.problem.empty() && !dialing.done) {
              dialing.problem = "the connection ended";
            }
            dialing.done = plan_.on_demand;
          }
        }
      } else if (!session.isOpen()) {
        ++refused_;
      }
      sent_bytes_ += session.sentBytes();
      taken_bytes_ += session.takenBytes();
      it = peers_.erase(it);
    }
  }

  // -- what is said

  void opened(Peer& peer) {
    Session& session = *peer.session;
    if (!session.isKeeper()) {
      return;
    }
    Dialing& dialing = dialing_.at(session.source());
    dialing.problem.clear();
    session.send(MeshType::kWant, payloadOf(Want{plan_.world, dialing.source.ranks}));
  }

  void take(Peer& peer, const MeshFrame& frame) {
    const bool keeper = peer.session->isKeeper();
    if (frame.type == MeshType::kOffer && keeper) {
      offered(peer, slotHeadIn(frame.payload));
    } else if (frame.type == MeshType::kAll && keeper && !peer.taking) {
      allOffered(peer, vaultHeadsIn(frame.payload));
    } else if (frame.type == MeshType::kBytes && keeper && peer.taking) {
      peer.session->beginSlot();
    } else if (frame.type == MeshType::kWant && !keeper) {
      wanted(peer, wantIn(frame.payload));
    } else if (frame.type == MeshType::kSend && !keeper && peer.serving && peer.serving->offer &&
               !peer.serving->offer->sending) {
      sendOffered(peer);
    } else if (frame.type == MeshType::kHeld && !keeper && peer.serving && peer.serving->offer) {
      answered(peer, heldSlotIn(frame.payload));
    } else {
      throw Corruption("mesh: a frame that is not due");
    }
  }

  // As a keeper.

  void offered(Peer& peer, const SlotHead& head) {
    const Source& source = dialing_.at(peer.session->source()).source;
    if (peer.taking || head.world != plan_.world ||
        std::find(source.ranks.begin(), source.ranks.end(), head.rank) == source.ranks.end()) {
      throw Corruption("mesh: a slot that was not asked for");
    }
    Kept answer = Kept::kNo;
    try {
      if (auto incoming = store_.begin(head, answer)) {
        peer.taking = head;
        peer.session->expect(std::move(incoming));
        peer.session->send(MeshType::kSend);
        return;
      }
    } catch (const Error& error) {
      refuseSlot(head, error.what());
    }
    reply(peer, head, answer);
  }

  void allOffered(Peer& peer, const std::vector<VaultHead>& vaults) {
    if (!plan_.on_demand) {
      return;
    }
    Dialing& dialing = dialing_.at(peer.session->source());
    for (const VaultHead& vault : vaults) {
      const bool whole = fetch_ && !fetch_->refused.contains(vault.rank);
      if (whole && std::ranges::count(dialing.source.ranks, vault.rank) > 0) {
        store_.complete({vault.rank, plan_.world}, vault.writer, vault.resumed);
      }
    }
    dialing.done = true;
    peer.session->drop();
  }

  void endSlot(Peer& peer) {
    const SlotHead head = *std::exchange(peer.taking, std::nullopt);
    const auto incoming = peer.session->takeSlot();
    store_.seal(*incoming, clock_.nowNs());
    logDebug("agent", "mesh: holds step ", head.step, " of rank ", head.rank);
    reply(peer, head, Kept::kYes);
  }

  void refuseSlot(const SlotHead& head, const std::string& why) {
    if (std::exchange(told_room_, why) != why) {
      logWarn("agent", "mesh: no copy of step ", head.step, " of rank ", head.rank, ": ", why);
    }
    if (fetch_ && fetch_->problem.empty()) {
      fetch_->problem = "rank " + std::to_string(head.rank) + ": " + why;
    }
  }

  void reply(Peer& peer, const SlotHead& head, Kept kept) {
    if (fetch_) {
      (kept == Kept::kYes ? fetch_->taken : fetch_->refused).insert(head.rank);
    }
    peer.session->send(MeshType::kHeld,
                       payloadOf(HeldSlot{head.rank, kept, head.step, head.incarnation}));
  }

  // As an owner.

  void wanted(Peer& peer, const Want& want) {
    Serving serving;
    serving.world = want.world;
    serving.ranks.insert(want.ranks.begin(), want.ranks.end());
    peer.serving = std::move(serving);
    for (const int rank : want.ranks) {
      auto views = slotsOf(rank);
      std::sort(views.begin(), views.end(),
                [](const SlotView& a, const SlotView& b) { return a.sealed_ns < b.sealed_ns; });
      for (const SlotView& view : views) {
        peer.serving->pending[rank].push_back({view.step, view.incarnation});
      }
    }
    offerNext(peer);
  }

  // The sealed slots of a rank of this node.
  std::vector<SlotView> slotsOf(int rank) {
    const auto found = vaults_.find(rank);
    if (found == vaults_.end()) {
      return {};
    }
    try {
      OwnVault& own = found->second;
      if (own.reader) {
        own.reader->refresh();
      } else {
        own.reader = std::make_unique<VaultReader>(own.fd.get());
      }
      return own.reader->slots();
    } catch (const Error& error) {
      logWarn("agent", "mesh: the vault of rank ", rank, ": ", error.what());
      vaults_.erase(found);
      return {};
    }
  }

  std::vector<VaultHead> headsOf(const std::set<int>& ranks) const {
    std::vector<VaultHead> heads;
    for (const int rank : ranks) {
      const auto found = vaults_.find(rank);
      if (found != vaults_.end() && found->second.reader) {
        const RankStats& stats = found->second.reader->stats();
        heads.push_back({rank, 0, stats.incarnation.load(),
                         std::max<int64_t>(-1, static_cast<int64_t>(stats.restored_step.load()))});
      }
    }
    return heads;
  }

  // The rank whose turn it is. A step is committed once all ranks have copies of it, so that of all
  // slots the one of the earliest step comes first; what earlier attempts left comes before that.
  std::map<int, std::deque<CommitKey>>::iterator nextOf(Serving& serving) const {
    const auto order = [this](const CommitKey& key) {
      return std::pair(key.incarnation == plan_.incarnation, key.step);
    };
    auto next = serving.pending.end();
    for (auto it = serving.pending.begin(); it != serving.pending.end(); ++it) {
      const bool may = !it->second.empty() && !serving.later.contains(it->first);
      if (may && (next == serving.pending.end() ||
                  order(it->second.front()) < order(next->second.front()))) {
        next = it;
      }
    }
    return next;
  }

  void offerNext(Peer& peer) {
    Serving& serving = *peer.serving;
    while (!serving.offer) {
      const auto next = nextOf(serving);
      if (next == serving.pending.end()) {
        break;
      }
      const CommitKey key = next->second.front();
      next->second.pop_front();
      serving.offer = offerOf(next->first, key, serving.world);
    }
    if (serving.offer && !std::exchange(serving.offer->said, true)) {
      peer.session->send(MeshType::kOffer, payloadOf(serving.offer->head));
    }
    if (!serving.offer && !std::exchange(serving.said_all, true)) {
      peer.session->send(MeshType::kAll, payloadOf(headsOf(serving.ranks)));
    }
  }

  std::optional<Offer> offerOf(int rank, const CommitKey& key, int world) {
    for (const SlotView& view : slotsOf(rank)) {
      if (view.step != key.step || view.incarnation != key.incarnation) {
        continue;
      }
      const OwnVault& own = vaults_.at(rank);
      if (own.reader->identity().world != world) {
        return std::nullopt;
      }
      Offer offer;
      offer.outcomes = outcomes_;
      SlotHead& head = offer.head;
      head.rank = rank;
      head.world = world;
      head.step = view.step;
      head.incarnation = view.incarnation;
      head.has_committed = committed_.incarnation == view.incarnation ? 1 : 0;
      head.cut = view.cut;
      for (const RawSlot& raw : own.reader->rawSlots()) {
        if (raw.state != SlotState::kSealed) {
          continue;
        }
        head.still[head.still_count++] = {raw.step, raw.incarnation};
        if (raw.step == view.step && raw.incarnation == view.incarnation) {
          head.replicas = raw.replicas;
          head.proposal = raw.proposal;
          head.plan_anew = raw.plan_anew ? 1 : 0;
        }
      }
      head.table_bytes = view.table_bytes;
      head.table_hash = view.table_hash;
      head.objects_bytes = view.object_bytes;
      head.objects_hash = view.objects_hash;
      head.chunk_count = view.chunk_count;
      head.chunk_bytes = view.chunk_bytes;
      head.payload_bytes = view.payload_bytes;
      head.group_count = static_cast<uint32_t>(view.group_digests.size());
      std::copy(view.group_digests.begin(), view.group_digests.end(), head.group_digests);
      const auto hashes_bytes = view.chunk_count * sizeof(uint64_t);
      head.chunk_hashes_hash = hashBytes(
          own.reader->payload(view) - view.payload_at + view.chunk_hashes_at, hashes_bytes);
      offer.fd.reset(::fcntl(own.fd.get(), F_DUPFD_CLOEXEC, 3));
      offer.parts = {{{view.table_at, view.table_bytes},
                      {view.objects_at, view.object_bytes},
                      {view.chunk_hashes_at, hashes_bytes},
                      {view.payload_at, view.payload_bytes}}};
      return offer;
    }
    return std::nullopt;  // overwritten meanwhile: its step has been decided
  }

  void sendOffered(Peer& peer) {
    Offer& offer = *peer.serving->offer;
    offer.sending = true;
    peer.session->send(MeshType::kBytes);
    for (const auto& [at, bytes] : offer.parts) {
      peer.session->sendFile(offer.fd.get(), at, bytes);
    }
  }

  void answered(Peer& peer, const HeldSlot& held) {
    Serving& serving = *peer.serving;
    const SlotHead head = serving.offer->head;
    if (held.rank != head.rank || held.step != head.step || held.incarnation != head.incarnation) {
      throw Corruption("mesh: an answer about another slot");
    }
    const bool was_told_all = serving.offer->outcomes == outcomes_;
    serving.offer.reset();
    if (held.kept == Kept::kLater) {
      serving.pending[head.rank].push_front(head.key());
      if (was_told_all) {  // else the commit for which it would wait is there already
        serving.later.insert(head.rank);
      }
    } else {
      const MutexLock lock(mutex_);
      events_.push_back({head.rank, head.key(), held.kept == Kept::kYes});
    }
    wakeAgent();
    offerNext(peer);
  }

  void wakeAgent() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_agent_, &one, sizeof(one));
  }

  // -- what the agent's loop reads

  void publish() {
    Status status;
    status.port = port_;
    status.tls = tls_.has_value();
    status.sources = static_cast<int>(dialing_.size());
    status.sent_bytes = sent_bytes_;
    status.taken_bytes = taken_bytes_;
    status.refused = refused_;
    for (const auto& [token, peer] : peers_) {
      const Session& session = *peer.session;
      status.keepers += peer.serving.has_value() ? 1 : 0;
      status.connected += session.isKeeper() && session.isOpen() ? 1 : 0;
      status.sent_bytes += session.sentBytes();
      status.taken_bytes += session.takenBytes();
    }
    for (const Dialing& dialing : dialing_) {
      if (!dialing.problem.empty() && status.problem.empty()) {
        status.problem = dialing.problem;
      }
    }
    std::vector<Copy> copies;
    for (const CopyStore::Copy& copy : store_.copies()) {
      copies.push_back({copy.owner.rank, copy.owner.world, copy.vault});
    }
    const MutexLock lock(mutex_);
    status_ = std::move(status);
    copies_ = std::move(copies);
  }

  const Clock& clock_;
  const size_t budget_;
  const int wake_agent_;
  UniqueFd epoll_, wake_, listener_;
  bool stopping_ = false;
  std::set<uint64_t> unread_;    // sessions that had no budget for all that came
  int64_t accept_again_ns_ = 0;  // 0: it accepts
  int port_ = 0;
  MeshKey key_{};
  std::optional<Tls> tls_;  // absent: connections are not encrypted
  Plan plan_;
  std::optional<Fetch> fetch_;
  CopyStore store_;
  CommitKey committed_{-1, 0};
  uint64_t outcomes_ = 0;  // since it was made
  uint64_t next_token_ = kFirstSession;
  std::map<uint64_t, Peer> peers_;
  std::vector<Dialing> dialing_;
  std::map<int, OwnVault> vaults_;
  int64_t clock_ns_;                                         // at the begin of this pass
  int64_t now_ns_;                                           // the same, as far as time counts
  uint64_t sent_bytes_ = 0, taken_bytes_ = 0, refused_ = 0;  // of connections that are over
  int lines_left_ = kMostLines;
  int64_t lines_since_ns_ = 0;
  std::string told_room_;

  mutable Mutex mutex_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  std::vector<Event> events_ GUARDED_BY(mutex_);
  std::vector<Copy> copies_ GUARDED_BY(mutex_);
  Status status_ GUARDED_BY(mutex_);
  std::vector<Fetched> fetched_ GUARDED_BY(mutex_);
  std::thread thread_;
};

Mesh::Mesh(std::string job, int wake, const Clock& clock, size_t budget)
    : job_(std::move(job)), wake_(wake), clock_(clock), budget_(budget) {}

Mesh::~Mesh() = default;

uint16_t Mesh::open(const MeshKey& key, const std::string& address, uint16_t wanted, bool tls) {
  auto encrypting = tls ? std::optional<Tls>(key) : std::nullopt;
  UniqueFd listener;
  try {
    listener = tcp::listenAt(address, wanted);
  } catch (const SystemError&) {
    if (wanted == 0) {
      throw;
    }
    listener = tcp::listenAt(address, 0);  // another process has that port now
  }
  const uint16_t port = tcp::portOf(listener.get());
  if (worker_ == nullptr) {
    worker_ = std::make_unique<Worker>(job_, wake_, clock_, budget_);
  }
  worker_->listen(key, std::move(encrypting), std::move(listener));
  return port;
}

void Mesh::keep(Plan plan) {
  if (worker_ != nullptr) {
    worker_->keep(std::move(plan));
  }
}

uint64_t Mesh::fetch(int world, std::vector<int> ranks, uint64_t room) {
  ++fetches_;
  if (worker_ != nullptr) {
    worker_->fetch(fetches_, world, std::move(ranks), room);
  }
  return fetches_;
}

std::vector<Mesh::Fetched> Mesh::fetched() {
  return worker_ == nullptr ? std::vector<Fetched>() : worker_->fetched();
}

void Mesh::vault(int rank, int fd) {
  UniqueFd own(worker_ == nullptr ? -1 : ::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (own) {
    worker_->vault(rank, std::move(own));
  }
}

void Mesh::sealed(int rank, const CommitKey& key) {
  if (worker_ != nullptr) {
    worker_->sealed(rank, key);
  }
}

void Mesh::committed(const CommitKey& key) {
  if (worker_ != nullptr) {
    worker_->committed(key);
  }
}

void Mesh::aborted(const CommitKey& key) {
  if (worker_ != nullptr) {
    worker_->aborted(key);
  }
}

std::vector<Mesh::Event> Mesh::events() {
  return worker_ == nullptr ? std::vector<Event>() : worker_->events();
}

std::vector<Mesh::Copy> Mesh::copies() const {
  return worker_ == nullptr ? std::vector<Copy>() : worker_->copies();
}

std::shared_ptr<const UniqueFd> Mesh::copyOf(int rank, int world) const {
  for (const Copy& copy : copies()) {
    if (copy.rank == rank && copy.world == world) {
      return copy.vault;
    }
  }
  return nullptr;
}

Mesh::Status Mesh::status() const {
  return worker_ == nullptr ? Status() : worker_->status();
}

}  // namespace reft::agent

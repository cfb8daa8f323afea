#include "agent/dispatch.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "agent/peers/admission.h"
#include "agent/peers/messages.h"
#include "hang_detect/rank/verdict_notice.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "snapshot/cost/cadence.h"
#include "snapshot/vault/mapping.h"

namespace reft::agent {

namespace {

constexpr size_t kMaxStackReply = 4u << 20;
constexpr int64_t kCopyPatienceNs = 10 * kSecond;  // without a byte that moves
// Until then nothing is committed, and what killed ranks would lose grows.
constexpr int64_t kLongestCopyNs = 600 * kSecond;

// Equal for processes that can reach each other's agents, as python/reft/_link/launch.py has it.
std::string findHostIdentity() {
  std::array<char, 256> name{}, pids{};
  ::gethostname(name.data(), name.size() - 1);
  const ssize_t length = ::readlink("/proc/self/ns/pid", pids.data(), pids.size() - 1);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  file >> boot;
  return std::string(name.data()) + " " + boot + " " + (length > 0 ? pids.data() : "");
}

// It stays while the agent lives, so no greeting reads files.
const std::string& hostIdentity() {
  static const std::string identity = findHostIdentity();
  return identity;
}

}  // namespace

Dispatch::Dispatch(const AgentOptions& options, RankTable& ranks, Connections& connections,
                   InvestigationRunner& investigation, HardwareWatch& hardware,
                   std::function<void(RankState&, uint64_t)> joined, int wake, int64_t now_ns)
    : options_(options),
      ranks_(ranks),
      connections_(connections),
      investigation_(investigation),
      hardware_(hardware),
      joined_(std::move(joined)),
      ledger_([this](int rank, const CommitKey& key) -> std::optional<CommitLedger::Held> {
        auto* state = ranks_.find(rank);
        if (state == nullptr || state->readable() == nullptr || gate_.waits(rank, key)) {
          return std::nullopt;
        }
        const auto keys = ranks_.sealed(*state);
        const auto found = std::find_if(keys.begin(), keys.end(),
                                        [&](const auto& entry) { return entry.first == key; });
        return found == keys.end() ? CommitLedger::Held{} : found->second;
      }),
      mesh_(options.job, wake),
      gate_(kCopyPatienceNs, kLongestCopyNs) {
  state_.job = options.job;
  state_.node = options.node;
  state_.started_ns = now_ns;
}

void Dispatch::refuse(Connection& peer, const std::string& what, const std::string& hint) {
  note(peer, "refused: " + what);
  peer.send(wire::Type::kError, errorPayload(what, hint));
  peer.closeAfterFlush();
}

void Dispatch::note(const Connection& peer, const std::string& what) {
  ++state_.refused_peers;
  if (lines_.take()) {
    logWarn("agent", "connection ", peer.id(), " of pid ", peer.process().pid, " ", what);
  }
}

void Dispatch::noteNoDescriptors() {
  ++state_.refused_peers;
  if (lines_.take()) {
    logWarn("agent", "out of file descriptors: refused a connection");
  }
}

void Dispatch::tick(int64_t now_ns) {
  ++state_.ticks;
  if (const uint64_t sent = mesh_.status().sent_bytes; std::exchange(sent_bytes_, sent) != sent) {
    gate_.moved(now_ns);
  }
  count(gate_.tick(now_ns));
  if (const auto left_out = lines_.refill(); left_out > 0) {
    logWarn("agent", left_out, " more lines about peers were left out");
  }
}

void Dispatch::handle(Connection& peer, wire::Frame frame, int64_t now_ns) {
  if (!peer.greeted()) {
    if (frame.type != wire::Type::kHello) {
      throw InvalidArgument("first message", std::to_string(static_cast<int>(frame.type)),
                            "hello (1)");
    }
    hello(peer, frame);
    return;
  }
  if (auto* rank = peer.rank() >= 0 ? ranks_.ofConnection(peer.id()) : nullptr) {
    fromRank(peer, *rank, frame, now_ns);
  } else {
    fromAnybody(peer, frame, now_ns);
  }
}

void Dispatch::hello(Connection& peer, const wire::Frame& frame) {
  const auto hello = parseHello(frame.payload);
  if (hello.job != options_.job) {
    refuse(peer, "this is the agent of job " + options_.job,
           "set REFT_JOB_ID and REFT_RUN_DIR alike on all ranks");
    return;
  }
  if (hello.is_rank) {
    const auto* before = ranks_.find(hello.rank);
    const auto old_connection = before == nullptr ? 0 : before->connection;
    if (before == nullptr && ranks_.all().size() >= kMostRanks) {
      refuse(peer, "this agent has " + std::to_string(kMostRanks) + " ranks", "");
      return;
    }
    peer.process().confirm(hello.started);
    try {
      ranks_.join(hello, peer.process(), peer.id());
    } catch (const InvalidArgument&) {
      const auto* live = ranks_.find(hello.rank);
      refuse(peer,
             "job id '" + options_.job + "' is already used by a live job (pid " +
                 std::to_string(live == nullptr ? 0 : live->pid) + " is its rank " +
                 std::to_string(hello.rank) + ")",
             "if that is another job, set REFT_JOB_ID to different names; if it is what is left of "
             "this one, end it");
      return;
    }
    auto& rank = *ranks_.find(hello.rank);
    rank.notes.clear();
    // The numbers of nodes change with each start of the ranks.
    state_.node = hello.node;
    investigation_.setNode(hello.node);
    joined_(rank, old_connection);
    logInfo("agent", "rank ", hello.rank, " joined, pid ", rank.pid, " attempt ", hello.attempt);
  }
  peer.greet(hello.is_rank ? hello.rank : -1);
  peer.send(wire::Type::kWelcome, dumpJson({{"agent_pid", ::getpid()},
                                            {"version", kAgentVersion},
                                            {"host", hostIdentity()},
                                            {"run_dir", options_.directory()},
                                            {"linger_sec", options_.linger_sec}}));
  if (hello.is_rank) {
    investigation_.rankJoined(peer, *ranks_.find(hello.rank));
    act(ledger_.expect(hello.incarnation, hello.local_world, hello.world > hello.local_world));
  }
}

void Dispatch::fromRank(Connection& peer, RankState& rank, wire::Frame& frame, int64_t now_ns) {
  switch (frame.type) {
    case wire::Type::kVaultPut:
      ranks_.putVault(rank, parseVaultPut(frame.payload), std::move(frame.fd));
      logDebug("agent", "rank ", rank.hello.rank, " handed over its vault");
      peer.send(wire::Type::kVaultAck, dumpJson({{"rank", rank.hello.rank}}));
      mesh_.vault(rank.hello.rank, rank.vault.fd.get());
      recount(rank, now_ns);
      return;
    case wire::Type::kMeshOpen:
      openMesh(parseMeshOpen(frame.payload));
      peer.send(wire::Type::kMeshAt, dumpJson({{"port", mesh_port_}, {"tls", mesh_tls_}}));
      return;
    case wire::Type::kMeshKeep: keepCopies(rank, parseMeshKeep(frame.payload), now_ns); return;
    case wire::Type::kMeshFetch: fetchCopies(peer, parseMeshFetch(frame.payload)); return;
    case wire::Type::kVote:
    case wire::Type::kJobOutcome: vote(rank, frame, now_ns); return;
    case wire::Type::kStackReply:
      if (frame.payload.size() > kMaxStackReply) {
        throw InvalidArgument("stack_reply", std::to_string(frame.payload.size()) + " bytes",
                              "up to 4 MiB");
      }
      investigation_.stackReply(rank, std::move(frame.payload));
      return;
    case wire::Type::kNotes: rank.notes = parseNotes(frame.payload); return;
    case wire::Type::kEvidenceRequest:
      investigation_.evidenceRequested(peer, parseEvidenceRequest(frame.payload), now_ns);
      return;
    case wire::Type::kGathered:
      investigation_.gathered(peer, parseGathered(frame.payload), now_ns);
      return;
    case wire::Type::kLastWords: hearWords(peer, rank, frame.payload, now_ns); return;
    case wire::Type::kBye:
      rank.said_bye = true;
      logInfo("agent", "rank ", rank.hello.rank, " ended cleanly");
      return;
    default: fromAnybody(peer, frame, now_ns);
  }
}

void Dispatch::vote(RankState& rank, const wire::Frame& frame, int64_t now_ns) {
  const auto ballot = wire::decodeBallot(frame.payload);
  if (!ballot || ballot->step < 0 || ballot->yes > 1 || ballot->plan_anew > 1 ||
      ballot->proposal > Cadence::kMostProposal) {
    throw InvalidArgument("ballot", std::to_string(frame.payload.size()) + " bytes",
                          "40 bytes, step 0 or more, yes and plan_anew 0|1, proposal 0.." +
                              std::to_string(Cadence::kMostProposal));
  }
  const CommitKey key{ballot->step, ballot->incarnation};
  if (frame.type == wire::Type::kVote) {
    if (ballot->incarnation != rank.hello.incarnation) {
      throw InvalidArgument("incarnation of a vote", std::to_string(ballot->incarnation),
                            "that of hello");
    }
    // No step counts that only a vault holds that this agent has lost.
    if (ballot->yes != 0) {
      rank.readable();
    }
    const CopyGate::Vote vote{rank.hello.rank,
                              key,
                              {ballot->yes != 0 && !rank.vault.lost, ballot->cut, ballot->proposal,
                               ballot->replicas, ballot->plan_anew != 0}};
    // A rank may vote for a step that is aborted already: it waits for no copy, and its slot is
    // free.
    const bool is_decided = ledger_.isDecided(key);
    if (vote.held.sealed && !is_decided) {
      mesh_.sealed(vote.rank, key);
    }
    if (is_decided || !gate_.take(vote, now_ns)) {
      act(ledger_.vote(vote.rank, key, vote.held));
    }
    if (rank.hello.local_rank == 0) {
      investigation_.rankVoted(rank, now_ns);
    }
  } else if (rank.hello.local_rank != 0) {
    throw InvalidArgument("job_outcome", "from local rank " + std::to_string(rank.hello.local_rank),
                          "local rank 0");
  } else {
    act(ledger_.jobOutcome(key, {ballot->yes != 0, ballot->cut, ballot->proposal, ballot->replicas,
                                 ballot->plan_anew != 0}));
  }
}

// What a vault that is handed over holds: votes that an earlier agent may have had.
void Dispatch::recount(RankState& rank, int64_t now_ns) {
  std::vector<std::pair<CommitKey, CommitLedger::Held>> counted;
  for (const auto& [key, held] : ranks_.sealed(rank)) {
    mesh_.sealed(rank.hello.rank, key);
    if (ledger_.isDecided(key) || !gate_.take({rank.hello.rank, key, held}, now_ns)) {
      counted.emplace_back(key, held);
    }
  }
  act(ledger_.vaultHolds(rank.hello.rank, counted));
}

void Dispatch::openMesh(const MeshOpen& open) {
  mesh_port_ = mesh_.open(open.key, open.address, static_cast<uint16_t>(open.port), open.tls);
  mesh_key_ = open.key;
  mesh_tls_ = open.tls;
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.vault.fd) {
      mesh_.vault(number, rank.vault.fd.get());
    }
  }
}

void Dispatch::keepCopies(RankState& rank, const MeshKeep& keep, int64_t now_ns) {
  try {
    if (!mesh_.isOpen() || keep.open.key != mesh_key_ || keep.open.tls != mesh_tls_) {
      openMesh(keep.open);
    }
  } catch (const Error& error) {  // not the rank's fault: its votes go on
    if (keep.on_demand) {
      logWarn("agent", "mesh: ", error.what());
      return;
    }
    say("node " + std::to_string(state_.node) +
        " cannot exchange copies with others, and its loss "
        "would NOT be survived: " +
        error.what());
    return;
  }
  Mesh::Plan plan;
  plan.incarnation = rank.hello.incarnation;
  plan.world = rank.hello.world;
  plan.room = keep.room;
  plan.rate = keep.rate;
  plan.on_demand = keep.on_demand;
  for (const MeshKeep::Source& source : keep.sources) {
    plan.sources.push_back({source.address, static_cast<uint16_t>(source.port), source.ranks});
  }
  mesh_.keep(std::move(plan));
  // Other ranks of the node may have voted before this one asked for copies.
  const auto added = gate_.expect({keep.copied.begin(), keep.copied.end()}, rank.hello.incarnation);
  for (const CopyGate::Vote& vote : ledger_.takeBack(rank.hello.incarnation, added)) {
    mesh_.sealed(vote.rank, vote.key);  // its event may have come before the vote waited
    if (!gate_.take(vote, now_ns)) {
      count({vote});
    }
  }
  count(gate_.ready());
}

void Dispatch::fetchCopies(Connection& peer, const MeshFetch& fetch) {
  if (!mesh_.isOpen()) {
    peer.send(wire::Type::kMeshFetched, fetchedJson({}));
    return;
  }
  fetching_[mesh_.fetch(fetch.world, fetch.ranks, fetch.room)] = peer.id();
}

void Dispatch::takeCopies() {
  for (const Mesh::Fetched& fetched : mesh_.fetched()) {
    const auto waiting = fetching_.extract(fetched.number);
    if (auto* peer = waiting ? connections_.find(waiting.mapped()) : nullptr) {
      peer->send(wire::Type::kMeshFetched, fetchedJson(fetched));
    }
  }
  for (const Mesh::Event& event : mesh_.events()) {
    if (!event.held) {
      count(gate_.failed());
    } else {
      gate_.copied(event.rank, event.key);
    }
  }
  count(gate_.ready());
  reportCopies();
}

void Dispatch::reportCopies() {
  const auto before = std::exchange(reported_, gate_.state());
  if (reported_ == before) {
    return;
  }
  const std::string copies = "copies of node " + std::to_string(state_.node) + "'s snapshots ";
  switch (reported_) {
    case CopyGate::State::kFresh: break;
    case CopyGate::State::kLate:
      say(copies +
          "are not on another node yet: if the node is lost before they are, at least all "
          "steps since this start are lost");
      break;
    case CopyGate::State::kMissing:
      say(copies +
          "do not reach another node: steps are committed without them, and its loss "
          "would NOT be survived (its log tells more: " +
          options_.directory() + "/agent.log)");
      break;
    case CopyGate::State::kThere:
      if (before == CopyGate::State::kLate) {
        const auto newest = ledger_.newestCommitted();
        say(copies + "are on another node from step " + std::to_string(newest ? newest->step : -1) +
                " on",
            false);
      } else if (before == CopyGate::State::kMissing) {
        say(copies + "reach another node again");
      }
      break;
  }
}

void Dispatch::count(const std::vector<CopyGate::Vote>& votes) {
  for (const CopyGate::Vote& vote : votes) {
    act(ledger_.vote(vote.rank, vote.key, vote.held));
  }
}

void Dispatch::say(const std::string& line, bool is_warning) {
  logAt("agent", is_warning ? LogLevel::kWarn : LogLevel::kInfo, line);
  const std::string head = is_warning ? "reft: warning: " : "reft: ";
  for (auto& [number, rank] : ranks_.all()) {
    auto* peer = rank.hello.local_rank == 0 ? connections_.find(rank.connection) : nullptr;
    if (peer != nullptr) {
      peer->send(wire::Type::kVerdict, verdictNoticeJson(head + line + "\n"));
    }
  }
}

void Dispatch::fromAnybody(Connection& peer, wire::Frame& frame, int64_t now_ns) {
  switch (frame.type) {
    case wire::Type::kVaultList:
      peer.send(wire::Type::kVaultInventory,
                inventoryJson(ranks_, mesh_.copies(), parseVaultList(frame.payload)));
      return;
    case wire::Type::kVaultGet: giveVault(peer, parseVaultGet(frame.payload)); return;
    case wire::Type::kStatusRequest:
      peer.send(wire::Type::kStatus, statusJson(ranks_, ledger_, state(),
                                                meshJson(mesh_.status(), mesh_.copies()), now_ns));
      return;
    case wire::Type::kMetricsRequest: peer.send(wire::Type::kMetrics, metrics()); return;
    case wire::Type::kStacksRequest: {
      const auto request = parseStacksRequest(frame.payload);
      if (request.native) {
        readNative(peer, request.ranks[0]);
      } else {
        investigation_.toolAsks(peer, request.ranks, now_ns);
      }
      return;
    }
    default:
      throw InvalidArgument("message type", std::to_string(static_cast<int>(frame.type)),
                            "those of a " + std::string(peer.rank() >= 0 ? "rank" : "tool"));
  }
}

void Dispatch::giveVault(Connection& peer, const VaultGet& wanted) {
  const int number = wanted.rank;
  const std::shared_ptr<const UniqueFd> copy =
      wanted.copy ? mesh_.copyOf(number, wanted.world) : nullptr;
  auto* rank = wanted.copy ? nullptr : ranks_.find(number);
  auto* held = rank == nullptr ? nullptr : rank->vaultOf(wanted.world);
  if (held != nullptr) {
    held->readable(number);  // one that was cut off is given up
  }
  if (copy == nullptr && (held == nullptr || !held->fd)) {
    // Not the peer's fault: the rank may be new, so the connection stays.
    peer.send(wire::Type::kError,
              errorPayload("no " + std::string(wanted.copy ? "copy of the " : "") +
                               "vault of rank " + std::to_string(number) + " is here",
                           ""));
    return;
  }
  // A rank that is started again goes on writing to its own vault. All others only read.
  const int fd = copy == nullptr ? held->fd.get() : copy->get();
  const bool own = peer.rank() == number && copy == nullptr;
  const UniqueFd to_read(
      own ? -1 : ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
  if (!own && !to_read) {
    peer.send(wire::Type::kError,
              errorPayload("cannot open the vault of rank " + std::to_string(number) +
                               " for reading: " + std::strerror(errno),
                           ""));
    return;
  }
  peer.send(wire::Type::kVaultFd, dumpJson({{"rank", number}, {"bytes", fileBytes(fd)}}),
            own ? fd : to_read.get());
}

void Dispatch::readNative(Connection& peer, int number) {
  const auto* rank = ranks_.find(number);
  const int pid = rank == nullptr ? 0 : RankTable::readablePid(*rank);
  if (pid == 0) {
    peer.send(wire::Type::kStacks,
              dumpJson({{"error", rank == nullptr ? "not a rank of this node"
                                  : rank->live()  ? "its process is in another PID namespace"
                                                  : "it has ended"}}));
  } else {
    native_readers_.start(peer.id(), pid);
  }
}

void Dispatch::sendNativeStacks() {
  for (const auto& [requester, answer] : native_readers_.finished()) {
    auto* const peer = connections_.find(requester);
    RankState* dying = nullptr;  // its connection may have ended since
    for (auto& [number, rank] : ranks_.all()) {
      if (rank.frames == FaultFrames::kUnderWay && rank.frames_reader == requester) {
        dying = &rank;
      }
    }
    if (dying == nullptr) {
      if (peer != nullptr) {
        peer->send(wire::Type::kStacks, answer);
      }
      continue;
    }
    dying->frames = FaultFrames::kRead;
    if (dying->ending.fault) {
      addNativeFrames(*dying->ending.fault, answer);
      if (peer != nullptr) {
        peer->send(wire::Type::kWordsHeard, framesText(*dying->ending.fault));
      }
    }
  }
}

// A rank that a fault has stopped says so twice, the second time with its stacks. It then waits for
// the native frames, which are read from the first time on.
void Dispatch::hearWords(Connection& peer, RankState& rank, std::string_view payload,
                         int64_t now_ns) {
  addLastWords(rank.ending, payload);
  if (rank.ending.exception || rank.ending.fault) {
    hardware_.investigates(true, now_ns);  // its process takes a moment to end
  }
  if (!rank.ending.fault) {
    return;
  }
  if (const int pid = RankTable::readablePid(rank); rank.frames == FaultFrames::kNone && pid != 0) {
    try {
      native_readers_.start(peer.id(), pid);
      rank.frames = FaultFrames::kUnderWay;
      rank.frames_reader = peer.id();
    } catch (const InvalidArgument& error) {
      logInfo("agent", "no native frames of rank ", rank.hello.rank, ": ", error.what());
      rank.frames = FaultFrames::kRead;
    }
  }
  if (rank.frames != FaultFrames::kUnderWay) {
    peer.send(wire::Type::kWordsHeard, framesText(*rank.ending.fault));
  }
}

const AgentState& Dispatch::state() {
  const auto& investigation = investigation_.investigation();
  state_.hang_reports = investigation.hangReports();
  state_.crash_reports = investigation.crashReports();
  state_.op_disagreements = investigation.opDisagreements();
  state_.disagreements = investigation.disagreements();
  state_.connections = connections_.size();
  return state_;
}

std::string Dispatch::metrics() {
  return metricsText(ranks_, ledger_, state(), hardware_.newest());
}

void Dispatch::act(const std::vector<CommitLedger::Action>& actions) {
  for (const auto& action : actions) {
    if (action.kind == CommitLedger::Action::kBroadcast) {
      gate_.decided(action.key, action.yes);
      if (action.yes) {
        ranks_.dropSetAside();
        mesh_.committed(action.key);
      } else {
        mesh_.aborted(action.key);
      }
    }
    const wire::Ballot ballot{action.key.step,
                              action.key.incarnation,
                              action.cut,
                              action.replicas,
                              static_cast<uint8_t>(action.yes),
                              action.proposal,
                              static_cast<uint8_t>(action.plan_anew),
                              {}};
    const bool of_node = action.kind == CommitLedger::Action::kNodeVote;
    for (auto& [number, rank] : ranks_.all()) {
      const bool meant = of_node                                        ? rank.hello.local_rank == 0
                         : action.kind == CommitLedger::Action::kAnswer ? number == action.rank
                                                                        : true;
      auto* peer = meant && rank.hello.incarnation == action.key.incarnation
                       ? connections_.find(rank.connection)
                       : nullptr;
      if (peer != nullptr) {
        peer->send(of_node ? wire::Type::kNodeVote : wire::Type::kOutcome, ballot);
      }
    }
  }
}

}  // namespace reft::agent

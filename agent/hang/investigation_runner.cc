#include "agent/hang/investigation_runner.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <utility>
#include <variant>

#include "agent/hang/launcher_terminal.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/evidence/oom_kills.h"
#include "hang_detect/evidence/process_state.h"
#include "hang_detect/rank/verdict_notice.h"
#include "intercept/base/log.h"
#include "intercept/link/wire.h"

namespace reft::agent {

namespace {

// Evidence of all nodes together, which passes through one store and one process.
constexpr size_t kMaxGathered = 128u << 20;

}  // namespace

std::string bootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id.size() <= 64 ? id : "";
}

InvestigationRunner::InvestigationRunner(const Investigation::Settings& settings, int directory,
                                         const std::string& path, RankTable& ranks,
                                         Connections& connections, HardwareWatch& hardware,
                                         int wake)
    : settings_(settings),
      reports_(directory, path, {}),
      ranks_(ranks),
      connections_(connections),
      hardware_(hardware),
      investigation_(settings),
      outside_stacks_(wake),
      aborter_(settings.job, ranks, connections) {}

// ---- inputs

void InvestigationRunner::learn() {
  NodeFacts facts = factsOf(ranks_);
  facts.hardware = hardware_.notes();
  facts.sampling = hardware_.sampling();
  facts.gpus = hardware_.hasGpus();
  investigation_.know(std::move(facts));
}

void InvestigationRunner::tick(int64_t now_ns) {
  std::vector<std::pair<const RankState*, OpLogReader>> readers;
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.live()) {
      if (const auto log = opLogOf(rank)) {
        readers.emplace_back(&rank, *log);
      }
    }
  }
  std::vector<Investigation::RankLog> logs;
  for (const auto& [rank, log] : readers) {
    const bool newest = rank->hello.incarnation == ranks_.incarnation() &&
                        log.writerPid() == static_cast<uint32_t>(rank->hello.pid);
    logs.push_back({rank->hello.rank, &log, newest});
  }
  learn();
  investigation_.tick(logs, investigation_.wantsTracers(now_ns) && traced(), now_ns);
  execute(now_ns);
  aborter_.tick(now_ns);
}

void InvestigationRunner::step(int64_t now_ns) {
  for (auto& result : outside_stacks_.finished()) {
    investigation_.readOutside(result.look, result.pid, std::move(result.stacks));
  }
  learn();
  investigation_.advance(now_ns);
  execute(now_ns);
}

void InvestigationRunner::rankJoined(Connection& connection, const RankState& rank) {
  aborter_.joined(connection, rank.hello.incarnation);
}

void InvestigationRunner::rankEnded(RankState& rank, int64_t now_ns) {
  const bool oom = rank.oomKillsSince() > 0;
  if (!rank.said_bye) {
    logWarn("agent", "rank ", rank.hello.rank, " pid ", rank.pid, " is gone without a clean end",
            oom ? "; " : "", oom ? kOomKillText : "", "; its vault is kept");
  }
  learn();
  investigation_.ended(rank.hello.rank, oom, examine(rank, settings_.node, now_ns), now_ns);
  execute(now_ns);
}

void InvestigationRunner::rankVoted(const RankState& rank, int64_t now_ns) {
  learn();
  investigation_.voted(rank.hello.rank);
  execute(now_ns);
}

void InvestigationRunner::stackReply(const RankState& rank, std::string payload) {
  const auto id = parseStackReplyId(payload);
  investigation_.replied(id, rank.hello.rank, std::move(payload));
}

void InvestigationRunner::evidenceRequested(const Connection& connection,
                                            const EvidenceRequest& request, int64_t now_ns) {
  learn();
  investigation_.nodeAsks(connection.id(), request, now_ns);
  execute(now_ns);
}

void InvestigationRunner::gathered(const Connection& connection, Gathered message, int64_t now_ns) {
  investigation_.gathered(connection.id(), std::move(message), now_ns);
}

void InvestigationRunner::toolAsks(const Connection& connection, const std::vector<int>& ranks,
                                   int64_t now_ns) {
  learn();
  investigation_.toolAsks(connection.id(), ranks, now_ns);
  execute(now_ns);
}

// ---- actions

void InvestigationRunner::execute(int64_t now_ns) {
  for (auto actions = investigation_.takeActions(); !actions.empty();
       actions = investigation_.takeActions()) {
    for (const auto& action : actions) {
      std::visit([&](const auto& kind) { execute(kind, now_ns); }, action);
    }
  }
}

void InvestigationRunner::send(uint64_t connection, wire::Type type, std::string_view payload) {
  if (auto* peer = connections_.find(connection)) {
    peer->send(type, payload);
  }
}

void InvestigationRunner::execute(const action::Sample& action, int64_t now_ns) {
  std::vector<ProcessSample> samples;
  for (const int number : action.ranks) {
    if (const auto* rank = ranks_.find(number)) {
      samples.push_back(sampleOf(*rank, action.children));
    }
  }
  investigation_.sampled(action.look, samples, now_ns);
}

void InvestigationRunner::execute(const action::Count&, int64_t now_ns) {
  std::map<int, ProcessCounters> counters;
  for (const auto& [number, rank] : ranks_.all()) {
    if (rank.live()) {
      counters[number] = processCounters(RankTable::readablePid(rank));
    }
  }
  investigation_.counted(counters, now_ns);
}

void InvestigationRunner::execute(const action::ReadHardware& action, int64_t now_ns) {
  hardware_.investigates(action.again, now_ns);
}

void InvestigationRunner::execute(const action::AskForStacks& action, int64_t) {
  const auto request = "{\"id\":" + std::to_string(action.look) + "}";
  for (const auto connection : action.connections) {
    send(connection, wire::Type::kStackRequest, request);
  }
}

void InvestigationRunner::execute(const action::ReadOutside& action, int64_t) {
  outside_stacks_.read(action.look, action.pids);
}

void InvestigationRunner::execute(const action::Examine& action, int64_t now_ns) {
  std::vector<RankEvidence> evidence;
  for (const int number : action.ranks) {
    if (auto* rank = ranks_.find(number)) {
      evidence.push_back(examine(*rank, settings_.node, now_ns));
    }
  }
  investigation_.examined(action.look, std::move(evidence), now_ns);
}

// A rank that can ask other nodes, or answer them.
Connection* InvestigationRunner::carrier() {
  for (auto& [number, rank] : ranks_.all()) {
    if (rank.live() && rank.hello.incarnation == ranks_.incarnation() &&
        rank.hello.local_rank < wire::kEvidenceCarriers &&
        !processIsStopped(RankTable::readablePid(rank))) {
      if (auto* connection = connections_.find(rank.connection)) {
        return connection;
      }
    }
  }
  return nullptr;
}

void InvestigationRunner::execute(const action::AskNodes& action, int64_t now_ns) {
  auto* connection = carrier();
  if (connection != nullptr) {
    connection->send(wire::Type::kGather, gatherPayload(action.look, action.seconds, action.kind));
  }
  if (action.kind == NodeRequest::kEvidence) {
    investigation_.gathering(action.look, connection == nullptr ? 0 : connection->id(), now_ns);
  }
}

void InvestigationRunner::execute(const action::AnswerNode& action, int64_t) {
  const size_t limit =
      std::min(wire::kMaxEvidence, kMaxGathered / static_cast<size_t>(std::max(1, action.nodes)));
  const auto payload = evidencePayload(action.request, settings_.node, action.asked_ns,
                                       settings_.boot, evidenceJson(action.evidence, limit));
  for (const auto connection : action.connections) {
    send(connection, wire::Type::kEvidence, payload);
  }
}

void InvestigationRunner::execute(const action::AnswerTool& action, int64_t) {
  send(action.connection, wire::Type::kStacks, action.json);
}

void InvestigationRunner::execute(const action::WriteReport& action, int64_t now_ns) {
  bool on_disk = false;
  std::string path;
  if (action.quiet) {  // who ended them knows why: no file is to remain
    logInfo("agent", "the ranks were ended from outside:\n", action.finding.screen);
  } else {
    // On disk before ranks are ended for it.
    path =
        reports_.write(action.finding.json, action.finding.text, settings_.abort_on_hang, on_disk);
    logWarn("agent", action.ends ? "crash report written: " : "hang report written: ", path,
            ".txt\n", action.finding.screen);
  }
  investigation_.written(action, path, on_disk, now_ns);
}

void InvestigationRunner::execute(const action::Show& action, int64_t) {
  send(action.connection, wire::Type::kVerdict, verdictNoticeJson(action.text));
}

void InvestigationRunner::execute(const action::ShowAtLauncher& action, int64_t) {
  for (const auto& [number, rank] : ranks_.all()) {
    if (rank.launcher && rank.launcher_pid > 0 && !processEnded(rank.launcher)) {
      if (writeToStderrOf(rank.launcher_pid, rank.launcher, action.text)) {
        investigation_.shown();
        return;
      }
      break;
    }
  }
  send(action.connection, wire::Type::kVerdict, verdictNoticeJson(action.text));
}

void InvestigationRunner::execute(const action::EndLauncher&, int64_t) {
  if (const RankState* rank = ranks_.restartingRank()) {
    logWarn("agent", "ends the launcher, pid ", rank->launcher_pid,
            ": the ranks fail alike again and again");
    ::syscall(SYS_pidfd_send_signal, rank->launcher.get(), SIGTERM, nullptr, 0);
  }
}

void InvestigationRunner::execute(const action::Abort& action, int64_t now_ns) {
  aborter_.abort(action, now_ns);
}

// Whether a debugger or tracer is attached to a rank of this node.
bool InvestigationRunner::traced() {
  return std::any_of(ranks_.all().begin(), ranks_.all().end(), [](const auto& entry) {
    return entry.second.live() && tracerOf(RankTable::readablePid(entry.second)) > 0;
  });
}

}  // namespace reft::agent

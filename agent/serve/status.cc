#include "agent/serve/status.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <sstream>

#include "agent/hang/hang_watch.h"
#include "agent/hang/rank_examiner.h"
#include "agent/serve/hardware_metrics.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/report/verdict_text.h"

namespace reft::agent {

namespace {

using nlohmann::json;

std::string hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string note(const RankStats& stats) {
  const char* end = std::find(stats.note, stats.note + sizeof(stats.note), '\0');
  return {stats.note, end};
}

json slotsJson(const VaultReader& vault) {
  static constexpr std::array<const char*, 3> kNames{"empty", "writing", "sealed"};
  json slots = json::array();
  for (const RawSlot& slot : vault.rawSlots()) {
    slots.push_back({{"state", kNames[std::min<size_t>(static_cast<size_t>(slot.state), 2)]},
                     {"step", slot.step},
                     {"incarnation", hex(slot.incarnation)}});
  }
  return slots;
}

// What a counter means; the others are described by their names.
struct Metric {
  const char* field;
  const char* type;
  const char* help;
};

constexpr Metric kMetrics[] = {
    {"steps", "counter", "Training steps seen."},
    {"captured", "counter", "Snapshots begun."},
    {"sealed", "counter", "Snapshots sealed in the vault."},
    {"dropped", "counter", "Snapshots given up after they were begun."},
    {"moved", "counter",
     "Snapshots given up because the script moved or freed memory that was yet to be copied."},
    {"skipped", "counter", "Snapshots not begun because no slot was free."},
    {"sealed_step", "gauge", "Newest step sealed by this rank."},
    {"committed_step", "gauge", "Newest step that every rank sealed."},
    {"restored_step", "gauge", "Step that this incarnation was restored from."},
    {"restored_memory_bytes", "gauge",
     "Bytes of that restore that this rank read from vaults in memory, for itself and others."},
    {"restored_storage_bytes", "gauge", "The same, from vaults that are files on a disk."},
    {"restored_received_bytes", "gauge", "Bytes of that restore that came from other nodes."},
    {"bytes_copied", "counter", "Bytes copied into the vault."},
    {"at_once_copied_bytes", "counter", "Bytes copied before the optimizer step returned."},
    {"gap_copied_bytes", "counter", "Bytes copied while the rank waited for others."},
    {"compute_copied_bytes", "counter", "Bytes copied while the rank computed."},
    {"communication_copied_bytes", "counter", "Bytes copied while a collective was in flight."},
    {"gate_copied_bytes", "counter", "Bytes copied while training waited for them."},
    {"op_events_lost", "counter", "Events of ops that the copy thread missed: the ring was full."},
    {"every", "gauge", "Steps from one snapshot to the next."},
    {"overhead_ppm", "gauge",
     "What snapshots add to the mean step, in millionths of it, measured by control steps; absent: "
     "not known yet."},
    {"overhead_noise_ppm", "gauge", "Twice the standard error of overhead_ppm."},
    {"forecast_error_ppm", "gauge",
     "Median error of the newest predicted gaps, in millionths of their length."},
    {"forecast_last_ppm", "gauge",
     "Error of the predicted gaps of the newest step, weighted by their length."},
    {"foretold_gap_ns", "gauge", "Gap time of the newest step that was predicted."},
    {"unforetold_gap_ns", "gauge", "Gap time of the newest step that was not predicted."},
    {"forecast_steps", "counter", "Steps whose gaps were compared with the prediction."},
    {"device_gate_ns", "counter",
     "Time that a CUDA device waited for copies before the optimizer."},
    {"device_gate_last_ns", "gauge", "The same, of the newest step that is known."},
    {"on_device", "gauge", "1: state lies on CUDA devices."},
    {"recomputing_step", "gauge", "Step that a verified resume computes again just now; 0: none."},
    {"resume_verdict", "gauge",
     "What the verified resume of this attempt found. 0: there was none. 1: the step that was "
     "computed again is bit-identical. 2: it differs."},
    {"unprotected", "gauge", "1: training progresses and nothing is committed."},
    {"errors", "counter", "Failures of snapshots."},
    {"pid", "gauge", "Process id of the rank."},
    {"attempt", "gauge", "How often the launcher restarted the ranks."},
    {"payload_bytes", "gauge", "Bytes of one snapshot of this rank."},
    {"slot_bytes", "gauge", "Bytes of the vault's slots."},
    {"state_bytes", "gauge", "Bytes of the training state of this rank."},
};

std::string label(const std::string& value) {
  std::string result;
  for (const char c : value) {
    if (c == '\\' || c == '"') {
      result += '\\';
    }
    result += c;
  }
  return result;
}

}  // namespace

std::string dumpJson(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string statusJson(RankTable& ranks, const CommitLedger& ledger, const AgentState& agent,
                       const json& mesh, int64_t now_ns) {
  json result{{"job", agent.job},
              {"node", agent.node},
              {"agent_pid", ::getpid()},
              {"version", kAgentVersion},
              {"uptime_sec", static_cast<double>(now_ns - agent.started_ns) / 1e9},
              {"world", ranks.world()},
              {"mesh", mesh},
              {"newest_committed", nullptr},
              {"open_votes", json::array()},
              {"ranks", json::array()}};
  result["agent"] = {{"committed", ledger.counters().committed},
                     {"aborted", ledger.counters().aborted},
                     {"repeated_votes", ledger.counters().repeated},
                     {"inferred_votes", ledger.counters().inferred},
                     {"inconsistent_cuts", ledger.counters().inconsistent},
                     {"hang_reports", agent.hang_reports},
                     {"crash_reports", agent.crash_reports},
                     {"op_disagreements", agent.op_disagreements},
                     {"refused_peers", agent.refused_peers},
                     {"connections", agent.connections},
                     {"ticks", agent.ticks}};
  result["disagreements"] = json::array();
  for (const auto& found : agent.disagreements) {
    result["disagreements"].push_back(disagreementFields(found));
  }
  if (const auto newest = ledger.newestCommitted()) {
    result["newest_committed"] = {{"step", newest->step},
                                  {"incarnation", hex(newest->incarnation)}};
  }
  for (const auto& [key, votes] : ledger.open()) {
    result["open_votes"].push_back(
        {{"step", key.step}, {"incarnation", hex(key.incarnation)}, {"votes", votes}});
  }
  for (auto& [number, rank] : ranks.all()) {
    json entry{{"rank", number},
               {"pid", rank.pid},
               {"alive", rank.alive},
               {"connected", rank.connection != 0},
               {"said_bye", rank.said_bye},
               {"incarnation", hex(rank.hello.incarnation)},
               {"attempt", rank.hello.attempt},
               {"vault", nullptr},
               {"op_log", nullptr},
               {"notes", rank.notes},
               {"stats", json::object()}};
    if (const auto* vault = rank.readable()) {
      entry["vault"] = {
          {"bytes", vault->bytes()}, {"path", rank.vault.path}, {"slots", slotsJson(*vault)}};
      if (const auto log = opLogOf(rank)) {
        const auto progress = progressOf(*log);
        entry["op_log"] = {
            {"ops", progress.ops},
            {"heartbeat_age_sec",
             progress.heartbeat_ns == 0
                 ? -1.0
                 : static_cast<double>(now_ns - static_cast<int64_t>(progress.heartbeat_ns)) / 1e9},
            {"pending", progress.pending}};
      }
      const auto& stats = vault->stats();
      // -1: never set, or unknown; noise may make the overhead negative.
#define REFT_STATS_JSON(name) \
  entry["stats"][#name] = static_cast<int64_t>(stats.name.load(std::memory_order_relaxed));
      REFT_RANK_STATS(REFT_STATS_JSON)
#undef REFT_STATS_JSON
      entry["stats"]["note"] = note(stats);
    }
    result["ranks"].push_back(std::move(entry));
  }
  return dumpJson(result);
}

std::string fetchedJson(const Mesh::Fetched& fetched) {
  return dumpJson({{"ranks", fetched.ranks}, {"problem", fetched.problem}});
}

json meshJson(const Mesh::Status& mesh, const std::vector<Mesh::Copy>& copies) {
  if (mesh.port == 0) {
    return nullptr;
  }
  json ranks = json::array();
  for (const Mesh::Copy& copy : copies) {
    ranks.push_back(copy.rank);
  }
  return {{"port", mesh.port},
          {"tls", mesh.tls},
          {"keepers", mesh.keepers},
          {"sources", mesh.sources},
          {"connected", mesh.connected},
          {"sent_bytes", mesh.sent_bytes},
          {"taken_bytes", mesh.taken_bytes},
          {"refused", mesh.refused},
          {"problem", mesh.problem},
          {"copies", ranks}};
}

std::string inventoryJson(RankTable& ranks, const std::vector<Mesh::Copy>& copies, int world) {
  json vaults = json::array();
  for (auto& [number, rank] : ranks.all()) {
    for (HeldVault* const held : world == 0 ? std::vector{&rank.vault} : rank.vaults()) {
      const auto* vault = held->refused_by.contains(world) ? nullptr : held->readable(number);
      if (vault != nullptr) {
        vaults.push_back({{"rank", number},
                          {"world", vault->identity().world},
                          {"bytes", vault->bytes()},
                          {"path", held->path},
                          {"live", rank.live()},
                          {"copy", false},
                          {"slots", slotsJson(*vault)}});
      }
    }
  }
  for (const Mesh::Copy& copy : copies) {
    if (world == 0) {
      break;
    }
    const VaultReader vault(copy.vault->get());
    vaults.push_back({{"rank", copy.rank},
                      {"world", copy.world},
                      {"bytes", vault.bytes()},
                      {"path", ""},
                      {"live", false},
                      {"copy", true},
                      {"slots", slotsJson(vault)}});
  }
  return dumpJson({{"vaults", vaults}});
}

std::string metricsText(RankTable& ranks, const CommitLedger& ledger, const AgentState& agent,
                        const HardwareSample* hardware) {
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::max_digits10);  // a machine that is up for weeks still
                                                             // counts microseconds
  const auto node = "job=\"" + label(agent.job) + "\",node=\"" + std::to_string(agent.node) + "\"";
  const auto sample = [&](const char* name, const char* type, const char* help, uint64_t value) {
    out << "# HELP reft_agent_" << name << ' ' << help << "\n# TYPE reft_agent_" << name << ' '
        << type << "\nreft_agent_" << name << '{' << node << "} " << value << '\n';
  };
  sample("commits_total", "counter", "Snapshots that every rank sealed.",
         ledger.counters().committed);
  sample("aborts_total", "counter", "Snapshots that some rank dropped.", ledger.counters().aborted);
  sample("hang_reports_total", "counter", "Hang reports written.", agent.hang_reports);
  sample("crash_reports_total", "counter", "Reports on ranks that failed.", agent.crash_reports);
  sample("op_disagreements_total", "counter",
         "Collectives that ranks of the node called differently.", agent.op_disagreements);
  sample("refused_peers_total", "counter",
         "Connections refused, or closed because of an invalid message.", agent.refused_peers);
  sample("connections", "gauge", "Open connections.", agent.connections);
  if (hardware != nullptr) {
    out << hardwareMetrics(*hardware, node);
  }

  struct Sample {
    int rank;
    uint64_t value;
  };
  std::vector<std::pair<std::string, std::vector<Sample>>> fields;
#define REFT_STATS_SERIES(name) fields.push_back({#name, {}});
  REFT_RANK_STATS(REFT_STATS_SERIES)
#undef REFT_STATS_SERIES
  out << "# HELP reft_rank_alive 1: the process of the rank exists.\n# TYPE reft_rank_alive "
         "gauge\n";
  for (auto& [number, rank] : ranks.all()) {
    out << "reft_rank_alive{" << node << ",rank=\"" << number << "\"} " << (rank.live() ? 1 : 0)
        << '\n';
    if (const auto* vault = rank.readable()) {
      const auto& stats = vault->stats();
      size_t index = 0;
#define REFT_STATS_SAMPLE(name) \
  fields[index++].second.push_back({number, stats.name.load(std::memory_order_relaxed)});
      REFT_RANK_STATS(REFT_STATS_SAMPLE)
#undef REFT_STATS_SAMPLE
    }
  }
  for (const auto& [field, samples] : fields) {
    if (field == "incarnation") {
      continue;  // an identity, not a quantity
    }
    const bool time = field.size() > 3 && field.compare(field.size() - 3, 3, "_ns") == 0;
    const auto* known = std::find_if(std::begin(kMetrics), std::end(kMetrics),
                                     [&f = field](const Metric& m) { return f == m.field; });
    const bool described = known != std::end(kMetrics);
    const std::string type = described ? known->type : "gauge";
    std::string name =
        "reft_rank_" + (time ? field.substr(0, field.size() - 3) + "_seconds" : field);
    if (type == "counter") {
      name += "_total";
    }
    out << "# HELP " << name << ' '
        << (described ? std::string(known->help)
                      : "Counter " + field + " of the rank, see snapshot/vault/FORMAT.md.")
        << "\n# TYPE " << name << ' ' << type << '\n';
    for (const auto& sample : samples) {
      if (sample.value == UINT64_MAX) {
        continue;  // never set, or unknown
      }
      out << name << '{' << node << ",rank=\"" << sample.rank << "\"} ";
      if (time) {
        out << static_cast<double>(sample.value) / 1e9 << '\n';
      } else if (field == "overhead_ppm") {
        out << static_cast<int64_t>(sample.value) << '\n';  // noise may make it negative
      } else {
        out << sample.value << '\n';
      }
    }
  }
  return out.str();
}

}  // namespace reft::agent

// What the agent reports to people and machines: status JSON and Prometheus text.
//
// Status:
//   {"job", "node", "agent_pid", "version", "uptime_sec", "world",
//    "agent": {"committed", "aborted", "repeated_votes", "inferred_votes", "inconsistent_cuts",
//              "hang_reports", "crash_reports", "op_disagreements", "refused_peers", "connections",
//              "ticks"},
//    "disagreements": as in hang reports; of ops, the first of a group,
//    "mesh": {"port", "tls", "keepers", "sources", "connected", "sent_bytes", "taken_bytes",
//             "refused", "problem", "copies": [rank]} or null,
//    "newest_committed": {"step", "incarnation"} or null,
//    "open_votes": [{"step", "incarnation", "votes"}],
//    "ranks": [{"rank", "pid", "alive", "connected", "said_bye", "incarnation", "attempt",
//               "vault": {"bytes", "path", "slots": [{"state", "step", "incarnation"}]} or null,
//               "op_log": {"ops", "heartbeat_age_sec", "pending"} or null,
//               "notes": [[about, where, kind, why]],
//               "stats": {every counter of RankStats, "note"}}]}
// "stats" is {} without a vault. Incarnations are hexadecimal strings; steps that were never set
// are 2^64-1.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "agent/mesh/mesh.h"
#include "agent/peers/rank_table.h"
#include "hang_detect/evidence/hardware_sample.h"
#include "hang_detect/verdict/verdict.h"
#include "snapshot/commit/commit_ledger.h"

namespace reft::agent {

constexpr const char* kAgentVersion = REFT_VERSION;  // declared in pyproject.toml

struct AgentState {
  std::string job;
  int node = 0;
  uint64_t hang_reports = 0;
  uint64_t crash_reports = 0;
  uint64_t op_disagreements = 0;
  std::vector<Disagreement> disagreements;  // the first ones of the newest incarnation
  uint64_t refused_peers = 0;
  uint64_t connections = 0;
  int64_t started_ns = 0;
  uint64_t ticks = 0;  // of the agent's timer
};

std::string fetchedJson(const Mesh::Fetched& fetched);
// `mesh`: from meshJson().
std::string statusJson(RankTable& ranks, const CommitLedger& ledger, const AgentState& agent,
                       const nlohmann::json& mesh, int64_t now_ns);
nlohmann::json meshJson(const Mesh::Status& mesh, const std::vector<Mesh::Copy>& copies);
// `world`: see parseVaultList().
std::string inventoryJson(RankTable& ranks, const std::vector<Mesh::Copy>& copies, int world);
// `hardware`: nullptr if no sample is there.
std::string metricsText(RankTable& ranks, const CommitLedger& ledger, const AgentState& agent,
                        const HardwareSample* hardware);

std::string dumpJson(const nlohmann::json& value);  // never throws on text that is not UTF-8

}  // namespace reft::agent

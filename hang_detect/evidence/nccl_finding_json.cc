#include "hang_detect/evidence/nccl_finding_json.h"

#include <algorithm>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/json_fields.h"

namespace reft {

namespace {

using json_fields::each;
using json_fields::flag;
using json_fields::number;
using json_fields::text;
using nlohmann::json;

constexpr size_t kMaxFindings = 64;
constexpr size_t kMaxEdges = 256;
constexpr size_t kMaxNames = 256;
constexpr size_t kMaxText = 128;

json edgeFields(const NcclEdge& edge) {
  return {{"peer", edge.peer},
          {"channel", edge.channel},
          {"send", edge.send},
          {"room", edge.room},
          {"cause", static_cast<int>(edge.cause)},
          {"done", edge.done},
          {"steps", edge.steps},
          {"quiet_ns", edge.quiet_ns}};
}

NcclEdge edgeFrom(const json& fields) {
  NcclEdge edge;
  edge.peer = number<int>(fields, "peer", -1);
  edge.channel = number<int>(fields, "channel", 0);
  edge.send = flag(fields, "send");
  edge.room = flag(fields, "room");
  const auto cause = number<uint8_t>(fields, "cause", 0);
  edge.cause = cause <= static_cast<uint8_t>(NcclCause::kProxyBegins)
                   ? static_cast<NcclCause>(cause)
                   : NcclCause::kUnknown;
  edge.done = number<uint32_t>(fields, "done", 0);
  edge.steps = number<uint32_t>(fields, "steps", 0);
  edge.quiet_ns = number<int64_t>(fields, "quiet_ns", 0);
  return edge;
}

json nameFields(const NcclOpName& name) {
  return {{"func", name.func}, {"seq", name.seq}};
}

NcclOpName nameFrom(const json& fields) {
  return {text(fields, "func", kMaxText), number<uint64_t>(fields, "seq", 0)};
}

json namesFields(const std::vector<NcclOpName>& names) {
  json list = json::array();
  for (const NcclOpName& name : names) {
    list.push_back(nameFields(name));
  }
  return list;
}

std::vector<NcclOpName> namesFrom(const json& fields, const char* key) {
  std::vector<NcclOpName> names;
  each(fields, key, [&](const json& name) {
    if (names.size() < kMaxNames) {
      names.push_back(nameFrom(name));
    }
  });
  return names;
}

json findingFields(const NcclFinding& finding) {
  json edges = json::array();
  for (size_t i = 0; i < finding.edges.size() && i < kMaxEdges; ++i) {
    edges.push_back(edgeFields(finding.edges[i]));
  }
  return {{"comm", finding.comm},
          {"name", finding.name},
          {"rank", finding.rank},
          {"ranks", finding.ranks},
          {"nodes", finding.nodes},
          {"proxy", static_cast<int>(finding.proxy)},
          {"complete", finding.complete && finding.edges.size() <= kMaxEdges},
          {"advancing", finding.advancing},
          {"quiet_ns", finding.quiet_ns},
          {"in_op", finding.in_op},
          {"p2p", finding.p2p},
          {"op", nameFields(finding.op)},
          {"algo", finding.algo},
          {"never_taken", finding.never_taken},
          {"kernels", finding.kernels},
          {"kernels_begun", finding.kernels_begun},
          {"sends_begun", finding.sends_begun},
          {"sends_done", finding.sends_done},
          {"recvs_begun", finding.recvs_begun},
          {"recvs_done", finding.recvs_done},
          {"busy_before", finding.busy_before},
          {"busy_elsewhere", finding.busy_elsewhere},
          {"edges", std::move(edges)},
          {"passed", namesFields(finding.passed)},
          {"queued", namesFields(finding.queued)}};
}

NcclFinding findingFrom(const json& fields) {
  NcclFinding finding;
  finding.comm = number<uint64_t>(fields, "comm", 0);
  finding.name = text(fields, "name", kMaxText);
  finding.rank = number<int>(fields, "rank", -1);
  finding.ranks = number<int>(fields, "ranks", 0);
  finding.nodes = number<int>(fields, "nodes", 0);
  const auto proxy = number<uint8_t>(fields, "proxy", 0);
  finding.proxy = proxy <= static_cast<uint8_t>(NcclProxy::kStuck) ? static_cast<NcclProxy>(proxy)
                                                                   : NcclProxy::kUnknown;
  finding.complete = flag(fields, "complete");
  finding.advancing = flag(fields, "advancing");
  finding.quiet_ns = number<int64_t>(fields, "quiet_ns", 0);
  finding.in_op = flag(fields, "in_op");
  finding.p2p = flag(fields, "p2p");
  if (const auto op = fields.find("op"); op != fields.end() && op->is_object()) {
    finding.op = nameFrom(*op);
  }
  finding.algo = text(fields, "algo", kMaxText);
  finding.never_taken = flag(fields, "never_taken");
  finding.kernels = flag(fields, "kernels");
  finding.kernels_begun = number<uint64_t>(fields, "kernels_begun", 0);
  finding.sends_begun = number<uint64_t>(fields, "sends_begun", 0);
  finding.sends_done = number<uint64_t>(fields, "sends_done", 0);
  finding.recvs_begun = number<uint64_t>(fields, "recvs_begun", 0);
  finding.recvs_done = number<uint64_t>(fields, "recvs_done", 0);
  finding.busy_before = flag(fields, "busy_before");
  finding.busy_elsewhere = flag(fields, "busy_elsewhere");
  each(fields, "edges", [&](const json& edge) {
    if (finding.edges.size() < kMaxEdges) {
      finding.edges.push_back(edgeFrom(edge));
    } else {
      finding.complete = false;
    }
  });
  finding.passed = namesFrom(fields, "passed");
  finding.queued = namesFrom(fields, "queued");
  return finding;
}

}  // namespace

json ncclFields(const std::vector<NcclFinding>& findings) {
  json list = json::array();
  for (size_t i = 0; i < findings.size() && i < kMaxFindings; ++i) {
    list.push_back(findingFields(findings[i]));
  }
  return list;
}

std::vector<NcclFinding> ncclFindingsFrom(const json& fields) {
  std::vector<NcclFinding> findings;
  each(json{{"nccl", fields}}, "nccl", [&](const json& finding) {
    if (findings.size() < kMaxFindings) {
      findings.push_back(findingFrom(finding));
    }
  });
  return findings;
}

}  // namespace reft

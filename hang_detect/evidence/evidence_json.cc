#include "hang_detect/evidence/evidence_json.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/json_fields.h"
#include "hang_detect/evidence/nccl_finding_json.h"
#include "hang_detect/evidence/words.h"
#include "intercept/base/json.h"

namespace reft {

namespace {

using json_fields::each;
using json_fields::flag;
using json_fields::number;
using json_fields::text;
using nlohmann::json;

constexpr size_t kMaxRanks = 1u << 20;
constexpr size_t kMaxAddress = 64;
constexpr size_t kMaxOps = 1u << 10;  // of a rank, in each of its two lists

OpEntry opOf(const json& entry) {
  OpEntry op;
  op.ticket = number<uint64_t>(entry, "ticket", 0);
  op.begin_ns = number<uint64_t>(entry, "begin_ns", 0);
  op.enqueued_ns = number<uint64_t>(entry, "enqueued_ns", 0);
  op.wait_begin_ns = number<uint64_t>(entry, "wait_begin_ns", 0);
  op.wait_end_ns = number<uint64_t>(entry, "wait_end_ns", 0);
  op.done_ns = number<uint64_t>(entry, "done_ns", 0);
  op.bytes = number<uint64_t>(entry, "bytes", 0);
  op.signature = number<uint64_t>(entry, "signature", 0);
  op.group = number<uint32_t>(entry, "group_index", UINT32_MAX);
  op.seq = number<uint32_t>(entry, "seq", 0);
  op.call_site = number<uint32_t>(entry, "call_site_id", 0);
  op.tag = number<uint32_t>(entry, "tag", 0);
  op.peer = number<int32_t>(entry, "peer", -1);
  op.kind = static_cast<OpKind>(number<uint8_t>(entry, "kind", 0));
  op.dtype = number<uint8_t>(entry, "dtype", 255);
  op.reduce_op = number<uint8_t>(entry, "reduce_op", 255);
  op.failed = flag(entry, "failed");
  op.reach_asked = flag(entry, "reach_asked");
  op.reached = flag(entry, "reached");
  op.pass_asked = flag(entry, "pass_asked");
  op.passed = flag(entry, "passed");
  op.end_seen = flag(entry, "end_seen");
  op.passed_within_sec = number<double>(entry, "passed_within_sec", 0);
  return op;
}

// {"ops": [[kind, group, peer, tag, call site], …], "order": [0, 1, 0, …]}: the same few ops come
// again and again.
json pastFields(const std::vector<PastOp>& past) {
  std::vector<PastOp> ops;
  json order = json::array();
  for (const PastOp& op : past) {
    const auto at = std::find(ops.begin(), ops.end(), op);
    order.push_back(at - ops.begin());
    if (at == ops.end()) {
      ops.push_back(op);
    }
  }
  json written = json::array();
  for (const PastOp& op : ops) {
    written.push_back({static_cast<int>(op.kind), op.group, op.peer, op.tag, op.call_site});
  }
  return {{"ops", std::move(written)}, {"order", std::move(order)}};
}

std::vector<PastOp> pastFrom(const json& entry) {
  std::vector<PastOp> ops, past;
  const auto found = entry.find("past");
  if (found == entry.end() || !found->is_object()) {
    return past;
  }
  const auto list = [&](const char* name) {
    const auto at = found->find(name);
    return at != found->end() && at->is_array() ? *at : json::array();
  };
  for (const json& op : list("ops")) {
    if (ops.size() >= kMaxOps || !op.is_array() || op.size() != 5) {
      return past;
    }
    const json fields = {
        {"kind", op[0]}, {"group", op[1]}, {"peer", op[2]}, {"tag", op[3]}, {"site", op[4]}};
    ops.push_back({static_cast<OpKind>(number<uint8_t>(fields, "kind", 0)),
                   number<uint32_t>(fields, "group", UINT32_MAX),
                   number<int32_t>(fields, "peer", -1), number<uint32_t>(fields, "tag", 0),
                   number<uint32_t>(fields, "site", 0)});
  }
  for (const json& index : list("order")) {
    const auto at = number<size_t>(json{{"at", index}}, "at", SIZE_MAX);
    if (at >= ops.size() || past.size() >= kMaxOps) {
      return {};
    }
    past.push_back(ops[at]);
  }
  return past;
}

RankEvidence rankOf(const json& entry) {
  RankEvidence rank;
  rank.rank = number<int>(entry, "rank", -1);
  rank.node = number<int>(entry, "node", 0);
  rank.pid = number<int>(entry, "pid", 0);
  rank.host = text(entry, "host");
  rank.alive = flag(entry, "alive");
  rank.answered = flag(entry, "answered");
  rank.proc_state = text(entry, "proc_state");
  rank.ops_begun = number<uint64_t>(entry, "ops_begun", 0);
  rank.heartbeat_age_ns = number<uint64_t>(entry, "heartbeat_age_ns", 0);
  each(entry, "callers", [&](const json& caller) {
    rank.callers.push_back({number<uint64_t>(caller, "thread_id", 0), text(caller, "state"),
                            text(caller, "wait_channel")});
  });
  rank.stacks = text(entry, "stacks_text");
  rank.committed_step = number<int64_t>(entry, "committed_step", -1);
  rank.said_bye = flag(entry, "said_bye");
  rank.gone_ns = number<int64_t>(entry, "gone_ns", 0);
  rank.oom_kills = number<int64_t>(entry, "oom_kills", -1);
  if (const auto ending = entry.find("ending"); ending != entry.end()) {
    rank.ending = endingOf(*ending);
  }
  rank.tracer_pid = number<int>(entry, "tracer_pid", 0);
  rank.wait_channel = text(entry, "wait_channel");
  rank.cpu_share = number<double>(entry, "cpu_share", -1);
  rank.children_cpu_share = number<double>(entry, "children_cpu_share", -1);
  rank.io_bytes = number<int64_t>(entry, "io_bytes", -1);
  rank.running_threads = number<int>(entry, "running_threads", 0);
  rank.running_children = number<int>(entry, "running_children", 0);
  rank.error = text(entry, "error");
  each(entry, "children", [&](const json& child) {
    rank.children.push_back({number<int>(child, "pid", 0), text(child, "state"),
                             text(child, "name"), text(child, "stacks_text"),
                             text(child, "error")});
  });
  if (const auto driver = entry.find("driver"); driver != entry.end()) {
    rank.driver = driverUseFrom(*driver);
  }
  if (const auto nccl = entry.find("nccl"); nccl != entry.end()) {
    rank.nccl = ncclFindingsFrom(*nccl);
  }
  each(entry, "dead_connections", [&](const json& dead) {
    rank.connections.dead.push_back(
        {text(dead, "local", kMaxAddress), text(dead, "peer", kMaxAddress),
         number<int64_t>(dead, "unacknowledged", 0), number<int>(dead, "resent", 0)});
  });
  if (const auto own = entry.find("addresses"); own != entry.end() && own->is_array()) {
    for (const json& address : *own) {
      if (address.is_string() && rank.connections.addresses.size() < kMaxOps) {
        rank.connections.addresses.push_back(
            address.get_ref<const std::string&>().substr(0, kMaxAddress));
      }
    }
  }
  each(entry, "groups", [&](const json& group) {
    OpGroup read{};
    const std::string name = text(group, "name");
    std::memcpy(read.name, name.data(), std::min(name.size(), OpGroup::kNameBytes - 1));
    read.rank = number<int32_t>(group, "rank", -1);
    read.size = number<int32_t>(group, "size", 0);
    rank.groups.push_back(read);
  });
  each(entry, "tail", [&](const json& op) {
    if (rank.tail.size() < kMaxOps) {
      rank.tail.push_back(opOf(op));
    }
  });
  rank.past = pastFrom(entry);
  if (const auto sites = entry.find("call_sites"); sites != entry.end() && sites->is_object()) {
    for (const auto& [id, site] : sites->items()) {
      uint32_t value = 0;
      const auto [end, problem] = std::from_chars(id.data(), id.data() + id.size(), value);
      if (problem == std::errc() && end == id.data() + id.size() && site.is_string()) {
        rank.call_sites.emplace(value, site.get<std::string>());
      }
    }
  }
  return rank;
}

// Lines of the main thread, of those that call ops and of who holds the GIL, and which ones they
// are.
std::string importantThreadsOf(const RankEvidence& rank) {
  const std::string& stacks = rank.stacks.text();
  constexpr size_t kFrames = 64;
  constexpr size_t kMaxGils = 16;
  constexpr std::string_view kMain = "Main thread ";
  const size_t at = stacks.rfind(kMain);
  const std::string main =
      at == std::string::npos ? "" : stacks.substr(at, stacks.find('\n', at) - at);
  std::vector<std::string> ids = {main.empty() ? "Current thread "
                                               : "hread " + main.substr(kMain.size()) + " "};
  for (const CallingThread& caller : rank.callers) {
    char id[32];
    std::snprintf(id, sizeof(id), "hread 0x%016" PRIx64 " ", OpThread::handleOf(caller.thread));
    ids.emplace_back(id);
  }
  const size_t most_ids = ids.size() + kMaxGils;
  std::string gils;
  constexpr std::string_view kGil = "GIL held by ";
  for (size_t from = 0; ids.size() < most_ids &&
                        (from = stacks.find("\n" + std::string(kGil), from)) != stacks.npos;) {
    const size_t begin = ++from, end = std::min(stacks.find('\n', begin), begin + 128);
    const std::string line = stacks.substr(begin, end - begin);
    ids.push_back("hread " + line.substr(kGil.size(), line.find(',') - kGil.size()) + " ");
    gils += line + "\n";
  }
  std::string result;
  size_t kept = 0;
  for (size_t begin = 0; begin < stacks.size();) {
    const size_t end = std::min(stacks.find('\n', begin), stacks.size());
    const std::string_view line = std::string_view(stacks).substr(begin, end - begin);
    if (line.substr(0, 2) != "  ") {
      const auto isIn = [line](const std::string& id) {
        return line.find(id) != std::string_view::npos;
      };
      kept = std::any_of(ids.begin(), ids.end(), isIn) ? kFrames : 0;
    }
    if (kept > 0) {
      --kept;
      result.append(line.substr(0, 512)).push_back('\n');
    }
    begin = end + 1;
  }
  result += gils;
  return main.empty() ? result : result + main + "\n";
}

json withRanks(const HangEvidence& evidence) {
  json result = evidenceFields(evidence);
  json& ranks = result["ranks"] = json::array();
  for (const RankEvidence& rank : evidence.ranks) {
    json& entry = ranks.emplace_back(evidenceFields(rank));
    json& tail = entry["tail"] = json::array();
    for (const OpEntry& op : rank.tail) {
      tail.push_back(evidenceFields(op));
    }
  }
  return result;
}

}  // namespace

json evidenceFields(const OpEntry& op) {
  json fields{{"seq", op.seq},
              {"peer", op.peer},
              {"tag", op.tag},
              {"bytes", op.bytes},
              {"begin_ns", op.begin_ns},
              {"enqueued_ns", op.enqueued_ns},
              {"wait_begin_ns", op.wait_begin_ns},
              {"wait_end_ns", op.wait_end_ns},
              {"done_ns", op.done_ns},
              {"signature", op.signature},
              {"ticket", op.ticket},
              {"kind", static_cast<int>(op.kind)},
              {"group_index", op.group},
              {"call_site_id", op.call_site},
              {"dtype", op.dtype},
              {"reduce_op", op.reduce_op},
              {"failed", op.failed}};
  // Of ops on devices only: others would have five zeros each.
  for (const auto& [name, set] : {std::pair{"reach_asked", op.reach_asked},
                                  {"reached", op.reached},
                                  {"pass_asked", op.pass_asked},
                                  {"passed", op.passed},
                                  {"end_seen", op.end_seen}}) {
    if (set) {
      fields[name] = true;
    }
  }
  if (op.passed_within_sec > 0) {
    fields["passed_within_sec"] = op.passed_within_sec;
  }
  return fields;
}

json evidenceFields(const RankEvidence& rank) {
  json groups = json::array();
  for (const OpGroup& group : rank.groups) {
    groups.push_back(
        {{"name", words::groupName(group)}, {"rank", group.rank}, {"size", group.size}});
  }
  json callers = json::array();
  for (const CallingThread& caller : rank.callers) {
    callers.push_back({{"thread_id", caller.thread},
                       {"state", caller.state},
                       {"wait_channel", caller.wait_channel}});
  }
  json children = json::array();
  for (const ChildProcess& child : rank.children) {
    children.push_back({{"pid", child.pid},
                        {"state", child.state},
                        {"name", child.name},
                        {"stacks_text", child.stacks.text()},
                        {"error", child.error}});
  }
  json dead = json::array();
  for (const DeadConnection& connection : rank.connections.dead) {
    dead.push_back({{"local", connection.local},
                    {"peer", connection.peer},
                    {"unacknowledged", connection.unacknowledged},
                    {"resent", connection.resent}});
  }
  json call_sites = json::object();
  for (const auto& [id, site] : rank.call_sites) {
    call_sites[std::to_string(id)] = site;
  }
  return {{"rank", rank.rank},
          {"node", rank.node},
          {"pid", rank.pid},
          {"host", rank.host},
          {"alive", rank.alive},
          {"answered", rank.answered},
          {"proc_state", rank.proc_state},
          {"callers", std::move(callers)},
          {"committed_step", rank.committed_step},
          {"ops_begun", rank.ops_begun},
          {"heartbeat_age_ns", rank.heartbeat_age_ns},
          {"said_bye", rank.said_bye},
          {"gone_ns", rank.gone_ns},
          {"oom_kills", rank.oom_kills},
          {"ending", endingFields(rank.ending)},
          {"tracer_pid", rank.tracer_pid},
          {"wait_channel", rank.wait_channel},
          {"cpu_share", rank.cpu_share},
          {"children_cpu_share", rank.children_cpu_share},
          {"io_bytes", rank.io_bytes},
          {"running_threads", rank.running_threads},
          {"running_children", rank.running_children},
          {"children", std::move(children)},
          {"groups", std::move(groups)},
          {"addresses", rank.connections.addresses},
          {"dead_connections", std::move(dead)},
          {"driver", driverUseFields(rank.driver)},
          {"nccl", ncclFields(rank.nccl)},
          {"past", pastFields(rank.past)},
          {"call_sites", std::move(call_sites)},
          {"stacks_text", rank.stacks.text()},
          {"error", rank.error}};
}

json evidenceFields(const HangEvidence& evidence) {
  return {{"report", "hang"},
          {"version", kVerdictVersion},
          {"job", evidence.job},
          {"node", evidence.node},
          {"nodes", evidence.nodes},
          {"silent_nodes", evidence.silent_nodes},
          {"nodes_problem", evidence.nodes_problem},
          {"clock_error_ns", evidence.clock_error_ns},
          {"world", evidence.world},
          {"now_ns", evidence.now_ns},
          {"suspect_sec", evidence.suspect_sec},
          {"away_sec", evidence.away_sec},
          {"hardware", hardwareFields(evidence.hardware)}};
}

std::string evidenceJson(HangEvidence evidence, size_t limit) {
  std::string text = withRanks(evidence).dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > limit) {
    for (RankEvidence& rank : evidence.ranks) {
      rank.past.clear();
      rank.connections.addresses.clear();
    }
    text = withRanks(evidence).dump(-1, ' ', false, json::error_handler_t::replace);
  }
  if (text.size() > limit) {
    for (RankEvidence& rank : evidence.ranks) {
      rank.stacks = importantThreadsOf(rank);
      for (ChildProcess& child : rank.children) {
        child.stacks = {};
      }
    }
    text = withRanks(evidence).dump(-1, ' ', false, json::error_handler_t::replace);
  }
  while (text.size() > limit && !evidence.ranks.empty()) {
    bool shorter = false;
    for (RankEvidence& rank : evidence.ranks) {
      const size_t ops = rank.tail.size();
      shorter = shorter || ops > 1;
      rank.tail.erase(rank.tail.begin(),
                      rank.tail.begin() + static_cast<ptrdiff_t>(ops > 1 ? ops / 2 : 0));
    }
    if (!shorter) {
      evidence.ranks.pop_back();
    }
    text = withRanks(evidence).dump(-1, ' ', false, json::error_handler_t::replace);
  }
  return text;
}

std::optional<HangEvidence> evidenceFromJson(std::string_view given) {
  return evidenceOf(parseJson(given));
}

bool saysCrash(std::string_view report) {
  const json fields = parseJson(report);
  return fields.is_object() && text(fields, "state") == "crash";
}

std::optional<HangEvidence> evidenceOf(const json& report) {
  if (!report.is_object() || text(report, "report") != "hang" ||
      number<int>(report, "version", 0) != kVerdictVersion) {
    return std::nullopt;
  }
  HangEvidence evidence;
  evidence.job = text(report, "job");
  evidence.node = number<int>(report, "node", 0);
  evidence.world = number<int>(report, "world", 0);
  evidence.now_ns = number<int64_t>(report, "now_ns", 0);
  evidence.suspect_sec = number<double>(report, "suspect_sec", 0);
  evidence.away_sec = number<double>(report, "away_sec", 0);
  evidence.nodes = number<int>(report, "nodes", 1);
  evidence.nodes_problem = text(report, "nodes_problem");
  evidence.clock_error_ns = std::max<int64_t>(0, number<int64_t>(report, "clock_error_ns", 0));
  if (const auto silent = report.find("silent_nodes");
      silent != report.end() && silent->is_array()) {
    for (const json& node : *silent) {
      if (node.is_number_integer() && evidence.silent_nodes.size() < kMaxRanks) {
        evidence.silent_nodes.push_back(number<int>(json{{"node", node}}, "node", -1));
      }
    }
  }
  evidence.hardware = hardwareNotesFrom(report);
  each(report, "ranks", [&](const json& rank) {
    if (evidence.ranks.size() < kMaxRanks) {
      evidence.ranks.push_back(rankOf(rank));
    }
  });
  return evidence;
}

}  // namespace reft

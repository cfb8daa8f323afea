#include "agent/peers/messages.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/stacks/stacks.h"
#include "intercept/base/error.h"
#include "intercept/base/json.h"
#include "intercept/link/wire.h"

namespace reft::agent {

namespace {

using nlohmann::json;

json object(std::string_view payload) {
  json value = parseJson(payload);
  if (!value.is_object()) {
    throw InvalidArgument("payload", std::to_string(payload.size()) + " bytes", "a JSON object");
  }
  return value;
}

int64_t integer(const json& from, const char* name, int64_t low, int64_t high,
                const int64_t* fallback = nullptr) {
  const auto found = from.find(name);
  if (found == from.end() && fallback != nullptr) {
    return *fallback;
  }
  const auto allowed = std::to_string(low) + ".." + std::to_string(high);
  if (found == from.end() || !found->is_number_integer()) {
    throw InvalidArgument(name, found == from.end() ? "absent" : "no integer", allowed);
  }
  if (found->is_number_unsigned() && found->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    throw InvalidArgument(name, "too large", allowed);
  }
  const auto value = found->get<int64_t>();
  if (value < low || value > high) {
    throw InvalidArgument(name, std::to_string(value), allowed);
  }
  return value;
}

std::string text(const json& from, const char* name, size_t longest) {
  const auto found = from.find(name);
  if (found == from.end() || !found->is_string() ||
      found->get_ref<const std::string&>().size() > longest) {
    throw InvalidArgument(name, found == from.end() ? "absent" : "no such string",
                          "a string of up to " + std::to_string(longest) + " bytes");
  }
  return found->get<std::string>();
}

}  // namespace

bool validJobId(std::string_view job) {
  return !job.empty() && job.size() <= 128 && job[0] != '.' &&
         std::all_of(job.begin(), job.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
         });
}

Hello parseHello(std::string_view payload) {
  // The peer is not authenticated yet.
  constexpr size_t kMostBytes = 512;
  if (payload.size() > kMostBytes) {
    throw InvalidArgument("hello", std::to_string(payload.size()) + " bytes",
                          "up to " + std::to_string(kMostBytes));
  }
  const auto from = object(payload);
  const auto protocol = integer(from, "protocol", 0, UINT16_MAX);
  if (protocol != wire::kVersion) {
    throw InvalidArgument("protocol", std::to_string(protocol), std::to_string(wire::kVersion));
  }
  Hello hello;
  const auto role = text(from, "role", 16);
  if (role != "rank" && role != "tool") {
    throw InvalidArgument("role", "something else", "rank|tool");
  }
  const int64_t zero = 0;
  hello.is_rank = role == "rank";
  hello.version = text(from, "version", 64);
  hello.job = text(from, "job", 128);
  hello.node = static_cast<int>(integer(from, "node", 0, kMaxRank));
  hello.pid = static_cast<int>(integer(from, "pid", 0, INT32_MAX, &zero));
  hello.started = integer(from, "started", 0, INT64_MAX, &zero);
  if (!hello.is_rank) {
    return hello;
  }
  hello.world = static_cast<int>(integer(from, "world", 1, kMaxRank));
  hello.rank = static_cast<int>(integer(from, "rank", 0, hello.world - 1));
  hello.local_world = static_cast<int>(integer(from, "local_world", 1, hello.world));
  hello.local_rank = static_cast<int>(integer(from, "local_rank", 0, hello.local_world - 1));
  const int64_t even = (hello.world + hello.local_world - 1) / hello.local_world;
  hello.nodes = static_cast<int>(integer(from, "nodes", 1, hello.world, &even));
  hello.attempt = static_cast<int>(integer(from, "attempt", 0, INT32_MAX, &zero));
  hello.restarts_left = static_cast<int>(integer(from, "restarts_left", 0, INT32_MAX, &zero));
  hello.secret = from.contains("secret") ? text(from, "secret", 32) : "";
  if (hello.secret.find_first_not_of("0123456789abcdef") != hello.secret.npos) {
    throw InvalidArgument("secret", "no number", "up to 32 hexadecimal digits");
  }
  const auto hex = text(from, "incarnation", 18);
  const auto digits = std::string_view(hex).substr(hex.rfind("0x", 0) == 0 ? 2 : 0);
  const auto parsed =
      std::from_chars(digits.data(), digits.data() + digits.size(), hello.incarnation, 16);
  if (digits.empty() || parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size()) {
    throw InvalidArgument("incarnation", "no number", "up to 16 hexadecimal digits");
  }
  return hello;
}

VaultPut parseVaultPut(std::string_view payload) {
  const auto from = object(payload);
  const int64_t zero = 0;
  return {static_cast<int>(integer(from, "rank", 0, kMaxRank)),
          static_cast<uint64_t>(integer(from, "bytes", 0, INT64_MAX, &zero)),
          static_cast<int>(integer(from, "resumes_world", 0, kMaxRank, &zero))};
}

VaultGet parseVaultGet(std::string_view payload) {
  const auto from = object(payload);
  const int64_t present = 0;
  return {static_cast<int>(integer(from, "rank", 0, kMaxRank)),
          static_cast<int>(integer(from, "world", 0, kMaxRank, &present)),
          integer(from, "copy", 0, 1, &present) != 0};
}

int parseVaultList(std::string_view payload) {
  const int64_t present = 0;
  return static_cast<int>(integer(object(payload), "world", 0, kMaxRank, &present));
}

namespace {

constexpr size_t kMostAddress = 64;
constexpr size_t kMostSources = 4096;

std::vector<int> ranksIn(const json& from, const char* name) {
  const auto found = from.find(name);
  if (found == from.end() || !found->is_array() || found->size() > kMostSources) {
    throw InvalidArgument(name, "no list", "a list of up to 4096 ranks");
  }
  std::vector<int> ranks;
  for (const json& rank : *found) {
    if (!rank.is_number_unsigned() || rank.get<uint64_t>() > uint64_t{kMaxRank}) {
      throw InvalidArgument(name, "no rank", "0.." + std::to_string(kMaxRank));
    }
    ranks.push_back(rank.get<int>());
  }
  return ranks;
}

MeshOpen meshOpenIn(const json& from) {
  MeshOpen open;
  const std::string hex = text(from, "key", 2 * sizeof(Sha256));
  for (size_t i = 0; i < open.key.size(); ++i) {
    const char* digits = hex.data() + 2 * i;
    if (hex.size() != 2 * sizeof(Sha256) ||
        std::from_chars(digits, digits + 2, open.key[i], 16).ptr != digits + 2) {
      throw InvalidArgument("key", "no number", "64 hexadecimal digits");
    }
  }
  open.address = text(from, "address", kMostAddress);
  open.port = static_cast<int>(integer(from, "port", 0, UINT16_MAX));
  const int64_t off = 0;
  open.tls = integer(from, "tls", 0, 1, &off) == 1;
  return open;
}

}  // namespace

MeshOpen parseMeshOpen(std::string_view payload) {
  return meshOpenIn(object(payload));
}

MeshKeep parseMeshKeep(std::string_view payload) {
  const auto from = object(payload);
  MeshKeep keep;
  keep.open = meshOpenIn(from);
  keep.copied = ranksIn(from, "copied");
  keep.room = static_cast<uint64_t>(integer(from, "room", 0, INT64_MAX));
  keep.rate = static_cast<uint64_t>(integer(from, "rate", 0, INT64_MAX));
  keep.on_demand = integer(from, "on_demand", 0, 1) == 1;
  const auto sources = from.find("sources");
  if (sources == from.end() || !sources->is_array() || sources->size() > kMostSources) {
    throw InvalidArgument("sources", "no list", "a list of up to 4096 nodes");
  }
  for (const json& source : *sources) {
    if (!source.is_object()) {
      throw InvalidArgument("sources", "no object", "objects");
    }
    keep.sources.push_back({text(source, "address", kMostAddress),
                            static_cast<int>(integer(source, "port", 1, UINT16_MAX)),
                            ranksIn(source, "ranks")});
  }
  return keep;
}

MeshFetch parseMeshFetch(std::string_view payload) {
  const auto from = object(payload);
  MeshFetch fetch;
  fetch.world = static_cast<int>(integer(from, "world", 1, kMaxRank));
  fetch.ranks = ranksIn(from, "ranks");
  fetch.room = static_cast<uint64_t>(integer(from, "room", 0, INT64_MAX));
  return fetch;
}

StacksRequest parseStacksRequest(std::string_view payload) {
  const auto from = object(payload);
  StacksRequest request;
  if (const auto native = from.find("native"); native != from.end()) {
    if (!native->is_boolean()) {
      throw InvalidArgument("native", "something else", "true or false");
    }
    request.native = native->get<bool>();
  }
  if (const auto found = from.find("ranks"); found != from.end() && !found->is_null()) {
    if (!found->is_array() || found->size() > 65536) {
      throw InvalidArgument("ranks", "something else", "an array of ranks");
    }
    for (const auto& entry : *found) {
      request.ranks.push_back(
          static_cast<int>(integer(json{{"ranks", entry}}, "ranks", 0, kMaxRank)));
    }
  }
  if (request.native && request.ranks.size() != 1) {
    throw InvalidArgument("ranks", std::to_string(request.ranks.size()) + " of them",
                          "one, for native frames");
  }
  return request;
}

uint64_t parseStackReplyId(std::string_view payload) {
  return static_cast<uint64_t>(integer(object(payload), "id", 0, INT64_MAX));
}

std::vector<Note> parseNotes(std::string_view payload) {
  const auto from = object(payload);
  const auto found = from.find("notes");
  if (found == from.end() || !found->is_array() || found->size() > kMaxNotes) {
    throw InvalidArgument("notes", "something else",
                          "an array of up to " + std::to_string(kMaxNotes));
  }
  std::vector<Note> notes;
  for (const auto& entry : *found) {
    Note note;
    if (!entry.is_array() || entry.size() != note.size()) {
      throw InvalidArgument("notes", "an entry of another form", "arrays of four strings");
    }
    for (size_t i = 0; i < note.size(); ++i) {
      note[i] = text(json{{"notes", entry[i]}}, "notes", 512);
    }
    notes.push_back(std::move(note));
  }
  return notes;
}

const char* nodeRequestName(NodeRequest kind) {
  return kind == NodeRequest::kEvidence ? "evidence"
         : kind == NodeRequest::kHold   ? "hold"
                                        : "please";
}

std::string gatherPayload(uint64_t id, double seconds, NodeRequest kind) {
  return json{{"id", id}, {"seconds", seconds}, {"kind", nodeRequestName(kind)}}.dump();
}

EvidenceRequest parseEvidenceRequest(std::string_view payload) {
  const auto from = object(payload);
  EvidenceRequest request;
  request.id = static_cast<uint64_t>(integer(from, "id", 1, INT64_MAX));
  request.node = static_cast<int>(integer(from, "node", 0, kMaxRank));
  const auto kind = text(from, "kind", 16);
  for (const auto known : {NodeRequest::kEvidence, NodeRequest::kHold, NodeRequest::kPlease}) {
    if (kind == nodeRequestName(known)) {
      request.kind = known;
      return request;
    }
  }
  throw InvalidArgument("kind", "something else", "evidence|hold|please");
}

std::string evidencePayload(uint64_t id, int node, int64_t asked_ns, const std::string& boot,
                            const std::string& evidence) {
  // Put together as text: the evidence is long, and is JSON already.
  return "{\"id\":" + std::to_string(id) + ",\"answer\":{\"node\":" + std::to_string(node) +
         ",\"asked_ns\":" + std::to_string(asked_ns) + ",\"boot\":" + json(boot).dump() +
         ",\"evidence\":" + evidence + "}}";
}

Gathered parseGathered(std::string_view payload) {
  const auto from = object(payload);
  Gathered gathered;
  gathered.id = static_cast<uint64_t>(integer(from, "id", 0, INT64_MAX));
  if (const auto answer = from.find("answer"); answer != from.end()) {
    const auto node = static_cast<int>(integer(from, "node", 0, kMaxRank));
    const auto evidence = answer->is_object() ? answer->find("evidence") : answer->end();
    auto read =
        answer->is_object() && evidence != answer->end() ? evidenceOf(*evidence) : std::nullopt;
    if (read) {
      const int64_t zero = 0;
      gathered.answer = NodeAnswer{node, integer(*answer, "asked_ns", 0, INT64_MAX, &zero),
                                   text(*answer, "boot", 64), std::move(*read)};
    }
    return gathered;
  }
  gathered.end = true;
  gathered.error = text(from, "error", 512);
  const auto silent = from.find("silent");
  if (silent == from.end() || !silent->is_array() ||
      silent->size() > static_cast<size_t>(kMaxRank)) {
    throw InvalidArgument("silent", "something else", "an array of nodes");
  }
  for (const auto& node : *silent) {
    gathered.silent.push_back(
        static_cast<int>(integer(json{{"silent", node}}, "silent", 0, kMaxRank)));
  }
  return gathered;
}

std::string errorPayload(const std::string& what, const std::string& hint) {
  return json{{"what", what}, {"hint", hint}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace reft::agent

// JSON payloads of the peers, checked field by field.
//
// Threads: re-entrant. Errors: InvalidArgument names the field, its value and what is allowed, for
// anything that is not what it should be; the payload may come from anybody of this user.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/stacks/stacks.h"
#include "intercept/link/sha256.h"

namespace reft::agent {

constexpr int kMaxRank = 1 << 20;

struct Hello {
  bool is_rank = false;
  std::string version;
  std::string job;
  int node = 0;
  int rank = -1;
  int local_rank = 0;
  int world = 1;
  int local_world = 1;
  int nodes = 1;
  int pid = 0;          // in the peer's own PID namespace
  int64_t started = 0;  // when that process began, in clock ticks since boot; 0: unknown
  uint64_t incarnation = 0;
  int attempt = 0;
  int restarts_left = 0;  // how often the launcher would start the ranks again
  std::string secret;     // name of the file of the job's secret that goes with the job, or ""
};

Hello parseHello(std::string_view payload);

// `resumes_world`: its rank resumes what as many ranks have saved; 0: it resumes nothing.
struct VaultPut {
  int rank = 0;
  uint64_t bytes = 0;
  int resumes_world = 0;
};

VaultPut parseVaultPut(std::string_view payload);
// A vault of `rank`; of several, that of a job of `world` ranks. 0: the present one. `copy`: not
// what the rank wrote on this node, but the copy that this node keeps for another one.
struct VaultGet {
  int rank = 0;
  int world = 0;
  bool copy = false;
};
VaultGet parseVaultGet(std::string_view payload);
// 0: present vaults alone; else those, too, that jobs of other numbers of ranks have left.
int parseVaultList(std::string_view payload);
struct StacksRequest {
  std::vector<int> ranks;  // empty = all
  bool native = false;     // native frames, of one rank, instead of a report
};
StacksRequest parseStacksRequest(std::string_view payload);
uint64_t parseStackReplyId(std::string_view payload);

// {"key", "address", "port", "tls"} of kMeshOpen: the agent is to take connections of other nodes
// there. "tls" 1: encrypted ones, and no others.
struct MeshOpen {
  Sha256 key{};
  std::string address;  // numeric
  int port = 0;         // 0: any
  bool tls = false;
};
MeshOpen parseMeshOpen(std::string_view payload);

// kMeshKeep: MeshOpen, and of which nodes copies are to be kept. `copied`: ranks of this node whose
// votes wait for theirs.
struct MeshKeep {
  struct Source {
    std::string address;
    int port = 0;
    std::vector<int> ranks;
  };
  MeshOpen open;
  std::vector<Source> sources;
  std::vector<int> copied;
  uint64_t room = 0;  // bytes
  uint64_t rate = 0;  // bytes per second; 0: no limit
  bool on_demand = false;
};
MeshKeep parseMeshKeep(std::string_view payload);

// {"world", "ranks", "room"} of kMeshFetch: copies of these ranks' vaults are wanted, from nodes
// that have no rank any more.
struct MeshFetch {
  int world = 0;
  std::vector<int> ranks;
  uint64_t room = 0;  // bytes
};
MeshFetch parseMeshFetch(std::string_view payload);

// What a rank says about its state: (about, where, kind, why), at most kMaxNotes of them, texts of
// at most 512 bytes.
constexpr size_t kMaxNotes = 256;
using Note = std::array<std::string, 4>;
std::vector<Note> parseNotes(std::string_view payload);

// What a node is asked for by another.
enum class NodeRequest {
  kEvidence,  // the evidence about its ranks, at once
  kHold,      // nothing: the other has the matter in hand
  kPlease,    // the first node: to look at the job
};
const char* nodeRequestName(NodeRequest kind);

// {"id", "seconds", "kind"} of kGather: answers are waited for so long.
std::string gatherPayload(uint64_t id, double seconds, NodeRequest kind);

struct EvidenceRequest {
  uint64_t id = 0;  // of the job's store
  int node = 0;     // that asks
  NodeRequest kind = NodeRequest::kHold;
};
EvidenceRequest parseEvidenceRequest(std::string_view payload);

// {"id", "answer": {"node", "asked_ns", "boot", "evidence"}} of kEvidence. `evidence`: from
// evidenceJson().
std::string evidencePayload(uint64_t id, int node, int64_t asked_ns, const std::string& boot,
                            const std::string& evidence);

// What another node has answered.
struct NodeAnswer {
  int node = 0;
  int64_t asked_ns = 0;  // when the request came, by that node's clock
  std::string boot;      // equal on all agents of one machine since it was started
  HangEvidence evidence;
};

// kGathered: an answer ({"id", "node", "answer"}), or the end ({"id", "silent", "error"}).
struct Gathered {
  uint64_t id = 0;
  std::optional<NodeAnswer> answer;
  bool end = false;
  std::vector<int> silent;
  std::string error;
};
// An answer that is none of ours is left out: its node is not the one to blame who carries it.
Gathered parseGathered(std::string_view payload);

// {"what", "hint"} of kError.
std::string errorPayload(const std::string& what, const std::string& hint);

// A name that becomes a directory: letters, digits, `.`, `_`, `-`, at most 128, not starting with a
// dot.
bool validJobId(std::string_view job);

}  // namespace reft::agent

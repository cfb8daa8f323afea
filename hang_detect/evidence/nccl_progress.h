// What a rank waits for inside a collective or a message, by the progress that NCCL reports.
//
// Note [what the states mean]
// The proxy thread moves data between the own GPU and the network, in steps. The oldest open step
// of an op shows what the op waits for. It does not show who is at fault: a GPU that fills no
// buffer may itself wait for data. verdict/nccl_edges.h follows the waits over all ranks.
//
// Threads: values; the functions are re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "intercept/nccl_profiler/progress.h"

namespace reft {

enum class NcclCause : uint8_t {
  kUnknown,
  kOwnGpuFills,   // send: the own GPU has not filled the buffer
  kPeerPosts,     // send: the receiver has posted no buffer
  kNetworkSends,  // send: the network has not completed the transfer
  kDataComes,     // receive: the buffer is posted, no data yet
  kFlush,         // receive: the data is not flushed to the own GPU
  kOwnGpuTakes,   // receive: the own GPU has not taken the data
  kNetworkTakes,  // the network has not accepted the buffer
  kProxyBegins,   // the proxy thread has taken the op and not begun it
};

// One proxy op of the op in question.
struct NcclEdge {
  int peer = -1;
  int channel = 0;
  bool send = false;
  bool room = false;  // send: the own GPU still has a buffer that it may fill
  NcclCause cause = NcclCause::kUnknown;
  uint32_t done = 0, steps = 0;
  int64_t quiet_ns = 0;  // time since its newest change
};

// Whether a rank's proxy thread runs. While it has ops it spins, so one that sleeps, is stopped or
// is gone is stuck.
enum class NcclProxy : uint8_t { kUnknown, kRuns, kStuck };

// A collective, by a name that is the same on all ranks.
struct NcclOpName {
  std::string func;
  uint64_t seq = 0;
  bool operator==(const NcclOpName&) const = default;
};

// One rank in one communicator. The op in question is the oldest one that has not ended.
struct NcclFinding {
  uint64_t comm = 0;
  std::string name;
  int rank = -1, ranks = 0, nodes = 0;
  NcclProxy proxy = NcclProxy::kUnknown;
  bool complete = true;    // the table lost nothing
  bool advancing = false;  // something changed within the time that was given
  int64_t quiet_ns = 0;    // time since the newest change
  bool in_op = false;      // there is an op in question
  bool p2p = false;        // it is a group of messages
  NcclOpName op;
  std::string algo;
  // NCCL has left its launch and the proxy thread has taken no part of it, as it did of earlier ops
  // with this algorithm.
  bool never_taken = false;
  bool kernels = false;  // kernel channels are recorded
  uint64_t kernels_begun = 0, sends_begun = 0, sends_done = 0, recvs_begun = 0, recvs_done = 0;
  // An op before the one in question, or one of another communicator of this rank, is not known to
  // have ended. The GPU may be in that one.
  bool busy_before = false;
  bool busy_elsewhere = false;
  std::vector<NcclEdge> edges;
  std::vector<NcclOpName> passed;  // collectives that ended before the op in question
  std::vector<NcclOpName> queued;  // collectives behind it
};

// One finding for each communicator of a rank. Times within `quiet_for_ns` before `now_ns` count as
// progress. `proxies`: state of proxy threads by thread id.
std::vector<NcclFinding> diagnoseNccl(const NcclProgress& progress, int64_t now_ns,
                                      int64_t quiet_for_ns,
                                      const std::map<uint32_t, NcclProxy>& proxies = {});

}  // namespace reft

// What NCCL is doing in this process, as plain values: a copy of the progress table.
//
// Times are CLOCK_MONOTONIC nanoseconds, as in the op log, with the resolution of the clock that
// the plugin reads (a few milliseconds); 0 = has not happened.
//
// Threads: values. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace reft {

// Where one transfer of a proxy op stands.
enum class NcclStep : uint8_t {
  kNone = 0,
  kPosted = 1,        // begun; the network has not taken the buffer yet
  kSendGpuWait = 2,   // the own GPU has not filled the buffer
  kSendPeerWait = 3,  // filled; the receiver has no buffer posted
  kSendWait = 4,      // given to the network, which has not completed it
  kRecvWait = 5,      // buffer posted; no data yet
  kRecvFlushWait = 6,
  kRecvGpuWait = 7,  // data arrived; the own GPU has not taken it
};

// The open transfers of a proxy op, oldest first.
struct NcclOpenStep {
  uint32_t step = 0;
  NcclStep state = NcclStep::kNone;
  int64_t since_ns = 0;  // in this state since
};

// What the proxy thread does on one channel with one peer, for one collective or message.
struct NcclProxyOp {
  uint64_t task = 0;  // NcclTask::id; 0: unknown
  int32_t peer = -1;  // rank in the communicator
  int32_t channel = 0;
  bool send = false;
  uint32_t steps = 0;  // transfers in all
  uint32_t begun = 0;  // of which begun, done
  uint32_t done = 0;
  uint64_t bytes = 0;       // of the transfers that the network has completed, or is completing
  int64_t start_ns = 0;     // the proxy thread took it
  int64_t progress_ns = 0;  // it first worked on it
  int64_t change_ns = 0;    // newest change of any of its steps
  std::vector<NcclOpenStep> open;
};

// A collective, or one side of a message.
struct NcclTask {
  uint64_t id = 0;      // unique in this process
  uint64_t serial = 0;  // order in the communicator, in which the kernels run
  bool p2p = false;
  std::string func;    // "AllReduce", "Send", …
  uint64_t seq = 0;    // collectives: their number among those of this function, equal on all ranks
  uint64_t count = 0;  // elements
  std::string dtype, algo, proto;
  int32_t peer = -1;  // peer of a message, root of a collective
  uint32_t channels = 0;
  int64_t start_ns = 0;
  bool launched = false;    // NCCL has left the launch; says nothing about the device
  int64_t change_ns = 0;    // newest change of it or of what belongs to it
  uint32_t parts = 0;       // proxy ops and kernel channels begun so far
  uint32_t parts_open = 0;  // of which not ended
  // A bit for each channel: proxy ops begun and ended, and the kernel's work.
  uint64_t sends_begun = 0, sends_done = 0;
  uint64_t recvs_begun = 0, recvs_done = 0;
  uint64_t kernels_begun = 0, kernels_done = 0;
};

struct NcclComm {
  uint64_t hash = 0;  // equal on all ranks of the communicator
  std::string name;
  int32_t rank = -1;
  int32_t ranks = 0;
  int32_t nodes = 0;
  bool kernels = false;           // kernel channels are recorded
  uint32_t proxy_thread = 0;      // thread id of the proxy thread that served it last; 0 = unknown
  uint64_t proxy_ops = 0;         // begun so far
  int64_t change_ns = 0;          // newest change in it, also of ops that have left the table
  std::vector<NcclTask> tasks;    // the newest, in order
  std::vector<NcclProxyOp> open;  // proxy ops that have not ended
};

// Sums since the start. Events that do not fit the protocol are dropped and counted, never guessed.
struct NcclCounts {
  uint64_t comms = 0, comms_ended = 0;
  uint64_t tasks = 0;
  uint64_t ops = 0, ops_stopped = 0, ops_ended = 0;  // ended: open when their communicator ended
  uint64_t kernels = 0, kernels_stopped = 0;
  uint64_t full = 0;        // no slot was free
  uint64_t contended = 0;   // another thread was writing the slot
  uint64_t stale = 0;       // the handle's event has ended
  uint64_t unknown = 0;     // no handle of ours, or one of another kind
  uint64_t malformed = 0;   // values out of range
  uint64_t orphans = 0;     // a parent that has left the table
  uint64_t foreign = 0;     // the proxy served another process
  uint64_t overrun = 0;     // more open steps than the window holds
  uint64_t unreadable = 0;  // slots that snapshot() left out, because they kept changing
};

struct NcclProgress {
  bool complete = true;  // false: something was dropped or left out since the start
  bool broken = false;   // the table has disarmed itself
  std::vector<NcclComm> comms;
  NcclCounts counts;
};

}  // namespace reft

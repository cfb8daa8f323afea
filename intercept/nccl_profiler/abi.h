// The profiler ABI of NCCL, as far as reft uses it: versions 4 (NCCL 2.27), 5 (2.28) and 6 (2.30).
//
// NCCL looks for a table of functions by name (`ncclProfiler_v6`, else `_v5`, `_v4`, …), and passes
// events as descriptors: a type, a parent, a rank and a union. Versions 1 to 3 are left out: their
// init() names neither the communicator nor the rank.
//
// The layout is NCCL's and is fixed by each version; names and comments are ours. No wheel contains
// the original headers, so the static_asserts below repeat what they state
// (src/include/plugin/profiler/profiler_v{4,5,6}.h of NVIDIA/nccl at v2.28.9-1 and 2.30).
//
// Threads: values. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reft::nccl_abi {

using Result = int;  // ncclResult_t; all that a plugin returns is success
inline constexpr Result kSuccess = 0;

// ncclDebugLogger_t: never called by reft, which must not log from NCCL's threads.
using Logger = void (*)(int level, unsigned long flags, const char* file, int line,
                        const char* format, ...);

// Types of events; also the bits of the activation mask.
enum Event : uint64_t {
  kGroup = 1u << 0,
  kColl = 1u << 1,       // one collective; its stop means "launched"
  kP2p = 1u << 2,        // one send or recv; likewise
  kProxyOp = 1u << 3,    // what the proxy thread does for one channel and peer of it
  kProxyStep = 1u << 4,  // one transfer of that
  kProxyCtrl = 1u << 5,
  kKernelCh = 1u << 6,  // the kernel works on one channel of a collective
  kNetPlugin = 1u << 7,
  kGroupApi = 1u << 8,
  kCollApi = 1u << 9,
  kP2pApi = 1u << 10,
  kKernelLaunch = 1u << 11,
  kCeColl = 1u << 12,  // version 6: collectives by copy engines
  kCeSync = 1u << 13,
  kCeBatch = 1u << 14,
};

// Arguments of recordEventState; only these matter to reft.
enum State : int {
  kStepSendWait = 9,       // handed to the network
  kStepSendGpuWait = 8,    // buffer is free, the own GPU has not filled it
  kStepSendPeerWait = 20,  // data is ready, the receiver has not posted a buffer
  kStepRecvWait = 10,      // buffer posted, no data yet
  kStepRecvFlushWait = 11,
  kStepRecvGpuWait = 12,  // data has arrived, the own GPU has not taken it
  kOpInProgress = 19,
  kKernelChStop = 22,
};

struct CollFields {
  uint64_t seq;  // counts the collectives of one function in a communicator
  const char* func;
  const void* send_buffer;
  void* recv_buffer;
  size_t count;
  int root;
  const char* dtype;
  uint8_t channels;
  uint8_t warps;
  const char* algo;
  const char* proto;
  void* group;  // absent in version 4
};

struct P2pFields {
  const char* func;
  void* buffer;
  const char* dtype;
  size_t count;
  int peer;
  uint8_t channels;
  void* group;  // absent in version 4
};

struct ProxyOpFields {
  int pid;  // of the process that enqueued it: another one if the proxy serves a neighbour (PXN)
  uint8_t channel;
  int peer;
  int steps;
  int chunk_bytes;
  int is_send;
};

struct ProxyStepFields {
  int step;
};

struct KernelChFields {
  uint8_t channel;
  uint64_t gpu_timer;
};

struct CollApiFields {
  const char* func;
  size_t count;
  const char* dtype;
  int root;
  void* stream;
  bool captured;
};

struct CeCollFields {
  uint64_t seq;
  const char* func;
  const void* send_buffer;
  void* recv_buffer;
  size_t count;
  int root;
  const char* dtype;
  const char* strategy;
  bool sync_inside;
  uint32_t batch;
  uint32_t batches;
  uint32_t ce_seq;
  void* stream;
};

struct EventV5 {
  uint64_t type;  // version 4: a uint8_t, and the bytes behind it are undefined
  void* parent;
  int rank;
  union {
    CollApiFields coll_api;
    CollFields coll;
    P2pFields p2p;
    ProxyOpFields proxy_op;
    ProxyStepFields proxy_step;
    KernelChFields kernel_ch;
  };
};

// Version 6 adds members to the union, which stays as long.
struct EventV6 {
  uint64_t type;
  void* parent;
  int rank;
  union {
    CollFields coll;
    ProxyOpFields proxy_op;
    CeCollFields ce_coll;
  };
};

union StateArgs {
  struct {
    size_t bytes;
  } proxy_step;
  struct {
    int appended;
  } proxy_ctrl;
  struct {
    void* data;
  } net_plugin;
  struct {
    uint64_t gpu_timer;
  } kernel_ch;
};

using StartEvent = Result (*)(void* context, void** handle, EventV5* event);
using StopEvent = Result (*)(void* handle);
using RecordEventState = Result (*)(void* handle, int state, StateArgs* args);
using Finalize = Result (*)(void* context);

struct ProfilerV5 {
  const char* name;
  Result (*init)(void** context, uint64_t hash, int* mask, const char* name, int nodes, int ranks,
                 int rank, Logger logger);
  StartEvent start;
  StopEvent stop;
  RecordEventState record;
  Finalize finalize;
};
using ProfilerV6 = ProfilerV5;  // start() gets an EventV6

struct ProfilerV4 {
  const char* name;
  Result (*init)(void** context, int* mask, const char* name, uint64_t hash, int nodes, int ranks,
                 int rank, Logger logger);
  StartEvent start;
  StopEvent stop;
  RecordEventState record;
  Finalize finalize;
};

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8, "NCCL exists for 64 bits only");

static_assert(offsetof(EventV5, parent) == 8 && offsetof(EventV5, rank) == 16);
static_assert(offsetof(EventV5, coll) == 24 && sizeof(EventV5) == 112);
static_assert(offsetof(EventV6, coll) == 24 && sizeof(EventV6) == 112);

static_assert(offsetof(CollFields, func) == 8 && offsetof(CollFields, send_buffer) == 16);
static_assert(offsetof(CollFields, recv_buffer) == 24 && offsetof(CollFields, count) == 32);
static_assert(offsetof(CollFields, root) == 40 && offsetof(CollFields, dtype) == 48);
static_assert(offsetof(CollFields, channels) == 56 && offsetof(CollFields, warps) == 57);
static_assert(offsetof(CollFields, algo) == 64 && offsetof(CollFields, proto) == 72);
static_assert(offsetof(CollFields, group) == 80 && sizeof(CollFields) == 88);

static_assert(offsetof(P2pFields, buffer) == 8 && offsetof(P2pFields, dtype) == 16);
static_assert(offsetof(P2pFields, count) == 24 && offsetof(P2pFields, peer) == 32);
static_assert(offsetof(P2pFields, channels) == 36 && offsetof(P2pFields, group) == 40);

static_assert(offsetof(ProxyOpFields, channel) == 4 && offsetof(ProxyOpFields, peer) == 8);
static_assert(offsetof(ProxyOpFields, steps) == 12 && offsetof(ProxyOpFields, chunk_bytes) == 16);
static_assert(offsetof(ProxyOpFields, is_send) == 20 && sizeof(ProxyOpFields) == 24);

static_assert(offsetof(KernelChFields, gpu_timer) == 8 && sizeof(KernelChFields) == 16);
static_assert(sizeof(CeCollFields) == 88 && sizeof(StateArgs) == 8);

static_assert(offsetof(ProfilerV5, init) == 8 && offsetof(ProfilerV5, start) == 16);
static_assert(offsetof(ProfilerV5, stop) == 24 && offsetof(ProfilerV5, record) == 32);
static_assert(offsetof(ProfilerV5, finalize) == 40 && sizeof(ProfilerV5) == 48);
static_assert(sizeof(ProfilerV4) == sizeof(ProfilerV5));

}  // namespace reft::nccl_abi

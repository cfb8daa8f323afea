// The op log of a rank: a ring of fixed-size records in shared memory, one per op. It is in the
// vault's memfd, so it survives a SIGKILL of its writer. Any process of the same user can read it
// while the rank runs, hangs or is dead.
//
// The writer fills in an op's phases as they happen (begin → enqueued → wait-begin → wait-end →
// done), so the record shows how far the op got. Cost target: < 200 ns per record, no lock, no
// allocation, no system call except reading the clock (vDSO).
//
// Threads: any threads may call begin() concurrently (fetch_add claims a slot) and mark any op.
//          OpLogReader may run in any process at any time; it skips a record that is overwritten
//          during the read.
// Errors:  begin() and the marks cannot fail. OpLog's constructor may throw std::bad_alloc;
//          OpLogReader throws Corruption if the area is not an op log.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "intercept/base/clock.h"
#include "intercept/base/mutex.h"

namespace reft {

// Values reach shared memory: append only, do not change.
enum class OpKind : uint8_t {
  kUnknown = 0,
  kBroadcast = 1,
  kAllreduce = 2,
  kAllreduceCoalesced = 3,
  kReduce = 4,
  kAllgather = 5,
  kAllgatherBase = 6,
  kAllgatherCoalesced = 7,
  kGather = 8,
  kScatter = 9,
  kReduceScatter = 10,
  kReduceScatterBase = 11,
  kReduceScatterCoalesced = 12,
  kAlltoallBase = 13,
  kAlltoall = 14,
  kSend = 15,
  kRecv = 16,
  kRecvAnysource = 17,
  kBarrier = 18,
  kMonitoredBarrier = 19,
  kCoalesced = 20,
  kAllreduceSparse = 21,
  kGatherSingle = 22,
  kStep = 30,  // not a collective: an optimizer step (seq = step number), to split a log into steps
};

// A collective of at most this many bytes costs link latency but no bandwidth, so a long wait in it
// is a wait for other ranks (a barrier, the norm for gradient clipping).
constexpr uint64_t kLatencyBytes = uint64_t{64} << 10;

// "all_reduce", "send", …; "unknown" for other values.
const char* opKindName(OpKind kind);

// How an op ended, and where it stands on its device (device_ops.h).
struct OpFlag {
  static constexpr uint8_t kFailed = 1;      // ended with an exception
  static constexpr uint8_t kReachAsked = 2;  // its stream says when it reaches the op
  static constexpr uint8_t kReached = 4;
  static constexpr uint8_t kPassAsked = 8;  // a stream that waits for it says when it has passed it
  static constexpr uint8_t kPassed = 16;
  // Two bits: within which time of its begin the op was seen to have been passed; 0: unknown, or
  // longer.
  static constexpr int kWithinShift = 6;
  static constexpr std::array<double, 4> kWithinSec{0, 0.5, 4, 30};
  static uint8_t within(double sec) noexcept;
  static constexpr uint8_t kEndSeen = 32;  // done_ns is filled in without anyone who waits
};

// 96 bytes. Times are CLOCK_MONOTONIC nanoseconds; 0 = has not happened.
struct OpRecord {
  std::atomic<uint64_t> ticket;  // 1 + index of the op in this log; 0 while being rewritten
  uint64_t begin_ns;
  std::atomic<uint64_t> enqueued_ns;
  std::atomic<uint64_t> wait_begin_ns;
  std::atomic<uint64_t> wait_end_ns;
  std::atomic<uint64_t> done_ns;
  uint64_t bytes;      // input bytes of this rank
  uint64_t signature;  // hash of op, dtype, reduce op, element counts: equal on ranks that agree
  uint32_t group;      // index into the group table
  uint32_t seq;        // number of the op in its group, from 1; separate for collectives and p2p
  int32_t peer;        // p2p: group rank of the other side; rooted ops: root; else -1
  uint32_t call_site;  // OpCallSite::id of the caller (c10d_backend/call_site.h); 0 = unknown
  OpKind kind;
  uint8_t dtype;               // c10::ScalarType; 255 = none or mixed
  uint8_t reduce_op;           // c10d::ReduceOp::RedOpType; 255 = none
  std::atomic<uint8_t> flags;  // of OpFlag
  uint32_t tag;                // p2p tag
  uint64_t thread;             // OpThread of the caller
};
static_assert(sizeof(OpRecord) == 96);

// A thread that calls ops, as one number: pthread_self(), by which stack texts name a thread, and
// above it the low bits of the kernel's thread id. A new thread often gets the pthread_self() of
// one that has ended, and only the kernel's id tells them apart. 0 = unknown.
struct OpThread {
  static constexpr int kHandleBits = 48;
  static uint64_t current() noexcept;
  static constexpr uint64_t of(uint64_t handle, uint64_t tid) {
    return handle >> kHandleBits == 0 ? handle | tid << kHandleBits : 0;
  }
  static constexpr uint64_t handleOf(uint64_t thread) {
    return thread & ((uint64_t{1} << kHandleBits) - 1);
  }
  static constexpr uint16_t tidBitsOf(uint64_t thread) {
    return static_cast<uint16_t>(thread >> kHandleBits);
  }
};

struct OpGroup {
  static constexpr size_t kNameBytes = 88;
  char name[kNameBytes];  // NUL-terminated
  int32_t rank;           // own rank in the group
  int32_t size;
};
static_assert(sizeof(OpGroup) == 96);

// A place in the user's code. A program has few. If the table is full, further places have an id
// but no text.
struct OpCallSite {
  static constexpr size_t kTextBytes = 124;
  std::atomic<uint32_t> id;  // OpRecord::call_site; 0: not written yet
  char text[kTextBytes];     // "train.py:88 load_batch", NUL-terminated; a long text keeps its end
};
static_assert(sizeof(OpCallSite) == 128);

// The area holds this header, kMaxGroups OpGroup, kMaxCallSites OpCallSite, and `capacity`
// OpRecord, in this order.
struct OpLogHeader {
  static constexpr uint64_t kMagic = 0x31474F4C54464552;  // "REFTLOG1"
  static constexpr uint32_t kMaxGroups = 1024;
  static constexpr uint32_t kMaxCallSites = 1024;
  uint64_t magic;
  uint32_t version;                   // 3
  uint32_t capacity;                  // records; a power of two
  std::atomic<uint64_t> next_ticket;  // ops begun so far
  std::atomic<uint32_t> groups;
  uint32_t pid;
  std::atomic<uint64_t> heartbeat_ns;  // time of the newest mark
  std::atomic<uint32_t> call_sites;
  uint8_t reserved[20];
};
static_assert(sizeof(OpLogHeader) == 64);

class DeviceOps;
class OpEvents;
struct OpEvent;

class OpLog {
 public:
  struct Op {
    OpKind kind = OpKind::kUnknown;
    uint32_t group = 0;
    uint32_t seq = 0;
    int32_t peer = -1;
    uint32_t tag = 0;
    uint64_t bytes = 0;
    uint8_t dtype = 255;
    uint8_t reduce_op = 255;
    uint32_t call_site = 0;
    uint64_t signature = 0;
  };

  // Bytes of an area for `capacity` records (rounded up to a power of two).
  static size_t areaBytes(uint32_t capacity);

  // Formats `area` (≥ areaBytes(capacity), 64-byte aligned, must outlive the log). If `area` is
  // nullptr, the log allocates a private one, so that the backend also works without a vault.
  OpLog(void* area, uint32_t capacity, const Clock& clock = SteadyClock::instance());
  ~OpLog();
  OpLog(const OpLog&) = delete;
  OpLog& operator=(const OpLog&) = delete;

  // Moves the log and its records into another area. nullptr moves a log that was constructed with
  // a private area back into it. The caller ensures that no begin() or mark runs meanwhile;
  // refresh() may.
  void moveTo(void* area, uint32_t capacity);

  // The area in use, for an OpLogReader in this process; valid until the next moveTo().
  const void* area() const { return header_.load(std::memory_order_acquire); }
  size_t areaBytes() const { return areaBytes(header_.load(std::memory_order_acquire)->capacity); }

  // Forwards every later begin(), markWaitBegin(), markWaitEnd() and markDone() to `events`, which
  // must outlive the log; nullptr: to no listener.
  void tell(OpEvents* events) { events_.store(events, std::memory_order_release); }

  // Registers a group and returns its index; call it once per group. Groups beyond kMaxGroups share
  // the last index.
  uint32_t addGroup(const std::string& name, int rank, int size);

  // Publishes the text of an OpRecord::call_site; call it once per id.
  void nameCallSite(uint32_t id, std::string_view text) noexcept;

  // Returns the op's ticket, which the marks take.
  uint64_t begin(const Op& op) noexcept;
  void markEnqueued(uint64_t ticket) noexcept;
  void markWaitBegin(uint64_t ticket) noexcept;
  void markWaitEnd(uint64_t ticket) noexcept;
  void markDone(uint64_t ticket, bool failed = false) noexcept;
  // Adds flags of OpFlag. No sign of progress: the newest mark stays the newest.
  void flag(uint64_t ticket, uint8_t flags) noexcept;
  // Fills in the flags that `device` knows, of the newest `count` ops.
  void refresh(const DeviceOps& device, uint64_t count = 256) noexcept;
  // Notes which ops `device` has passed since the last call, and how soon. To be called at each op
  // of a device; it looks at the few that are new.
  void settle(const DeviceOps& device) noexcept;

  // Fills in the op's fields of `event` (kind to signature). Returns false if the record has been
  // overwritten.
  bool describe(uint64_t ticket, OpEvent& event) const noexcept;

 private:
  OpRecord* recordOf(uint64_t ticket) const noexcept;  // nullptr if overwritten
  void mark(uint64_t ticket, std::atomic<uint64_t> OpRecord::*phase, int64_t now_ns) noexcept;
  void tellMark(int what, uint64_t ticket, int64_t now_ns) noexcept;

  const Clock& clock_;
  std::atomic<OpLogHeader*> header_{nullptr};
  std::atomic<OpEvents*> events_{nullptr};
  void* own_area_ = nullptr;
  Mutex adding_group_;                        // one addGroup() at a time; readers take no lock
  Mutex moving_;                              // refresh(), settle() and moveTo()
  uint64_t settled_ GUARDED_BY(moving_) = 0;  // the newest op that settle() is through with
};

// The op log of this process, in a private area until the runtime moves it into the vault. Never
// destroyed, because a thread that outlives static destructors may still mark an op.
OpLog& processOpLog();

// A copy of one record, as plain values.
struct OpEntry {
  uint64_t ticket = 0;
  uint64_t begin_ns = 0, enqueued_ns = 0, wait_begin_ns = 0, wait_end_ns = 0, done_ns = 0;
  uint64_t bytes = 0, signature = 0;
  uint64_t thread = 0;
  uint32_t group = 0, seq = 0, call_site = 0, tag = 0;
  int32_t peer = -1;
  OpKind kind = OpKind::kUnknown;
  uint8_t dtype = 255, reduce_op = 255;
  bool failed = false;
  // As OpFlag.
  bool reach_asked = false, reached = false, pass_asked = false, passed = false, end_seen = false;
  double passed_within_sec = 0;  // of its begin; 0 = unknown
};

class OpLogReader {
 public:
  // Reads a mapped area of `bytes` bytes. Its writer may be foreign, dying or malicious. Throws
  // Corruption.
  OpLogReader(const void* area, size_t bytes);

  uint64_t opsBegun() const;
  uint64_t heartbeatNs() const;
  uint32_t writerPid() const;
  std::vector<OpGroup> groups() const;
  std::map<uint32_t, std::string> callSites() const;
  // The newest `count` records, oldest first.
  std::vector<OpEntry> tail(size_t count) const;

 private:
  const OpLogHeader* header_;
  const OpGroup* groups_;
  const OpCallSite* call_sites_;
  const OpRecord* records_;
  uint32_t capacity_;
};

}  // namespace reft

// What NCCL is doing in this process: a table of fixed size, written by the profiler plugin from
// NCCL's threads and read by any other thread.
//
// Note [slots and handles]
// NCCL holds a handle for each open event and may call with it from several threads. A handle is
// not an address: it holds a kind, the index of a slot and the slot's generation, and every call
// compares them. So a handle of an event that has ended, of another process or of no event is
// recognised and counted, and never followed.
//
// A slot's first word, its tag, is generation, version and two bits: open, busy. A writer takes
// `busy` by compare-and-swap, and gives up after a bounded number of tries: NCCL's threads never
// wait for each other here. A reader copies the slot between two loads of the tag and keeps the
// copy if the tag has not changed.
//
// The slot of a task (a collective or a message) counts its open parts instead, because its parts
// are written by other threads than it: it is reused, oldest first, when it is launched and has no
// open part. Nothing tells that the kernel of a task without parts has ended.
//
// The event path allocates nothing, takes no lock, makes no system call, and costs below 100 ns for
// an event's start and stop (tests/bench/nccl_benchmark.cc).
//
// Threads: any thread may call anything at any time.
// Errors:  none: what does not fit is dropped and counted (NcclCounts). snapshot() may throw
//          std::bad_alloc.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "intercept/nccl_profiler/progress.h"

namespace reft {

class NcclProgressTable {
 public:
  using Handle = uint64_t;  // 0: no event

  static constexpr size_t kComms = 64;
  static constexpr size_t kTasks = 64;     // of each communicator; a power of two
  static constexpr size_t kOps = 4096;     // a power of two
  static constexpr size_t kWindow = 8;     // open steps of a proxy op: NCCL_STEPS
  static constexpr size_t kChannels = 64;  // MAXCHANNELS

  struct CommStart {
    uint64_t hash = 0;
    const char* name = nullptr;
    int rank = -1, ranks = 0, nodes = 0;
    bool kernels = false;
  };
  struct TaskStart {
    bool p2p = false;
    const char* func = nullptr;  // texts may be nullptr
    uint64_t seq = 0, count = 0;
    const char* dtype = nullptr;
    const char* algo = nullptr;
    const char* proto = nullptr;
    int peer = -1;
    unsigned channels = 0;
  };
  struct OpStart {
    int channel = 0, peer = -1, steps = 0;
    bool send = false;
    uint32_t thread = 0;  // of the caller
  };

  // `nonce` goes into every handle: tables with different ones reject each other's handles.
  explicit NcclProgressTable(uint8_t nonce) : nonce_(nonce) {}
  NcclProgressTable(const NcclProgressTable&) = delete;
  NcclProgressTable& operator=(const NcclProgressTable&) = delete;

  // Each returns 0 if it recorded nothing.
  Handle startComm(const CommStart& start, int64_t now_ns) noexcept;
  Handle startTask(Handle comm, const TaskStart& start, int64_t now_ns) noexcept;
  // `task` may be unknown: the op is recorded without.
  Handle startOp(Handle comm, Handle task, const OpStart& start, int64_t now_ns) noexcept;
  // Starting a step that is open changes nothing: NCCL does so each time the network has no room.
  Handle startStep(Handle op, int step, int64_t now_ns) noexcept;
  Handle startKernel(Handle task, int channel, int64_t now_ns) noexcept;

  // The proxy thread has begun to work on an op.
  void progressOp(Handle op, int64_t now_ns) noexcept;
  // NCCL repeats a state while it polls. `clock` is read only if the state changes.
  template <typename Clock>
  void moveStep(Handle step, NcclStep state, uint64_t bytes, Clock clock) noexcept {
    if (!isInState(step, state)) {
      moveStepTo(step, state, bytes, clock());
    }
  }

  // Ends a task, an op, a step or a kernel channel.
  void stop(Handle event, int64_t now_ns) noexcept;
  void endComm(Handle comm) noexcept;

  void countUnknown() noexcept { add(unknown_); }
  void countForeign() noexcept { add(foreign_); }
  void countMalformed() noexcept { add(malformed_); }

  // Whether a count has become impossible. The table then records nothing more.
  bool broken() const noexcept { return broken_.load(std::memory_order_relaxed); }

  NcclProgress snapshot() const;

 private:
  enum Kind : uint8_t { kComm = 1, kTask = 2, kOp = 3, kStep = 4, kKernel = 5 };
  struct Parts {
    uint8_t kind, nonce;
    uint16_t index, extra;
    uint32_t generation;
  };

  // Acquire and release order a slot's fields between two loads of its tag. On x86-64 they are
  // plain moves.
  template <typename T>
  class Field {
   public:
    T get() const noexcept { return value_.load(std::memory_order_acquire); }
    void set(T value) noexcept { value_.store(value, std::memory_order_release); }

   private:
    std::atomic<T> value_{};
  };
  template <size_t kWords>
  class Text {  // NUL-terminated, cut to kWords * 8 - 1 bytes
   public:
    void set(const char* text) noexcept;
    std::string get() const;

   private:
    std::array<Field<uint64_t>, kWords> words_;
  };
  using Tag = std::atomic<uint64_t>;
  using Count = std::atomic<uint64_t>;

  struct alignas(64) Comm {
    Tag tag{0};
    std::atomic<uint64_t> next_serial{0}, next_slot{0};
    Field<int64_t> change_ns;
    Field<uint32_t> proxy_thread;
    Count ops{0};
    Field<uint64_t> hash;
    Field<int32_t> rank, ranks, nodes;
    Field<bool> kernels;
    Text<4> name;
  };
  struct alignas(64) Task {
    std::atomic<uint64_t> life{0};  // see progress_table.cc
    Field<int64_t> change_ns;
    std::atomic<uint64_t> sends_begun{0}, sends_done{0}, recvs_begun{0}, recvs_done{0};
    std::atomic<uint64_t> kernels_begun{0}, kernels_done{0}, kernels_open{0};
    Field<uint64_t> comm;
    Field<bool> p2p;
    Field<int32_t> peer;
    Field<uint32_t> channels;
    Field<uint64_t> serial, seq, count;
    Field<int64_t> start_ns;
    Text<2> func, dtype, algo, proto;
  };
  struct OpenStep {
    Field<uint64_t> step_and_state;  // step << 8 | state; 0: none
    Field<int64_t> since_ns;
  };
  struct alignas(64) Op {
    Tag tag{0};
    Field<uint64_t> comm, task;
    Field<int32_t> peer;
    Field<uint8_t> channel;
    Field<bool> send;
    Field<uint32_t> steps, begun, done;
    Field<uint64_t> bytes;
    Field<int64_t> start_ns, progress_ns, change_ns;
    std::array<OpenStep, kWindow> window;
  };

  static void add(Count& count) noexcept { count.fetch_add(1, std::memory_order_relaxed); }
  Handle handle(Kind kind, size_t index, uint32_t extra, uint32_t generation) const noexcept;
  // Counts a handle that is not of this kind as unknown, and returns false.
  bool parse(Handle handle, Kind kind, size_t slots, Parts& parts) noexcept;
  bool lock(Tag& tag, uint32_t generation, uint64_t& locked) noexcept;
  Comm* commOf(Handle comm) noexcept;
  bool isLive(Handle comm) const noexcept;
  bool isInState(Handle step, NcclStep state) noexcept;
  void moveStepTo(Handle step, NcclStep state, uint64_t bytes, int64_t now_ns) noexcept;
  bool pin(Task& task, uint32_t generation, bool part) noexcept;
  void unpin(Task& task, uint32_t generation) noexcept;
  void touch(Handle comm, int64_t now_ns) noexcept;
  void stopTask(const Parts& parts, int64_t now_ns) noexcept;
  void stopOp(const Parts& parts, int64_t now_ns) noexcept;
  void stopStep(const Parts& parts, int64_t now_ns) noexcept;
  void stopKernel(const Parts& parts, int64_t now_ns) noexcept;
  void endOp(Op& slot, uint64_t tag, int64_t now_ns) noexcept;
  void reclaim(Op& slot) noexcept;
  enum class Read : uint8_t { kFree, kRead, kChanging };
  bool readTask(const Task& slot, Handle comm, size_t index, NcclTask& task) const;
  Read readOp(const Op& slot, NcclProxyOp& op, Handle& comm) const;

  const uint8_t nonce_;
  std::atomic<bool> broken_{false};
  std::atomic<size_t> next_op_{0};
  Count comms_begun_{0}, comms_ended_{0}, tasks_begun_{0}, ops_begun_{0}, ops_stopped_{0},
      ops_ended_{0}, kernels_begun_{0}, kernels_stopped_{0}, full_{0}, contended_{0}, stale_{0},
      unknown_{0}, malformed_{0}, orphans_{0}, foreign_{0}, overrun_{0};
  mutable Count unreadable_{0};
  std::array<Comm, kComms> comms_;
  std::array<Task, kComms * kTasks> tasks_;
  std::array<Op, kOps> ops_;
};

}  // namespace reft

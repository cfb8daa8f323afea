// Devices made of threads: streams are ordered queues with a worker each, kernels are functions
// that take time.
//
// What follows CUDA: work of one stream runs in order, work of different streams at the same time
// and in any order; events order streams; the default stream waits for blocking streams, and they
// for it; asynchronous copies read and write when their turn comes, piece by piece; a stream that
// is captured records; calls that are unsafe during a capture break it. What does not: kernels are
// atomic towards their own stream only, priorities are kept but decide nothing, a captured graph is
// replayed in the order of its capture on one stream.
//
// Threads: any. Errors: result codes, as CUDA gives them.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/results.h"

namespace reft::fake {

using Work = std::function<void()>;
int64_t nowNs();

// For the trace; see control.h.
enum class Kind : char {
  kKernel = 'k',
  kCopyToHost = 'd',
  kCopy = 'c',
  kWait = 'w',
  kNccl = 'n',
  kOther = 'o'
};

// That a piece of work is done, and when.
class Completion {
 public:
  void set();
  void wait();
  bool done() const;
  int64_t atNs() const;  // 0: not done

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  int64_t at_ns_ = 0;
};
using Done = std::shared_ptr<Completion>;

enum CaptureMode { kModeGlobal = 0, kModeThreadLocal = 1, kModeRelaxed = 2 };
enum CaptureStatus { kNotCapturing = 0, kCapturing = 1, kInvalidated = 2 };

struct Graph {
  std::vector<Work> nodes;
};

struct Capture {
  uint64_t id = 0;
  CaptureMode mode = kModeGlobal;
  std::thread::id thread;
  void* origin = nullptr;
  const void* origin_stream = nullptr;
  bool invalid = false;
  Graph graph;
  // What was captured of each stream but the origin, in ops; those whose newest op the origin, or a
  // stream that joins it, has not waited for.
  std::map<const void*, uint64_t> unjoined;
};

struct Event {
  explicit Event(int d, unsigned f) : device(d), flags(f) {}
  const int device;
  const unsigned flags;
  std::mutex mutex;
  Done recorded;                      // nullptr: never recorded
  std::shared_ptr<Capture> capture;   // recorded in it
  const void* captured_on = nullptr;  // this stream, so many ops into the capture
  uint64_t captured_at = 0;
};

constexpr unsigned kFlagNonBlocking = 1;    // of streams
constexpr unsigned kFlagDisableTiming = 2;  // of events

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, unsigned flags, int priority, bool is_default);
  Done push(Work work, std::vector<Done> after = {}, Kind kind = Kind::kOther, uint64_t bytes = 0);
  Done newest() const;  // nullptr: nothing was pushed yet
  void close();         // the worker ends when it has done what was pushed

  const int device;
  const unsigned flags;
  const int priority;
  const bool is_default;
  const uint64_t id;
  std::shared_ptr<Capture> capture;  // guarded by the machine's mutex

 private:
  struct Item {
    Work work;
    std::vector<Done> after;
    Done done;
    Kind kind = Kind::kOther;
    uint64_t bytes = 0;
  };
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  Done newest_;
  bool started_ = false;  // the worker; a program makes many streams that it never uses
  bool closed_ = false;
};
using StreamPtr = std::shared_ptr<Stream>;

class Machine {
 public:
  Machine();

  int devices() const { return devices_; }
  Memory& memory() { return memory_; }

  // The calling thread's device: -1 without a context.
  static int current();
  static void setCurrent(int device);
  // As the runtime does: a thread without a context gets device 0's.
  int use();
  void activate(int device);
  bool active(int device) const;
  uint64_t contexts() const;

  Result createStream(unsigned flags, int priority, void** stream);
  Result destroyStream(void* stream);
  Result createEvent(unsigned flags, void** event);
  Result destroyEvent(void* event);

  // nullptr for what is no stream (any more). 0, 1 and 2 are the default stream of the calling
  // thread's device.
  StreamPtr stream(void* handle);
  std::shared_ptr<Event> event(void* handle);

  // `done`, if given, is left alone when the work went into a graph.
  Result enqueue(void* stream, Work work, Done* done = nullptr, Kind kind = Kind::kOther,
                 uint64_t bytes = 0);
  Result enqueueKernel(void* stream, Work body);  // takes the time of a kernel
  // One or several rows. Waits for the copy where CUDA does: `blocking`, or pageable memory on the
  // host.
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    size_t rows = 1;
    size_t to_pitch = 0;
    size_t from_pitch = 0;
  };
  Result copy(const Copy& copy, void* stream, bool blocking);
  Result fill(void* to, unsigned value, size_t width, size_t count, void* stream, bool blocking);

  Result record(void* event, void* stream);
  Result waitFor(void* stream, void* event);
  Result query(void* event);
  Result synchronizeEvent(void* event);
  Result elapsed(void* begin, void* end, float* ms);
  Result queryStream(void* stream);
  Result synchronizeStream(void* stream);
  Result synchronizeDevice(int device);

  Result beginCapture(void* stream, int mode);
  Result endCapture(void* stream, Graph** graph);
  Result captureStatus(void* stream, int* status, uint64_t* id);
  int exchangeMode(int mode);  // the calling thread's
  // For a call that is unsafe during a capture: breaks the captures that forbid it to this thread.
  Result unsafeCall();
  Result launchGraph(const Graph& graph, void* stream);

  // See control.h.
  void setCopyRate(uint64_t bytes_per_sec) { copy_rate_.store(bytes_per_sec); }
  void setKernelUs(uint64_t us) { kernel_us_.store(us); }
  void setContention(unsigned percent) { contention_percent_.store(percent < 100 ? percent : 99); }
  void setJitter(uint64_t max_us, uint64_t seed);
  void hold(bool on);
  // By a worker, before a piece of work.
  void pause();
  // By a worker: a kernel's time, which is longer beside copies.
  void spend(int device, uint64_t us);

 private:
  StreamPtr defaultStream(int device);
  std::vector<Done> legacyOrder(const Stream& stream);
  Result unsafeLocked();
  static void captured(const Stream& on);

  const int devices_;
  Memory memory_;
  std::atomic<uint64_t> copy_rate_, kernel_us_;
  std::atomic<unsigned> contention_percent_;
  std::array<std::atomic<int>, 64> copies_{};  // under way, by device

  mutable std::mutex mutex_;
  uint64_t contexts_ = 0;
  std::unordered_map<void*, StreamPtr> streams_;
  std::unordered_map<int, StreamPtr> default_;
  std::unordered_map<void*, std::shared_ptr<Event>> events_;
  std::vector<std::shared_ptr<Capture>> captures_;
  uint64_t next_id_ = 1;

  std::mutex pace_mutex_;
  std::condition_variable unheld_;
  bool held_ = false;
  uint64_t jitter_us_ = 0;
  std::mt19937_64 random_;
};

Machine& machine();  // of this process; never destroyed, as workers may outlive static objects

}  // namespace reft::fake

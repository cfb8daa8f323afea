// Copies regions on CUDA devices, and those on the host beside them.
//
// A chunk is copied in two parts: it is fetched (its copies are enqueued on the copy stream, bytes
// on the host are copied at once) and it lands (its copies have ended, and its bytes are hashed).
// For a chunk of a parity, the device adds up what the cells under it have there; what they have on
// the host is read at the same time, and added when the chunk lands.
// The gate holds the streams that train, not the host: a chunk is taken and fetched under one lock,
// so all that was fetched before the gate is in the copy streams, and work behind the gate cannot
// overtake it.
//
// Extras travel beside the chunks: parts of the objects, and the lines that replicas are compared
// by. They are few and have no tier.
//
// Threads: as in copier.h. A copy that never ends keeps its chunk; settle() bounds the wait.
// Errors: as in copier.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "intercept/base/mutex.h"
#include "snapshot/device/device_tracker.h"
#include "snapshot/device/replica_lines.h"
#include "snapshot/engine/capture_input.h"
#include "snapshot/engine/copier.h"
#include "snapshot/state/parity_cells.h"

namespace reft {

class DeviceCopier final : public Copier {
 public:
  // `tracker` has begun this snapshot; it outlives the copier.
  DeviceCopier(CopyContext& context, SnapshotJob& job, DeviceTracker& tracker,
               const CaptureInput& input);

  Way way(const Wanted& wanted) const override;
  bool hostWaits() const override { return false; }
  bool placed() const override { return placed_; }
  void atPoint() override EXCLUDES(mutex_);
  void gate(std::span<const DeviceStream> streams) override EXCLUDES(mutex_);
  bool copyNext(Tier tier, const Sink& sink) override EXCLUDES(mutex_);
  using Copier::copyNext;
  void place() override EXCLUDES(mutex_);
  bool hasWork() const override { return Copier::hasWork() || unlanded_.load() != 0; }

  static constexpr const char* kCapturing =
      "the optimizer's step is captured into a graph, or another stream is and forbids the legacy "
      "stream's use";

 private:
  // A chunk, or the extras, whose copies are enqueued.
  struct Fetched {
    uint64_t chunk = 0;
    Tier tier = Tier::kAtOnce;
    int64_t begin_ns = 0;
    bool extras = false;
    size_t calls = 0;         // of the driver, that enqueued copies
    uint64_t host_bytes = 0;  // copied at once
    // Of a parity's chunk: what cells have on the host, with where it is added in the chunk.
    std::vector<std::pair<uint64_t, std::vector<std::byte>>> host_parts;
    std::vector<DeviceCopy::Ticket> tickets;  // when they have landed, so has the chunk
  };

  // True: the streams wait for the extras, which may be written before the gate.
  bool fetchExtras() REQUIRES(mutex_);
  void landExtras();
  // False: the copy cannot be enqueued.
  bool fetch(Fetched& fetched, int device, const std::byte* from, std::byte* to, uint64_t bytes);
  // False: not all of it is there.
  static bool fetchFromHost(const std::byte* from, std::byte* to, uint64_t bytes);
  bool fetchChunk(Fetched& fetched) REQUIRES(mutex_);
  bool fetchPieces(Fetched& fetched) REQUIRES(mutex_);
  bool fetchParity(Fetched& fetched) REQUIRES(mutex_);
  // Of the cells under [begin, end) of this member's parity, which is `at` bytes into the payload.
  bool fetchSum(Fetched& fetched, const ParityCells& cells, uint32_t own, uint64_t begin,
                uint64_t end, uint64_t at) REQUIRES(mutex_);
  // `fetched` has work on the device.
  static void use(Fetched& fetched, int device);
  // False: all chunks are fetched.
  bool fetchOne(Tier tier) REQUIRES(mutex_);
  // Fetches up to `bytes` of an order, and if `limited` no more than may be under way. Returns the
  // bytes that were fetched.
  uint64_t fetchBatch(const DevicePlacement::Order& order, uint64_t bytes, bool limited)
      REQUIRES(mutex_);
  // Fetches what the placement has ordered by now.
  void fetchOrdered(bool limited) REQUIRES(mutex_);
  std::optional<uint32_t> stamp() REQUIRES(mutex_);
  // All copies of `fetched` are enqueued, unless not `fine`: it is to be landed.
  void submit(Fetched& fetched, bool fine) REQUIRES(mutex_);
  Fetched takeFetched() REQUIRES(mutex_);

  bool hasLanded(const Fetched& fetched) const;
  // False: nothing tells when it lands, and no further snapshot begins.
  bool awaitLanding(const Fetched& fetched);
  // Returns the bytes that have landed.
  uint64_t land(const Fetched& fetched) EXCLUDES(mutex_);
  // Lands the oldest chunk that is under way, if it has arrived.
  bool landNext() EXCLUDES(mutex_);

  DeviceTracker& tracker_;
  DeviceCopy& copy_;
  const std::vector<int> devices_;  // of each region, -1: the host
  const std::vector<DeviceStream> streams_;
  const std::vector<DeviceStream> writers_;
  const std::vector<ObjectPart> parts_;
  const size_t object_bytes_;
  const bool placed_;  // DevicePlacement orders the copies and learns their times
  // By group, of those with regions on devices.
  std::vector<std::pair<size_t, std::vector<ReplicaLine>>> replica_lines_;
  std::byte* extra_memory_ = nullptr;

  Mutex mutex_;  // a chunk is taken and fetched under it in one go: gate() relies on it
  std::deque<Fetched> to_land_ GUARDED_BY(mutex_);  // fetched, and no thread waits for it yet
  size_t calls_ GUARDED_BY(mutex_) = 0;             // of the chunks in to_land_
  std::optional<DevicePlacement::Order> order_ GUARDED_BY(mutex_);  // under way, with what is left
  std::atomic<size_t> unlanded_{0};                                 // length of to_land_
};

}  // namespace reft

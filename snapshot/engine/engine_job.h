// What the sources of SnapshotEngine share: the plan of a table, and the snapshot that is under
// way.
//
// Threads and locks: see each member. Errors: none.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "snapshot/device/device_copy.h"
#include "snapshot/device/replica_lines.h"
#include "snapshot/engine/engine.h"
#include "snapshot/vault/hash.h"

namespace reft {

inline constexpr uint32_t kVerifySamples =
    8192;  // cache lines per snapshot; about half a millisecond
inline constexpr uint32_t kMinPieceSamples = 4;

// A table with what is derived from it once.
struct SnapshotEngine::Plan {
  SnapshotTable table;
  std::string json;
  uint64_t json_hash = 0;
  uint64_t chunk_count = 0;
  uint64_t early_chunks = 0;
  std::vector<uint32_t> first_piece;  // per chunk: the first piece that reaches into it
  std::vector<uint32_t> samples;      // per piece
  std::vector<std::vector<uint32_t>> group_regions;
  std::vector<std::vector<uint64_t>> group_bytes;  // of each of them

  explicit Plan(SnapshotTable t) : table(std::move(t)), json(table.toJson()) {
    json_hash = hashBytes(json.data(), json.size());
    chunk_count = (table.payload_bytes + table.chunk_bytes - 1) / table.chunk_bytes;
    early_chunks = table.early_bytes / table.chunk_bytes;
    uint32_t piece = 0;
    for (uint64_t chunk = 0; chunk < chunk_count; ++chunk) {
      const uint64_t begin = chunk * table.chunk_bytes;
      while (piece < table.pieces.size() &&
             table.pieces[piece].payload_offset +
                     (table.pieces[piece].end - table.pieces[piece].begin) <=
                 begin) {
        ++piece;
      }
      first_piece.push_back(piece);
    }
    for (const Piece& p : table.pieces) {
      const uint64_t bytes = p.end - p.begin;
      samples.push_back(static_cast<uint32_t>(std::max<uint64_t>(
          kMinPieceSamples, kVerifySamples * bytes / std::max<uint64_t>(table.payload_bytes, 1))));
    }
    group_regions.resize(table.groups.size());
    group_bytes.resize(table.groups.size());
    for (uint32_t r = 0; r < table.regions.size(); ++r) {
      if (table.regions[r].group >= 0) {
        group_regions[static_cast<size_t>(table.regions[r].group)].push_back(r);
        group_bytes[static_cast<size_t>(table.regions[r].group)].push_back(table.regions[r].bytes);
      }
    }
  }
};

// A chunk whose copies were asked for.
struct SnapshotEngine::Fetched {
  uint64_t chunk = 0;
  Tier tier = Tier::kAtOnce;
  int64_t begin_ns = 0;
  bool aside = false;       // no chunk, but parts of the objects and lines of replicas
  size_t calls = 0;         // of the driver, that asked for copies
  uint64_t host_bytes = 0;  // copied at once
  std::vector<DeviceCopy::Ticket> tickets;  // when they have landed, so has the chunk
};

struct SnapshotEngine::Job {
  std::shared_ptr<const Plan> plan;
  int64_t step = 0;
  int slot = -1;
  int node = -1;  // of the thread that trains
  std::vector<const std::byte*> addresses;
  std::vector<uint64_t> versions_at_capture;
  std::shared_ptr<const VersionReader> versions;
  std::vector<uint64_t> sample_hashes;  // per piece
  std::vector<uint64_t> group_digests;
  uint64_t cut = 0;
  uint8_t wish = 0;
  std::atomic<uint64_t> next_chunk{0};
  std::atomic<uint64_t> chunks_left{0};  // and one more for what is fetched aside
  std::atomic<bool> failed{false};
  std::atomic<bool> released{false};  // whoever is there copies, nothing is held back
  std::atomic<bool> at_gate{false};
  bool checkable = false;
  // In this order; guarded by the engine's mutex.
  bool copied = false;  // all chunks
  bool checked =
      false;  // and the versions were compared: nothing of the live memory is needed any more
  bool claimed = false;   // somebody seals or drops it
  bool given_up = false;  // waiting for its device took too long, once
  bool finished = false;
  PlacementPolicy policy = PlacementPolicy::kEager;
  std::atomic<int64_t> copy_ns{0};
  std::mutex late_mutex;
  std::vector<uint32_t> late;

  // Only with regions on devices.
  bool onDevice() const { return !devices.empty(); }
  bool isOnDevice(uint32_t region) const { return onDevice() && devices[region] >= 0; }
  // Whether samples of it are compared: the host cannot read a device at the program point without
  // waiting for it.
  bool sampled(uint32_t region) const {
    return !plan->table.regions[region].early && !isOnDevice(region);
  }
  std::vector<int> devices;  // of each region, -1: the host's; empty: none is on a device
  std::vector<DeviceStream> streams;
  std::vector<DeviceStream>
      writers;  // beside them: other optimizers', and those that the script holds
  std::vector<ObjectPart> parts;
  size_t object_bytes = 0;
  std::vector<std::pair<size_t, std::vector<ReplicaLine>>>
      replica_lines;            // by group, of those with regions on devices
  std::mutex fetch_mutex;       // a chunk is taken and its copies are asked for in one go: the gate
                                // relies on it
  std::deque<Fetched> to_land;  // asked for, and nobody looks for it yet; guarded by fetch_mutex
  std::atomic<size_t> unlanded{0};  // length of to_land
  size_t calls = 0;                 // of those in to_land; guarded by fetch_mutex
  bool left_to_gate = false;        // a control step's: nothing is copied beside training
  bool placed =
      false;  // its copies are ordered by a DevicePlacement, which knows when they were made
  // What is being asked for, and how much of it still is; guarded by fetch_mutex.
  std::optional<DevicePlacement::Order> order;
  bool compared = false;  // the versions, by a gate that did not wait for the copies; guarded by
                          // the engine's mutex

  // Chunks to be copied, or to be looked for.
  bool hasWork() const { return next_chunk.load() < plan->chunk_count || unlanded.load() != 0; }
};

}  // namespace reft

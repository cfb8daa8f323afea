// Live regions by their numbers in the table of a snapshot, for writing them.
//
// Threads: one at a time. Errors: InvalidArgument for a region that does not exist, or is of
// another size; what `upload` throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "snapshot/state/table.h"

namespace reft {

// A region as the running script has it.
struct LiveRegion {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  std::byte* memory = nullptr;  // nullptr: on a device; `upload` writes it
};

// Writes bytes to `begin` of a live region on a device before it returns.
using Upload = std::function<void(size_t region, uint64_t begin, std::span<const std::byte> bytes)>;

using HostBuffer = std::unique_ptr<std::byte[]>;
HostBuffer hostBuffer(uint64_t bytes);

class LiveWriter {
 public:
  // `decoded`: groups whose bytes are read again while they are restored. What they have on devices
  // is written on the host first, and uploaded by finish().
  LiveWriter(const SnapshotTable& table, const std::vector<LiveRegion>& live, const Upload& upload,
             const std::set<int32_t>& decoded);

  // nullptr: on a device.
  std::byte* hostAddress(const ShardRange& range) const;
  void upload(const ShardRange& range, const std::byte* bytes) const;
  // Writes ranges whose bytes follow each other in `bytes`.
  void scatter(const std::vector<ShardRange>& ranges, const std::byte* bytes) const;
  // All is written.
  void finish();

 private:
  const std::vector<LiveRegion>& live_;
  const Upload& upload_;
  std::vector<size_t> live_of_;             // by region of the table
  std::map<uint32_t, HostBuffer> on_host_;  // by region of the table
};

}  // namespace reft

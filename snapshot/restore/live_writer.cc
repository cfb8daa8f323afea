#include "snapshot/restore/live_writer.h"

#include <cstring>

#include "intercept/base/error.h"

namespace reft {

HostBuffer hostBuffer(uint64_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

LiveWriter::LiveWriter(const SnapshotTable& table, const std::vector<LiveRegion>& live,
                       const Upload& upload, const std::set<int32_t>& decoded)
    : live_(live), upload_(upload) {
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < live.size(); ++i) {
    by_name.emplace(live[i].name, i);
  }
  for (uint32_t i = 0; i < table.regions.size(); ++i) {
    const RegionInfo& region = table.regions[i];
    const auto at = by_name.find(region.name);
    if (at == by_name.end() || live[at->second].bytes != region.bytes) {
      throw InvalidArgument("live region " + region.name, "absent or of another size",
                            "the regions of the snapshot");
    }
    live_of_.push_back(at->second);
    if (decoded.contains(region.group) && live[at->second].memory == nullptr) {
      on_host_.emplace(i, hostBuffer(region.bytes));
    }
  }
}

std::byte* LiveWriter::hostAddress(const ShardRange& range) const {
  if (const auto at = on_host_.find(range.region); at != on_host_.end()) {
    return at->second.get() + range.begin;
  }
  std::byte* const memory = live_[live_of_[range.region]].memory;
  return memory == nullptr ? nullptr : memory + range.begin;
}

void LiveWriter::upload(const ShardRange& range, const std::byte* bytes) const {
  upload_(live_of_[range.region], range.begin, {bytes, range.end - range.begin});
}

void LiveWriter::scatter(const std::vector<ShardRange>& ranges, const std::byte* bytes) const {
  for (const ShardRange& range : ranges) {
    if (std::byte* const to = hostAddress(range)) {
      std::memcpy(to, bytes, range.end - range.begin);
    } else {
      upload(range, bytes);
    }
    bytes += range.end - range.begin;
  }
}

void LiveWriter::finish() {
  for (const auto& [region, bytes] : on_host_) {
    upload({region, 0, live_[live_of_[region]].bytes}, bytes.get());
  }
  on_host_.clear();
}

}  // namespace reft

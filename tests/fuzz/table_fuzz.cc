// Text that claims to be the table of a snapshot. What is accepted must keep its promises: pieces
// in order and inside of region and payload, and the same table again after a round trip.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "intercept/base/error.h"
#include "snapshot/restore/inventory.h"
#include "snapshot/state/table.h"

namespace {

void require(bool condition) {
  if (!condition) {
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    reft::parseInventories({std::string(text)});
  } catch (const reft::Corruption&) {
  }
  try {
    const auto table = reft::SnapshotTable::fromJson(text);
    uint64_t end = 0;
    for (const reft::Piece& piece : table.pieces) {
      require(piece.region < table.regions.size());
      require(piece.begin <= piece.end && piece.end <= table.regions[piece.region].bytes);
      require(piece.payload_offset >= end && piece.payload_offset <= table.payload_bytes);
      end = piece.payload_offset + (piece.end - piece.begin);
      require(end >= piece.payload_offset && end <= table.payload_bytes);
    }
    for (size_t group = 0; group < table.groups.size(); ++group) {
      const auto shards = table.shardsOf(static_cast<int32_t>(group));
      require(shards.size() <= table.groups[group].ranks.size());
      table.holdsParityOf(static_cast<int32_t>(group));
    }
    require(reft::SnapshotTable::fromJson(table.toJson()).toJson() == table.toJson());
  } catch (const reft::Corruption&) {
  }
  return 0;
}

#include "snapshot/vault/vault_format.h"

#include <cstring>

#include "snapshot/vault/hash.h"

namespace reft {

uint64_t checkOf(const Superblock& block) {
  return hashBytes(&block, offsetof(Superblock, check));
}

uint64_t checkOf(const SlotExtent& extent, uint32_t index) {
  const uint64_t fields[3] = {extent.offset, extent.bytes, index};
  return hashBytes(fields, sizeof(fields), kSlotMagic);
}

uint64_t checkOf(const SlotHeader& header) {
  alignas(SlotHeader) char copy[sizeof(SlotHeader)];
  std::memcpy(copy, static_cast<const void*>(&header), sizeof(copy));
  std::memset(copy + offsetof(SlotHeader, state), 0, sizeof(header.state));
  std::memset(copy + offsetof(SlotHeader, check), 0, sizeof(header.check));
  return hashBytes(copy, sizeof(copy));
}

bool isValid(const SlotExtent& extent, uint32_t index, uint64_t fixed_bytes, uint64_t file_bytes) {
  return extent.check == checkOf(extent, index) && extent.offset >= fixed_bytes &&
         extent.offset % kPage == 0 && extent.bytes >= kPage && extent.bytes <= file_bytes &&
         extent.offset <= file_bytes - extent.bytes;
}

}  // namespace reft

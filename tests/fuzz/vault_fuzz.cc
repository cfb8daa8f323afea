// A vault with two snapshots whose bytes were mutated, as a killed or hostile writer may leave it.
// Whatever a reader then returns is read to the end; it may only ever throw Corruption.
//
// Bytes: u8 flags, then edits of 12 bytes: u32 place, u64 value. Bits of flags: 0..1 = checksums
// that are made to fit afterwards (superblock and extents; slot headers), so that the fuzzer gets
// past them; 2 = the file is cut short first.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/base/unique_fd.h"
#include "intercept/record/op_log.h"
#include "snapshot/restore/inventory.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "snapshot/vault/writer.h"

namespace {

using namespace reft;

constexpr uint64_t kChunk = 4096;
const VaultIdentity kIdentity{"fuzz", 1, 2};

std::vector<char> validVault() {
  const auto vault = Vault::create(kIdentity, 2, 16);
  for (uint32_t slot = 0; slot < 2; ++slot) {
    const SnapshotTable table = buildTable(
        1, 2,
        {{"w", "float32", {40, 25}, 4000, 100, 0, false}, {"b", "float32", {7}, 28, 4, -1, true}},
        {{"g", {0, 1}, {{0, 1}}}}, "aec", {{1, 0, 3}}, kChunk);
    const std::string json = table.toJson();
    const uint64_t chunks = (table.payload_bytes + kChunk - 1) / kChunk;
    vault->reserveSlot(slot, json.size(), 64, chunks, table.payload_bytes);
    vault->beginSlot(slot, slot, 1, json, hashBytes(json.data(), json.size()), kChunk,
                     table.payload_bytes, chunks);
    vault->putObjects(slot, "objects");
    for (uint64_t i = 0; i < chunks; ++i) {
      vault->chunkHashes(slot)[i] = hashBytes(vault->payload(slot) + i * kChunk,
                                              std::min(kChunk, table.payload_bytes - i * kChunk));
    }
    vault->sealSlot(slot, std::vector<uint64_t>{slot + 1}, 1);
  }
  std::vector<char> bytes(vault->bytes());
  if (::pread(vault->fd(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    std::abort();
  }
  return bytes;
}

template <typename T>
T load(const std::vector<char>& bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}
template <typename T>
void store(std::vector<char>& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

void fitSlot(std::vector<char>& bytes, uint64_t at) {
  if (at > bytes.size() || bytes.size() - at < sizeof(SlotHeader)) {
    return;
  }
  // Hashes of the table and the objects first: they lie in the header.
  for (const auto& [offset, size, hash] :
       {std::tuple{offsetof(SlotHeader, table_offset), offsetof(SlotHeader, table_bytes),
                   offsetof(SlotHeader, table_hash)},
        std::tuple{offsetof(SlotHeader, objects_offset), offsetof(SlotHeader, objects_bytes),
                   offsetof(SlotHeader, objects_hash)}}) {
    const auto from = load<uint64_t>(bytes, at + offset);
    const auto length = load<uint64_t>(bytes, at + size);
    const uint64_t room = bytes.size() - at;
    if (length <= room && from <= room - length) {
      store(bytes, at + hash, hashBytes(bytes.data() + at + from, length));
    }
  }
  char head[sizeof(SlotHeader)];
  std::memcpy(head, bytes.data() + at, sizeof(head));
  std::memset(head + offsetof(SlotHeader, state), 0, sizeof(uint32_t));
  std::memset(head + offsetof(SlotHeader, check), 0, sizeof(uint64_t));
  store(bytes, at + offsetof(SlotHeader, check), hashBytes(head, sizeof(head)));
}

void fitSuperblock(std::vector<char>& bytes) {
  store(bytes, offsetof(Superblock, check), hashBytes(bytes.data(), offsetof(Superblock, check)));
  for (uint32_t slot = 0; slot < kMaxSlots; ++slot) {
    const size_t at = offsetof(Superblock, extents) + slot * sizeof(SlotExtent);
    const uint64_t fields[3] = {load<uint64_t>(bytes, at), load<uint64_t>(bytes, at + 8), slot};
    store(bytes, at + 16, hashBytes(fields, sizeof(fields), kSlotMagic));
  }
}

uint64_t readAll(int fd) {
  uint64_t sum = 0;
  VaultReader reader(fd);
  reader.refresh();
  sum += reader.stats().steps.load();
  try {
    const OpLogReader log(reader.opLogArea(), reader.opLogBytes());
    sum += log.tail(100).size() + log.groups().size();
  } catch (const Corruption&) {
  }
  sum += reader.rawSlots().size();
  for (const SlotView& view : reader.slots()) {
    sum += reader.objects(view).size();
    sum += reader.verify(view).size();
    for (uint64_t i = 0; i < view.payload_bytes; i += 64) {
      sum += static_cast<uint64_t>(reader.payload(view)[i]);
    }
    try {
      const SnapshotTable table = reader.table(view);
      for (const Piece& piece : table.pieces) {
        if (piece.end > piece.begin) {
          sum += static_cast<uint64_t>(reader.payload(view)[piece.payload_offset]);
          sum += static_cast<uint64_t>(
              reader.payload(view)[piece.payload_offset + (piece.end - piece.begin) - 1]);
        }
      }
    } catch (const Corruption&) {
    }
    sum += reader.isUnchanged(view) ? 1 : 0;
  }
  std::vector<std::string> faults;
  sum += summarizeVerified(reader, faults).size();
  return sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<char> valid = validVault();
  if (size == 0) {
    return 0;
  }
  std::vector<char> bytes = valid;
  const uint8_t flags = data[0];
  for (size_t at = 1; at + 12 <= size; at += 12) {
    uint32_t place = 0;
    uint64_t value = 0;
    std::memcpy(&place, data + at, sizeof(place));
    std::memcpy(&value, data + at + 4, sizeof(value));
    // The upper byte of `place` aims: the superblock, a slot's header, a slot's table, or anywhere.
    const auto slot = load<SlotExtent>(
        valid, offsetof(Superblock, extents) + (place >> 24 & 1) * sizeof(SlotExtent));
    uint64_t target = place & 0xFFFFFF;
    switch (place >> 25 & 3) {
      case 0: target %= sizeof(Superblock); break;
      case 1: target = slot.offset + target % sizeof(SlotHeader); break;
      case 2: target = slot.offset + kPage + target % 700; break;
      default: break;
    }
    target %= bytes.size() - sizeof(value);
    if ((place & 0x80000000) != 0) {
      store(bytes, target, static_cast<char>(value));
    } else {
      store(bytes, target, value);
    }
  }
  if ((flags & 2) != 0) {
    for (uint32_t slot = 0; slot < 2; ++slot) {
      fitSlot(bytes,
              load<uint64_t>(bytes, offsetof(Superblock, extents) + slot * sizeof(SlotExtent)));
    }
  }
  if ((flags & 1) != 0) {
    fitSuperblock(bytes);
  }
  if ((flags & 4) != 0) {
    bytes.resize(bytes.size() * (flags >> 3) / 32);
  }
  UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::pwrite(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()) ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    std::abort();
  }
  volatile uint64_t sink = 0;
  try {
    sink = readAll(fd.get());
  } catch (const Corruption&) {
  }
  (void)sink;
  try {
    // A new incarnation of the rank may take it over, and write.
    const auto vault = Vault::adopt(std::move(fd), kIdentity);
    for (uint32_t slot = 0; slot < vault->slots(); ++slot) {
      vault->reserveSlot(slot, 10, 10, 2, 2 * kChunk);
      vault->beginSlot(slot, 9, 2, "0123456789", 1, kChunk, 2 * kChunk, 2);
      vault->putObjects(slot, "o");
      std::memset(vault->payload(slot), 1, 2 * kChunk);
      vault->chunkHashes(slot)[1] = 0;
      vault->sealSlot(slot, {}, 1);
    }
  } catch (const Corruption&) {
  }
  return 0;
}

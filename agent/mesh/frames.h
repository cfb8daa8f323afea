// What agents say to each other once they have shown that they are of one job (handshake.h).
//
// A frame: u32 magic 'RFTM', u16 type, u16 0, u32 bytes of the payload, payload, 32 bytes MAC. The
// MAC covers the number of the frame on its connection, the header and the payload, so no frame can
// be changed, left out or played back. All integers are little endian.
//
//   keeper → owner   kWant    the ranks whose slots it wants
//   owner → keeper   kOffer   the head of a sealed slot
//   keeper → owner   kSend    to send the offered slot; or kHeld, if it needs or takes no sending
//   owner → keeper   kBytes   the slot follows, without frames; the head has its hashes
//   keeper → owner   kHeld    what became of it
//   owner → keeper   kAll     all slots that there were when it asked have been offered; who wrote
//                             these vaults
//
// An owner offers one slot at a time on a connection.
//
// The hashes of a slot (XXH3) find what breaks by accident, not what is forged by who can change
// packets between nodes. With REFT_MESH_TLS=on no such change passes: all this is inside TLS then
// (tls.h). Without it, who can change packets is trusted, as gloo and NCCL trust him.
//
// Threads: a FrameReader belongs to one connection. Errors: Corruption for what no agent of this
// version sends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "intercept/link/sha256.h"
#include "snapshot/commit/commit_key.h"
#include "snapshot/vault/vault_format.h"

namespace reft::agent {

enum class MeshType : uint16_t {
  kWant = 1,
  kOffer = 2,
  kSend = 3,
  kBytes = 4,
  kHeld = 5,
  kAll = 6
};

constexpr uint32_t kMostMeshPayload = 128u << 10;
constexpr uint32_t kMostWanted = 4096;  // ranks

struct Want {
  int world = 0;
  std::vector<int> ranks;
};

// A sealed slot: what its header says, and hashes of what follows, in this order: table, small
// state, a hash per chunk, payload.
struct SlotHead {
  int32_t rank = 0;
  int32_t world = 0;
  int64_t step = 0;
  uint64_t incarnation = 0;
  uint64_t cut = 0;
  uint64_t replicas = 0;
  uint64_t table_bytes = 0, table_hash = 0;
  uint64_t objects_bytes = 0, objects_hash = 0;
  uint64_t chunk_count = 0, chunk_bytes = 0, chunk_hashes_hash = 0;
  uint64_t payload_bytes = 0;
  uint32_t group_count = 0;
  uint8_t proposal = 0;
  uint8_t plan_anew = 0;
  uint8_t has_committed = 0;  // the owner knows of a step of this incarnation that is committed
  uint8_t still_count = 0;
  uint64_t group_digests[kMaxGroupDigests] = {};
  // The sealed slots that the owner's vault has, this one included: copies of them may be needed.
  CommitKey still[kMaxSlots] = {};

  CommitKey key() const { return {step, incarnation}; }
  uint64_t bytes() const {
    return table_bytes + objects_bytes + chunk_count * sizeof(uint64_t) + payload_bytes;
  }
};

// What became of a slot that was sent.
enum class Kept : uint32_t {
  kNo = 0,     // it did not match its hashes, or there was no memory
  kYes = 1,    // every byte is there and was hashed
  kLater = 2,  // all room holds steps that may still be needed: offer it again after a commit
};

struct HeldSlot {
  int32_t rank = 0;
  Kept kept = Kept::kNo;
  int64_t step = 0;
  uint64_t incarnation = 0;
};

// A vault that an owner has.
struct VaultHead {
  int32_t rank = 0;
  uint32_t reserved = 0;
  uint64_t writer = 0;   // the attempt that had it last
  int64_t resumed = -1;  // the step from which that attempt went on; -1: none
};

std::string payloadOf(const Want& want);
std::string payloadOf(const SlotHead& head);
std::string payloadOf(const HeldSlot& held);
std::string payloadOf(const std::vector<VaultHead>& vaults);
// Each throws Corruption if the payload has another size, or a number is none that can be.
Want wantIn(std::string_view payload);
SlotHead slotHeadIn(std::string_view payload);
HeldSlot heldSlotIn(std::string_view payload);
std::vector<VaultHead> vaultHeadsIn(std::string_view payload);

struct MeshFrame {
  MeshType type = MeshType::kWant;
  std::string payload;
};

// Frames of one direction of a connection, on their way out.
class FrameSealer {
 public:
  explicit FrameSealer(const Sha256& key) : key_(key) {}
  std::string seal(MeshType type, std::string_view payload);

 private:
  Sha256 key_;
  uint64_t number_ = 0;
};

// Frames of one direction, as they arrive.
class FrameReader {
 public:
  explicit FrameReader(const Sha256& key) : key_(key) {}
  // How many bytes to read before the next call of take().
  size_t wants() const;
  // So many bytes, which the caller has read. A whole frame, once there is one.
  std::optional<MeshFrame> take(std::string_view bytes);

 private:
  Sha256 key_;
  uint64_t number_ = 0;
  std::string header_;  // empty: it comes next
};

}  // namespace reft::agent
